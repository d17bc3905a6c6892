"""Learning a server: its edges, its speed and its noise, from what it does and not from what it says."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_endpoint import Request, ScriptedEndpoint, SmallEngine, Wire, chat_event, serving

from hermetic.audit import openings
from hermetic.audit.edges import MAX_SILENT, MAX_WALKED, Tried, find_edge, numbers
from hermetic.audit.exchange import Answer, Ask, Token, Usage
from hermetic.audit.learned import Edge, Learned
from hermetic.audit.openings import learn, leaves_out, measure
from hermetic.audit.target import TargetError, TargetOptions, open_target

# ------------------------------------------------------------------------------------ the search


class Pool:
    """Accepts up to `edge`, but for `hangs`; counts what it is asked."""

    def __init__(self, edge: int, hangs: tuple[int, ...] = (), said: str = "") -> None:
        self.edge, self.hangs, self.said = edge, hangs, said
        self.asked: list[int] = []

    async def probe(self, length: int) -> Tried:
        self.asked.append(length)
        if length in self.hangs:
            return Tried("silent")
        return Tried("accepted" if length <= self.edge else "refused", self.said)


def search(pool: Pool, good: int = 1, start: int = 64, most: int = 1 << 20, **more: Any) -> Any:
    return asyncio.run(find_edge(pool.probe, good, start, most, **more))


@given(st.integers(1, 1 << 20), st.integers(2, 4000), st.lists(st.integers(0, 1 << 21), max_size=5))
def test_the_edge_is_found_wherever_it_is_and_whatever_was_hinted(edge: int, start: int, hints: list[int]):
    pool = Pool(edge)
    found = search(pool, start=start, hints=hints, most=1 << 22)
    assert (found.accepted, found.refused) == (edge, edge + 1)
    assert len(pool.asked) == len(set(pool.asked))
    assert len(pool.asked) <= 22 + 21 + 2 * len(hints)


def test_a_hint_that_is_right_costs_three_probes():
    pool = Pool(4095)
    search(pool, start=4160, hints=[4096, 4095])
    assert pool.asked == [4160, 4096, 4095]


def test_a_refusal_that_names_what_it_was_sent_a_little_less_is_not_walked_down():
    """A server that counts 99 tokens where we count 100, and says so each time before it says its limit."""
    asked: list[int] = []

    async def probe(length: int) -> Tried:
        asked.append(length)
        return (
            Tried("accepted")
            if length <= 2042
            else Tried("refused", f"{int(length * 0.99)} is more than 2042")
        )

    def told(said: str) -> list[int]:
        return [n + more for n in numbers(said) for more in (0, 1)]

    found = asyncio.run(find_edge(probe, 40, 8256, 1 << 20, (), told))
    assert (found.accepted, found.refused) == (2042, 2043)
    assert len(asked) <= MAX_WALKED + 4


def test_a_refusal_that_names_the_limit_is_believed_only_as_a_hint():
    right, wrong = Pool(4095, said="the limit is 4096"), Pool(4095, said="the limit is 3000")
    for pool in (right, wrong):
        found = search(
            pool, start=8192, told=lambda said: [n + more for n in numbers(said) for more in (0, -1, 1)]
        )
        assert (found.accepted, found.refused) == (4095, 4096)
    assert len(right.asked) < len(wrong.asked)
    assert len(right.asked) == 3


def test_a_refusal_that_names_what_was_sent_is_not_walked_down_one_by_one():
    class Echo(Pool):
        async def probe(self, length: int) -> Tried:
            tried = await super().probe(length)
            return Tried(tried.verdict, f"the prompt has {length} tokens")

    pool = Echo(1000)
    found = search(
        pool, start=8192, told=lambda said: [n + more for n in numbers(said) for more in (0, -1, 1)]
    )
    assert (found.accepted, found.refused) == (1000, 1001)
    assert len(pool.asked) <= 13 + 2 * MAX_WALKED + 4


@given(st.integers(100, 5000), st.sets(st.integers(1, 6), max_size=2))
def test_silent_lengths_below_the_edge_are_noted_and_walked_around(edge: int, below: set[int]):
    """As on a server that accepts a prompt which fills its pool and then never starts it."""
    hangs = tuple(edge + 1 - n for n in sorted(below) if sorted(below) == list(range(1, len(below) + 1)))
    pool = Pool(edge, hangs)
    found = search(pool, start=6000)
    assert found.refused == edge + 1
    assert found.accepted == edge - len(hangs)
    assert sorted(found.silent) == sorted(hangs)
    assert len(pool.asked) == len(set(pool.asked))


def test_a_server_that_goes_silent_over_its_edge_costs_a_few_probes_only():
    pool = Pool(1000, hangs=tuple(range(1001, 20_000)))
    found = search(pool, start=4096)
    assert (found.refused, len(found.silent)) == (None, MAX_SILENT)
    assert found.accepted <= 1000
    assert "neither an answer nor an error" in found.why


def test_a_search_ends_where_there_is_no_time_and_says_so():
    pool = Pool(100_000)
    found = search(pool, start=64, can=lambda length: "too long" if length > 5000 else "")
    assert (found.refused, found.why) == (None, "too long")
    assert found.accepted == 4096  # 64 doubled as often as it goes


def test_nothing_refused_is_no_edge():
    found = search(Pool(1 << 30), start=64, most=4096)
    assert (found.accepted, found.refused) == (4096, None)
    assert "nothing up to 4096 was refused" in found.why


def test_numbers_are_read_with_commas_and_not_out_of_versions():
    assert numbers("at most 8,192 tokens; you sent 9000 (v1.5)") == [8192, 9000, 5]


# ------------------------------------------------------------------------------------ a whole server


async def learned_of(
    engine: Any, options: TargetOptions | None = None, **more: Any
) -> tuple[Learned, ScriptedEndpoint]:
    endpoint = ScriptedEndpoint(engine, **more)
    async with serving(endpoint), open_target([endpoint.url], options) as target:
        return await learn(target, options or TargetOptions(learning=20.0)), endpoint


async def test_the_exact_edge_of_each_endpoint_is_found_in_tokens():
    engine = SmallEngine(limit=1000, template=10)
    learned, _ = await learned_of(engine, entry={"max_model_len": 1000})
    for endpoint in ("chat", "completions"):  # of prompt, with one token of answer: 999 + 1
        assert (learned.edges[endpoint].accepted, learned.edges[endpoint].refused) == (999, 1000)
    assert max(engine.accepted) == 999
    assert learned.claimed == 1000
    assert (learned.token_ids, learned.streams, learned.logprobs, learned.usage) == (True, True, True, True)
    assert "maximum context length" in learned.edges["chat"].said
    assert learned.longest("chat") == 999


async def test_what_is_claimed_is_not_believed():
    """A pool smaller than the advertised context, as in the incident."""
    engine = SmallEngine(limit=700, said="no")
    learned, _ = await learned_of(engine, entry={"max_model_len": 8192, "owned_by": "vllm"})
    assert (learned.claimed, learned.engine) == (8192, "vllm")
    assert (learned.edges["completions"].accepted, learned.edges["completions"].refused) == (699, 700)


async def test_without_a_claim_the_edge_is_found_by_doubling():
    learned, _ = await learned_of(SmallEngine(limit=5000, said="too long"))
    assert (learned.edges["chat"].accepted, learned.edges["chat"].refused) == (4999, 5000)


async def test_a_server_that_counts_nothing_has_its_edges_in_words():
    engine = SmallEngine(limit=1000, usage=False, template=10)
    learned, _ = await learned_of(engine)
    assert not learned.usage
    assert (learned.edges["chat"].accepted, learned.edges["chat"].refused) == (
        989,
        990,
    )  # and 10 of the template
    assert (learned.edges["completions"].accepted, learned.edges["completions"].refused) == (999, 1000)
    assert "words" in learned.facts["edges in words"]


async def test_a_server_with_one_endpoint_is_learned_with_it():
    for engine, has in ((SmallEngine(chat=False), "completions"), (SmallEngine(completions=False), "chat")):
        learned, _ = await learned_of(engine)
        assert learned.endpoints == (has,)
        assert set(learned.edges) == {has}
        assert learned.token_ids == (has == "completions")


async def test_a_server_without_streams_logprobs_or_ids_is_learned_all_the_same():
    learned, _ = await learned_of(SmallEngine(streams=False, logprobs=False, ids=False))
    assert (learned.streams, learned.logprobs, learned.token_ids) == (False, False, False)
    assert learned.edges["completions"].accepted == 999


async def test_a_length_that_never_answers_is_silent_and_the_rest_is_learned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openings._Learning, "_patience", lambda self, tokens: 0.5)
    engine = SmallEngine(limit=1000, hangs=(999,))
    learned, endpoint = await learned_of(engine, entry={"max_model_len": 1000})
    for name in ("chat", "completions"):
        edge = learned.edges[name]
        assert (edge.accepted, edge.refused, edge.silent) == (998, 1000, (999,))
    assert len(endpoint.left) == 2
    assert "stuck" not in learned.facts


async def test_a_server_that_serves_nothing_any_more_is_not_asked_further(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openings._Learning, "_patience", lambda self, tokens: 0.5)
    monkeypatch.setattr(openings, "STILL", (0.2, 0.2))
    engine = SmallEngine(limit=1000, hangs=(999,), stuck_after=True)
    learned, endpoint = await learned_of(engine, entry={"max_model_len": 1000})
    assert "served nothing any more" in learned.facts["stuck"]
    for _ in range(500):  # the length itself, and two that looked whether it still serves
        await asyncio.sleep(0.01 if len(endpoint.left) < 3 else 0)
    assert len(endpoint.left) == 3
    assert "completions" not in learned.edges
    assert learned.edges["chat"].silent == (999,)


async def test_a_server_that_cuts_prompts_short_has_no_edge_but_a_length_that_it_reads():
    """As Ollama does over its window: it answers, and reads only the end."""

    class Cuts(SmallEngine):
        async def _answer(self, wire: Wire, chat: bool, fields: Any, words: list[str], tokens: int) -> None:
            await super()._answer(wire, chat, fields, words, min(tokens, 2048))

    learned, _ = await learned_of(Cuts(limit=1 << 30))
    for name in ("chat", "completions"):
        assert learned.edges[name].refused is None
        # A prompt counts as cut when a tenth is missing: 2,048 / 0.9 = 2,275.
        assert 2048 <= learned.edges[name].accepted <= 2276
        assert "2048 are read" in learned.facts[f"{name} cuts prompts short"]


async def test_a_prompt_that_was_cut_while_the_speed_was_measured_is_none_that_is_accepted():
    """Ollama may keep far less than its window of what is over it."""

    class Halves(SmallEngine):
        async def _answer(self, wire: Wire, chat: bool, fields: Any, words: list[str], tokens: int) -> None:
            await super()._answer(wire, chat, fields, words, tokens if tokens <= 500 else 250)

    learned, _ = await learned_of(Halves(limit=1 << 30))
    for name in ("chat", "completions"):
        edge = learned.edges[name]
        assert (edge.accepted, edge.cut) == (500, 501)


async def test_a_server_that_fails_over_its_edge_has_one_and_one_that_rate_limits_there_has_none_yet():
    class Fails(SmallEngine):
        status = 500

        async def _no(self, wire: Wire, status: int, message: str) -> None:
            more = {"retry_after": "600"} if self.status == 429 else {}
            await wire.json({"error": message}, self.status if status == 400 else status, **more)

    fails, limits = Fails(limit=1000), Fails(limit=1000)
    limits.status = 429
    learned, _ = await learned_of(fails)
    assert (learned.edges["chat"].accepted, learned.edges["chat"].refused) == (999, 1000)
    learned, _ = await learned_of(limits)
    assert learned.edges["chat"].refused is None
    assert learned.edges["chat"].silent == ()
    assert "slow down" in learned.facts["chat edge"]


async def test_of_several_servers_the_edge_is_what_all_take_and_what_none_takes():
    small, large = ScriptedEndpoint(SmallEngine(limit=600)), ScriptedEndpoint(SmallEngine(limit=900))
    async with serving(small), serving(large), open_target([small.url, large.url]) as target:
        learned = await learn(target, TargetOptions(learning=20.0))
    assert (learned.edges["chat"].accepted, learned.edges["chat"].refused) == (599, 900)


async def test_the_prefill_rate_is_the_slope_and_not_the_whole_time():
    """0.5 ms a token is 2,000 tokens a second; sleeping takes longer than asked, never less, and the rate may not be under-
    stated by more than a busy machine explains."""
    learned, _ = await learned_of(
        SmallEngine(limit=4000, seconds_a_token=0.0005), entry={"max_model_len": 4000}
    )
    assert learned.prefill is not None
    assert learned.prefill > 200
    assert learned.first > 0
    assert learned.bound >= 30


async def test_prompts_that_nobody_reads_are_noted_and_say_nothing_of_the_rate():
    learned, _ = await learned_of(
        SmallEngine(limit=4000, seconds_a_token=0.002, reads=200), entry={"max_model_len": 4000}
    )
    assert learned.prefill is not None
    assert 50 < learned.prefill < 600
    assert "256 words" in learned.facts["longer prompts are faster"]


async def test_tokens_a_word_are_of_the_audits_own_prompts():
    learned, _ = await learned_of(SmallEngine())
    assert learned.tokens_per_word == pytest.approx(1.0)  # this server's tokens are words


async def test_a_server_that_varies_is_measured_as_one_that_varies():
    turns = itertools.count()

    async def script(request: Request, wire: Wire) -> None:
        if len(request.body) > 8000:
            return await wire.json({"detail": "too long"}, 413)
        text = "one" if next(turns) % 2 else "two"
        if not request.path.endswith("chat/completions"):
            return await wire.json({"detail": "Not Found"}, 404)
        await wire.stream()
        await wire.event(chat_event(text, finish="stop"))
        await wire.done()

    learned, _ = await learned_of(script)
    noise = learned.noise
    assert noise.alone_runs >= 4
    assert 0 < noise.alone_differ < noise.alone_runs
    assert noise.beside_runs >= 8


# ------------------------------------------------------------------------------------ what cannot be learned


async def test_a_key_that_is_only_wanted_for_answers_is_asked_for():
    engine = SmallEngine(key="right-key-1")
    with pytest.raises(TargetError, match=r"wants an API key.*--api-key"):
        await learned_of(engine)
    with pytest.raises(TargetError, match=r"does not take the key of --second-key"):
        await learned_of(engine, TargetOptions(api_key="right-key-1", second_key="wrong-key-2"))


async def test_a_server_with_models_and_no_answers_says_what_came():
    async def script(request: Request, wire: Wire) -> None:
        await wire.json({"detail": "Not Found"}, 404)

    with pytest.raises(TargetError, match=r"answers none of the audit's requests for 'm'.*Not Found"):
        await learned_of(script)


async def test_a_server_that_goes_silent_while_it_is_learned_is_not_waited_for_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(openings, "LEAST_BOUND", 0.5)
    engine, asked = SmallEngine(), 0

    async def script(request: Request, wire: Wire) -> None:
        nonlocal asked
        asked += request.method == "POST"
        if asked <= 6:
            return await engine(request, wire)
        await asyncio.sleep(3600)

    with pytest.raises(
        TargetError, match=r"does not any more: the last 3 short requests were silent .* within 0.5 s"
    ):
        await learned_of(script, TargetOptions(learning=0.1))
    assert asked == 9


async def test_a_server_that_never_answers_is_told_from_one_that_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openings, "LEAST_BOUND", 0.5)

    async def script(request: Request, wire: Wire) -> None:
        if request.method == "POST":
            await asyncio.sleep(3600)
        await SmallEngine()(request, wire)

    with pytest.raises(
        TargetError, match=r"neither an answer nor an error within 0.5 s.*still loading, or stuck"
    ):
        await learned_of(script, TargetOptions(learning=0.1))


async def test_a_server_that_only_rate_limits_says_so():
    async def script(request: Request, wire: Wire) -> None:
        await wire.json({"error": "slow down"}, 429, retry_after="600")

    with pytest.raises(TargetError, match="slow down"):
        await learned_of(script)


async def test_a_model_that_wants_max_completion_tokens_gets_them():
    engine = SmallEngine()

    async def script(request: Request, wire: Wire) -> None:
        if request.method == "POST" and "chat" in request.path:
            fields = request.json
            if "max_tokens" in fields:
                return await wire.json({"error": {"message": "Use 'max_completion_tokens' instead."}}, 400)
            request.body = request.body.replace(b"max_completion_tokens", b"max_tokens")
        await engine(request, wire)

    learned, _ = await learned_of(script)
    assert learned.endpoints == ("chat", "completions")
    assert learned.edges["chat"].accepted == 999


async def test_a_server_that_refuses_stream_options_is_asked_without():
    engine = SmallEngine()

    async def script(request: Request, wire: Wire) -> None:
        if request.method == "POST" and "stream_options" in request.json:
            return await wire.json({"error": {"message": "unknown field stream_options"}}, 400)
        await engine(request, wire)

    learned, _ = await learned_of(script)
    assert (learned.streams, learned.usage) == (True, False)


@pytest.mark.parametrize("kind", ["sglang-pd", "vllm-pd"])
async def test_a_pair_is_known_as_one_so_that_nobody_forges_what_its_router_would_say(kind: str):
    one, two = ScriptedEndpoint(SmallEngine(limit=200)), ScriptedEndpoint(SmallEngine(limit=200))
    async with (
        serving(one),
        serving(two),
        open_target(
            [f"{kind}://{one.url.removeprefix('http://')},{two.url.removeprefix('http://')}"]
        ) as target,
    ):
        learned = await learn(target, TargetOptions(learning=5.0))
    assert learned.facts["pair"] == kind


async def test_a_pair_whose_decode_half_waits_for_what_prefill_refused_is_learned_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
):
    """A prompt of 512 words is the first of them; each would be waited for as long as for any answer."""
    monkeypatch.setattr(openings, "SETTLE", 0.1)
    prefill = ScriptedEndpoint(SmallEngine(limit=300))
    decode = ScriptedEndpoint(SmallEngine(limit=1 << 20, hangs=tuple(range(300, 9000))))
    async with (
        serving(prefill) as one,
        serving(decode) as two,
        open_target([f"sglang-pd://{one.url},{two.url}"]) as target,
    ):
        async with asyncio.timeout(60):
            learned = await learn(target, TargetOptions(learning=20.0))
    assert (learned.edges["chat"].accepted, learned.edges["chat"].refused) == (299, 300)


@pytest.mark.parametrize(("owner", "sent"), [("sglang", "mine"), ("vllm", None)])
async def test_a_request_id_is_said_in_the_body_to_sglang(owner: str, sent: str | None):
    endpoint = ScriptedEndpoint(SmallEngine(limit=200), entry={"owned_by": owner})
    async with serving(endpoint), open_target([endpoint.url]) as target:
        await learn(target, TargetOptions(learning=5.0))
        await target.send(Ask(tenant="t", prompt="Say hello.", request_id="mine"))
    assert endpoint.posts[-1].json.get("rid") == sent


@pytest.mark.parametrize(
    ("owner", "field"),
    [("vllm", "repetition_penalty"), ("sglang", "repetition_penalty"), ("llamacpp", "repeat_penalty")],
)
async def test_no_model_of_an_engine_may_penalise_what_it_repeats(owner: str, field: str):
    """vLLM's logprobs are those before penalties, and generation_config.json (of Qwen2.5, say) sets one that a request can only overrule."""
    endpoint = ScriptedEndpoint(SmallEngine(limit=200), entry={"owned_by": owner})
    async with serving(endpoint), open_target([endpoint.url]) as target:
        learned = await learn(target, TargetOptions(learning=5.0))
        for name in learned.endpoints:
            await target.send(Ask(tenant="t", prompt="Say hello.", endpoint=name))
            assert endpoint.posts[-1].json[field] == 1.0


