"""Bodies that are wrong, forged, or name somebody else's request, beside requests that are in order.

The one thing to know: a bad request may be refused or ignored, but it must not change what others get, and fields that are a
server's own (rooms, transfer parameters, slots, other people's ids) must have no effect on an answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from hermetic.audit.exchange import Answer, Ask
from hermetic.audit.scenarios.asking import (
    NORMAL,
    SHORT,
    again_and_again,
    asks,
    copy,
    quiet,
    some,
    still_serves,
    text_endpoints,
)
from hermetic.audit.scenarios.registry import scenario
from hermetic.audit.stage import Stage, changed

# ------------------------------------------------------------------------------------ ids


def _named(stage: Stage, ask: Ask, label: str) -> Ask:
    """`ask` under a client's request id, in each place where engines look for one."""
    extra = {"request_id": label} if stage.learned.engine == "vllm" else {}
    return changed(ask, request_id=label, extra={**ask.extra, **extra})


@scenario(
    "request-ids",
    "Uses one request id for several tenants: in flight at once, again when it is over, and again right after a cancel.",
    evidence=("marker", "differential", "liveness"),
    order=40,
)
async def request_ids(stage: Stage) -> None:
    known = [copy(stage, stage.tenant()) for _ in range(2)]
    alone = await quiet(stage, known)
    async for number in stage.rounds():
        label = f"audit-{stage.random.getrandbits(64):016x}"
        if number % 3 == 2:  # an id of a request whose client has left
            long = again_and_again(stage, stage.tenant())
            await stage.ask(
                changed(
                    _named(stage, long, label), leave_tokens=2 if long.stream else None, leave_seconds=2.0
                )
            )
        same_id = [_named(stage, copy(stage, stage.tenant(), max_tokens=SHORT), label) for _ in range(3)]
        came = await stage.together([*same_id, *(_named(stage, ask, label) for ask in known)])
        _unchanged(stage, alone, came[3:], "without an id, and under an id that others use at the same time")
        # And again when all of it is over: somebody new, then those that had it.
        await stage.ask(_named(stage, copy(stage, stage.tenant(), max_tokens=SHORT), label))
        last = [await stage.ask(_named(stage, ask, label)) for ask in known]
        _unchanged(stage, alone, last, "without an id, and under an id that others have used before")
    await still_serves(stage, "after request ids had been used twice")


def _unchanged(stage: Stage, alone: Sequence[Answer], again: Sequence[Answer], why: str) -> None:
    """What was refused for its field was in order to refuse; what was answered has to be the same answer."""
    for before, after in zip(alone, again, strict=True):
        if after.how == "answered":
            stage.same(before, after, why)


def _not_all(stage: Stage, played: int, every: int, what: str) -> None:
    """Say so where not each of several kinds has been sent."""
    if played < every:
        stage.note(f"{every - played} of {every} {what} had no turn in the time there was")


# ------------------------------------------------------------------------------------ forged fields


def forgeries(stage: Stage, victim: Ask) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    """What it is, fields of the body, headers: things that only a server's own parts may say. None asks for more work."""
    draw = stage.random
    far = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "0", "remote_block_ids": [0, 1, 2],
           "remote_host": "127.0.0.1", "remote_port": 9}  # fmt: skip
    own_label = f"audit-{draw.getrandbits(64):016x}"
    forged: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("another's rid", {"rid": victim.request_id or own_label}, {}),
        ("another's session", {"session_id": victim.tenant, "session_params": {"id": victim.tenant, "rid": "0"}}, {}),
        ("a cache hint", {"prompt_cache_key": victim.tenant, "cached_tokens": 4096, "cache_prompt": True}, {}),
        ("another's slot", {"id_slot": 0, "slot_id": 0}, {}),
        ("another's context", {"context": [1, 2, 3, 4], "keep_alive": 60}, {}),
        ("another's tenant", {"tenant": victim.tenant, "user": victim.tenant, "scope": victim.tenant}, {}),
        ("a ticket", {"ticket": 1, "attempt": 1, "incarnation": 1, "lineage": "00" * 16}, {}),
        ("a data-parallel rank", {"data_parallel_rank": 0, "routed_dp_rank": 0}, {"X-data-parallel-rank": "0"}),
        ("forwarded identity", {}, {"X-Tenant": victim.tenant, "X-User-Id": victim.tenant, "X-Session-Id": victim.tenant}),
    ]  # fmt: skip
    if (
        stage.learned.facts.get("pair") is None
    ):  # to a pair without a router these are the audit's own to send
        room = draw.getrandbits(40)
        forged += [
            ("a bootstrap room", {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9, "bootstrap_room": room}, {}),
            ("transfer parameters", {"kv_transfer_params": far}, {}),
            ("a remote decode", {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}, {}),
        ]  # fmt: skip
    return forged


@scenario(
    "forged-fields",
    "Sends fields that only a server's own parts may set (rooms, transfer parameters, slots, sessions of others): no effect.",
    evidence=("differential", "marker", "liveness"),
    order=42,
)
async def forged_fields(stage: Stage) -> None:
    known = copy(stage, stage.tenant())
    alone = await stage.alone(known)
    kinds: list[tuple[str, dict[str, Any], dict[str, str]]] = []
    every = played = 0
    # One round of the size is a few kinds; all of them have their turn even in the quick profile.
    async for number in stage.rounds(max(13, 2 * stage.size.rounds)):
        victim = again_and_again(
            stage, stage.tenant(), request_id=f"audit-{stage.random.getrandbits(64):016x}", max_tokens=NORMAL
        )
        if not kinds:
            kinds = forgeries(stage, victim)
            every = len(kinds)
            stage.random.shuffle(kinds)
        name, extra, headers = kinds.pop()
        if name == "another's rid":  # of the victim that is in flight now
            extra = {"rid": victim.request_id}
            headers = {"X-Request-Id": victim.request_id}
        forged = changed(known, extra={**known.extra, **extra}, headers=headers)
        if number % 2:
            after = await stage.ask(forged)
        else:
            _, after = await stage.together([victim, forged])
        _unchanged(stage, [alone], [after], f"without, and with {name} in the request")
        if after.how == "silent":
            await still_serves(stage, f"after a request with {name}")
        played += 1
    _not_all(stage, played, every, "forged fields")
    await still_serves(stage, "after forged fields")


# ------------------------------------------------------------------------------------ grammars


AT_ONCE = 4  # broken grammars beside good requests


def broken_grammars() -> list[dict[str, Any]]:
    """Structured output that cannot be compiled, in the ways that engines take it."""
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(40):
        deep = {"type": "array", "items": deep, "minItems": 3}
    return [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "never heard of"}},
        {"response_format": "json"},
        {"structured_outputs": {"regex": "([a-z"}},
        {"structured_outputs": {"grammar": "root ::= ("}},
        {"guided_regex": "(?P<open"},
        {"guided_json": "{not json"},
        {"regex": "([a-z"},
        {"ebnf": "root ::= missing"},
        {"json_schema": '{"type": "object", "properties": '},
        {"grammar": "root ::= "},
        {"stop": [""]},
        {"logit_bias": {"not a token": 1}},
    ]  # fmt: skip


def one_word(word: str) -> dict[str, Any]:
    """A schema to which one answer fits."""
    schema = {
        "type": "object",
        "properties": {"word": {"type": "string", "enum": [word]}},
        "required": ["word"],
        "additionalProperties": False,
    }
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "one", "schema": schema, "strict": True},
        }
    }