@pytest.mark.parametrize("takes", [True, False])
async def test_a_server_that_is_not_known_is_told_so_if_it_takes_the_field(takes: bool):
    """A gateway may stand before such an engine; others refuse what is not OpenAI's."""
    engine = SmallEngine(limit=200)

    async def script(request: Request, wire: Wire) -> None:
        if request.method == "POST" and "repetition_penalty" in request.json and not takes:
            return await wire.json({"error": {"message": "unknown field repetition_penalty"}}, 400)
        await engine(request, wire)

    endpoint = ScriptedEndpoint(script)
    async with serving(endpoint), open_target([endpoint.url]) as target:
        await learn(target, TargetOptions(learning=5.0))
        assert (await target.send(Ask(tenant="t", prompt="Say hello."))).how == "answered"
    assert endpoint.posts[-1].json.get("repetition_penalty") == (1.0 if takes else None)


class CountsNew(SmallEngine):
    """As Ollama 0.30.0: of a prompt it counts what was not in its cache, which holds `room` prompts."""

    def __init__(self, room: int, **more: Any) -> None:
        super().__init__(**more)
        self.room, self.cached = room, list[str]()

    async def _answer(self, wire: Wire, chat: bool, fields: Any, words: list[str], tokens: int) -> None:
        prompt = json.dumps(fields.get("messages") or fields["prompt"])
        there = prompt in self.cached
        self.cached = [*(one for one in self.cached if one != prompt), prompt][-self.room :]
        await super()._answer(wire, chat, fields, words, 1 if there else tokens)


@pytest.mark.parametrize("room", [1, 100])
async def test_a_server_that_counts_only_what_is_not_cached_is_known_as_one(room: int):
    learned, _ = await learned_of(CountsNew(room, limit=300), TargetOptions(learning=5.0))
    assert not learned.counts_cached
    learned, _ = await learned_of(SmallEngine(limit=300), TargetOptions(learning=5.0))
    assert learned.counts_cached


async def test_a_server_that_counts_zero_does_not_count():
    class Zero(SmallEngine):
        async def _answer(self, wire: Wire, chat: bool, fields: Any, words: list[str], tokens: int) -> None:
            await super()._answer(wire, chat, fields, words, 0)

    learned, _ = await learned_of(Zero(limit=300), TargetOptions(learning=5.0))
    assert (learned.usage, learned.counts_cached, learned.tokens_per_word) == (False, True, 2.0)


def test_one_repeat_that_counts_less_is_no_habit():
    first, less, same = answer("x"), answer("x"), answer("x")
    first.usage = same.usage = Usage(prompt=90)
    less.usage = Usage(prompt=1)
    assert not leaves_out(first, [same, less, same, same])
    assert not leaves_out(first, [])
    assert leaves_out(first, [same, less])


# ------------------------------------------------------------------------------------ noise, by hand