@scenario(
    "grammar",
    "Sends schemas and grammars that do not compile beside good requests, and schemas to which only the tenant's own word fits.",
    evidence=("differential", "marker", "liveness"),
    order=44,
)
async def grammar(stage: Stage) -> None:
    known = [copy(stage, stage.tenant()) for _ in range(2)]
    alone = await quiet(stage, known)
    structured = await _takes_schemas(stage)
    if not structured:
        stage.note("this server does not follow json_schema; only broken grammars were sent")
    broken = broken_grammars()
    stage.random.shuffle(broken)
    played = 0
    async for number in stage.rounds(max(stage.size.rounds, -(-len(broken) // AT_ONCE))):
        bad = [
            copy(stage, stage.tenant(), max_tokens=SHORT, extra=broken[(played + i) % len(broken)])
            for i in range(AT_ONCE)
        ]
        played += AT_ONCE
        tenants = [stage.tenant() for _ in range(max(2, some(stage, number) // 2) if structured else 0)]
        words = [tenant.words[0] for tenant in tenants]
        good = [
            _worded(stage, tenant.name, tenant.key, word) for tenant, word in zip(tenants, words, strict=True)
        ]
        for word, answer in zip(words, await quiet(stage, good[:4]), strict=False):
            stage.expects(answer, word, (), "its schema allows one word, alone")
        answers = await _beside_broken(stage, good, [*bad, *known], alone)
        for word, answer in zip(words, answers, strict=True):
            if answer.how == "answered":
                stage.expects(
                    answer,
                    word,
                    [w for w in words if w != word],
                    "its schema allows one word, beside other schemas",
                )
        await stage.ask(bad[0])
        stage.same(
            alone[0], await stage.ask(known[0]), "alone, and right behind a grammar that does not compile"
        )
    _not_all(stage, played, len(broken), "broken grammars")
    await still_serves(stage, "after grammars that do not compile")


def _worded(stage: Stage, name: str, key: int, word: str) -> Ask:
    return Ask(
        tenant=name,
        key=key,
        prompt=f"Give the word {word} as JSON.",
        endpoint=text_endpoints(stage)[0],
        max_tokens=2 * NORMAL,
        stream=stage.learned.streams,
        extra=one_word(word),
        within=stage.learned.bound,
    )


async def _takes_schemas(stage: Stage) -> bool:
    tenant = stage.tenant()
    answer = await stage.alone(_worded(stage, tenant.name, tenant.key, tenant.words[0]))
    try:
        return answer.how == "answered" and json.loads(answer.text) == {"word": tenant.words[0]}
    except ValueError:
        return False


async def _beside_broken(
    stage: Stage, good: Sequence[Ask], others: Sequence[Ask], alone: Sequence[Answer]
) -> list[Answer]:
    """All at once; the last of `others` are those whose quiet answers are `alone`. Answers of `good`."""
    came = await stage.together([*good, *others])
    for before, after in zip(alone, came[-len(alone) :], strict=True):
        stage.same(before, after, "alone, and beside grammars that do not compile")
    return came[: len(good)]


# ------------------------------------------------------------------------------------ malformed bodies


class Bad(NamedTuple):
    """A body; `never`: there is no reading of it that could be answered."""

    what: str
    body: bytes
    never: bool


def bad_bodies(model: str, endpoint: str, text: str) -> list[Bad]:
    """Bodies that are not in order. `text`: a prompt with the sender's markers in it. Some engines read past a wrong type of a field
    that has a default, so only what leaves nothing to answer is `never`."""
    place: dict[str, Any] = (
        {"messages": [{"role": "user", "content": text}]} if endpoint == "chat" else {"prompt": text}
    )
    good = {"model": model, "max_tokens": 8, "temperature": 0, **place}
    field = "messages" if endpoint == "chat" else "prompt"

    def with_(**fields: Any) -> bytes:
        return msgspec.json.encode({**good, **fields})

    def empty() -> bytes:
        return with_(
            **({"messages": [{"role": "user", "content": ""}]} if endpoint == "chat" else {"prompt": ""})
        )

    whole = msgspec.json.encode(good)
    number = whole.replace(b'"max_tokens":8', b'"max_tokens":1e999')
    return [
        Bad("an empty body", b"", True),
        Bad("half of a body", whole[: len(whole) // 2], True),
        Bad("a list instead of an object", b"[]", True),
        Bad("no JSON", b"prompt=" + text.encode()[:200], True),
        Bad("brackets without an end", b"[" * 5000, True),
        Bad("zero bytes", b"\0" * 64, True),
        Bad(f"a number as {field}", with_(**{field: 17}), True),
        Bad(f"an object as {field}", with_(**{field: {"text": text}}), True),
        Bad(f"no {field}", msgspec.json.encode({"model": model, "max_tokens": 8}), True),
        Bad("max_tokens in words", with_(max_tokens="many"), False),
        Bad("temperature in words", with_(temperature="hot"), False),
        Bad("max_tokens beyond any number", number, False),
        Bad("max_tokens of 10^18", with_(max_tokens=10**18), False),
        Bad("max_tokens of -5", with_(max_tokens=-5), False),
        Bad("max_tokens of 0", with_(max_tokens=0), False),
        Bad("temperature of -1", with_(temperature=-1), False),
        Bad("n of 0", with_(n=0), False),
        Bad("invalid UTF-8", whole.replace(text.encode()[:8], b"\xff\xfe\xc3\x28", 1), False),
        Bad("half a surrogate pair", whole.replace(text.encode()[:8], b"\\ud800", 1), False),
        Bad("a byte order mark", b"\xef\xbb\xbf" + whole, False),
        Bad("an empty prompt", empty(), False),
    ]  # fmt: skip


@scenario(
    "malformed",
    "Sends bodies that are no request (half a JSON, wrong types, huge numbers, invalid UTF-8, no prompt) beside good ones.",
    evidence=("semantics", "differential", "marker", "liveness"),
    order=46,
)
async def malformed(stage: Stage) -> None:
    known = [copy(stage, stage.tenant(), max_tokens=SHORT) for _ in range(2)]
    alone = await quiet(stage, known)
    for endpoint in text_endpoints(stage):
        tenant = stage.tenant()
        bodies = bad_bodies(stage.learned.model, endpoint, tenant.copy_task())
        stage.random.shuffle(bodies)
        asked = [
            # Some of them may be answered at great length, which nobody needs: leave then.
            asks(stage, tenant, bad.what, endpoint=endpoint, raw=bad.body, stream=False, logprobs=False,
                 leave_seconds=None if bad.never else min(10.0, stage.learned.bound))
            for bad in bodies
        ]  # fmt: skip
        for at in range(0, len(bodies), 6):
            if at and stage.left() <= 0:
                stage.note("not every malformed body had its turn in the time there was")
                break
            part = slice(at, at + 6)
            came = await stage.together([*asked[part], *known])
            _refusals(stage, bodies[part], came)
            for before, after in zip(alone, came[-2:], strict=True):
                stage.same(before, after, "alone, and beside malformed bodies")
        # The sequential form: a few of them, and a good request right behind each.
        for bad, ask in list(zip(bodies, asked, strict=True))[: 2 * stage.size.rounds]:
            if stage.left() <= 0:
                break
            _refusals(stage, [bad], [await stage.ask(ask)])
            stage.same(alone[0], await stage.ask(known[0]), f"alone, and right behind {bad.what}")
    await still_serves(stage, "after malformed bodies")


def _refusals(stage: Stage, bodies: Sequence[Bad], came: Sequence[Answer]) -> None:
    """An answer without a word is in order: to Ollama no prompt says that the model is to be loaded."""
    for bad, answer in zip(bodies, came, strict=False):
        if bad.never and (answer.text or answer.how != "answered"):
            stage.must_refuse(answer, 0, f"{bad.what}: nothing could be answered to it")


SMALL = (" ", "\n", ".", "the", "a a", "")


@scenario(
    "next-to-nothing",
    "Asks with prompts of a word, of spaces, of nothing, after and beside others' long ones: nothing of theirs may be told.",
    evidence=("marker", "liveness"),
    order=18,
)
async def next_to_nothing(stage: Stage) -> None:
    endpoints = text_endpoints(stage)
    async for number in stage.rounds(2 * stage.size.rounds):
        endpoint = endpoints[number % len(endpoints)]
        victims = [
            copy(stage, stage.tenant(), tokens=100, endpoint=endpoint, max_tokens=SHORT) for _ in range(2)
        ]
        small = [
            asks(stage, stage.tenant(), prompt, endpoint=endpoint, max_tokens=SHORT)
            for prompt in stage.random.sample(SMALL, 3)
        ]
        if number % 2:
            await stage.together([*victims, *small])
            continue
        await stage.ask(victims[0])
        for ask in small:
            await stage.ask(ask)
    await still_serves(stage, "after prompts of next to nothing")


__all__ = ["Bad", "bad_bodies", "broken_grammars", "forgeries", "one_word"]