def answer(text: str, *probs: float, how: Any = "answered") -> Answer:
    tokens = [Token(piece, 0.0, prob) for piece, prob in zip(text.split(), probs, strict=False)]
    return Answer(ask=Ask(tenant="t", prompt="p"), number=1, sent=0.0, how=how, text=text, tokens=tokens)


def test_noise_counts_answers_that_differ_and_the_gap_before_they_do():
    """Of the three alone the two that agree in their words are nearest to the others: 0.05 apart, and 0.1 from the one beside."""
    first = answer("a b c", -0.1, -0.2, -0.3)
    noise = measure(
        first,
        [answer("a b c", -0.1, -0.25, -0.3), answer("a x c", -0.1, -9.0, -9.0)],
        [answer("a b c", -0.1, -0.2, -0.4), answer("", how="silent")],
    )
    assert (noise.alone_runs, noise.alone_differ, noise.beside_runs, noise.beside_differ) == (2, 1, 1, 0)
    assert noise.logprob_error == pytest.approx(0.1)
    assert noise.logprob_largest == pytest.approx(0.1)


def test_a_leak_among_the_calibrating_runs_is_no_noise():
    """One of eight beside others, or the very first of all: else a server that leaks now and then would excuse itself."""
    right = [answer("a b c", -0.1, -0.2, -0.3) for _ in range(5)]
    wrong = answer("a b c", -0.1, -0.9, -0.3)
    varies = [answer("a b c", -0.1, -0.2 - 0.01 * n, -0.3) for n in range(8)]
    noise = measure(right[0], right[1:], [*varies[:7], wrong])
    assert noise.logprob_error == pytest.approx(0.05)  # 5.25 of 0, 0.01, ... 0.06 and 0.7
    assert noise.logprob_largest == pytest.approx(0.7)
    assert measure(wrong, right[1:], varies).logprob_error == pytest.approx(0.05)


def test_what_half_of_the_runs_do_is_noise():
    right, other = answer("a b c", -0.1, -0.2, -0.3), answer("a b c", -0.1, -0.5, -0.3)
    assert measure(right, [right] * 4, [right, other] * 4).logprob_error == pytest.approx(0.3)


def test_noise_of_a_request_that_was_not_answered_is_unknown():
    assert measure(answer("", how="failed"), [answer("a")], []).alone_runs == 0
    assert measure(answer("a"), [answer("a")], []).logprob_error is None


@pytest.mark.parametrize(
    ("own", "takes"),
    [
        (Edge(40, 8252), 2050),  # its search was cut short by time
        (Edge(40, None), 2050),
        (Edge(40, 1000), 40),  # refuses what the other takes
        (Edge(999, 1000), 999),  # was found
    ],
)
def test_where_an_endpoints_own_limit_was_not_found_another_ones_is_asked_for(own: Edge, takes: int) -> None:
    learned = Learned(model="m", edges={"chat": Edge(2050, 2079), "completions": own})
    assert learned.takes("completions") == takes
    assert learned.longest("completions") == own.accepted  # what is known of it stays that
    assert (learned.takes("chat"), learned.takes("generate")) == (2050, 512)
