"""Capacity: what is advertised, what the pools hold, and which prompts fall between the two.

The one thing to know: the incident began here. The advertised context was 1,048,576 tokens, prefill's pool held 681,280, and nothing compared
the two numbers.

Hybrid models have a second pool (sliding window, state), which is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterable

from hermetic.check import facts, versions
from hermetic.check.deployment import ALONE, DECODE, PREFILL, Deployment, Pair
from hermetic.check.facts import Fact, NotKnown, Sheet
from hermetic.check.rules.registry import Answer, rule

READ = (
    "0.5.19",
    "0.5.23",
)  # the oldest and the newest SGLang whose admission was compared with the formulas below
ROUNDED = "0.5.22"  # from here on decode counts whole pages
SLACK = 6  # tokens by which max_req_input_len stays below min(context, pool), in these versions

_SGLANG = ("sglang",)


@rule(
    "CAP001",
    "the KV pool is smaller than the advertised context",
    engines=_SGLANG,
    why="A prompt that fits the context and not the pool can never be computed here. SGLang before 0.5.20 hands such a prompt from prefill to decode "
    "as if it had been computed, and decode answers it from other requests' KV cache; later versions refuse it, and clients get errors for what "
    "is advertised.",
    fix="Set --context-length to the pool at most, or enlarge the pool (--mem-fraction-static, more tensor parallelism, a smaller KV dtype), and read "
    "the pool again after every change of weights, quantisation, parallelism or memory settings.",
    source="The first cause of the incident (docs/incident.md); https://github.com/sgl-project/sglang/issues/30233. SGLang 0.5.23 warns of it in its "
    "start-up log, and starts.",
)
def pool_below_context(node: Sheet) -> Answer:
    """A manifest only limits the pool (--max-total-tokens); memory decides. So a limit can be too small, and cannot be enough."""
    context = node[facts.CONTEXT]
    if facts.POOL not in node and (limit := node.get(facts.POOL_LIMIT, context)) < context:
        return f"--max-total-tokens allows the KV pool {limit:,} tokens at most and the advertised context is {context:,}: a prompt of more than {limit:,} tokens can never be computed here"
    pool = node[facts.POOL]
    if pool < context:
        return f"the KV pool holds {pool:,} tokens and the advertised context is {context:,}: a prompt of more than {pool:,} tokens can never be computed here"
    return None


@rule(
    "CAP002",
    "the advertised context is larger than the smaller pool of a pair",
    engines=("sglang", "vllm"),
    per="pair",
    why="A request needs room in both halves. What a client may send is what the smaller pool can take, whichever half advertises more.",
    fix="Advertise at most what the smallest pool of any pair holds that a router may choose (--context-length, --max-model-len), on both halves.",
    source="The incident: decode's pool was larger than prefill's, and the context larger than that.",
)
def context_over_pair(pair: Pair) -> Answer:
    contexts = _agreed(pair.halves, facts.CONTEXT)
    pools = [
        *_agreed(pair.halves, facts.POOL),
        *_agreed(pair.halves, facts.POOL_LIMIT),
    ]  # a pool is not larger than its limit
    if contexts and pools and min(pools) < max(contexts):
        return f"up to {max(contexts):,} tokens are advertised, and the smaller pool of the two holds {min(pools):,}"
    for half in pair.halves:
        _ = half[facts.CONTEXT], half[facts.POOL]
    return None


@rule(
    "CAP003",
    "some prompts are accepted, can never be placed, and block all others",
    engines=_SGLANG,
    roles=(ALONE, PREFILL),
    why="The front check compares tokens with the pool; the scheduler wants one page more. A prompt between the two is accepted, tried at every step "
    "and never started, and everything queued behind it waits until its client leaves.",
    fix="Set --context-length below the pool by two pages, or refuse such prompts in front of the server. A server that is stuck serves again when "
    "the client that waits disconnects.",
    source="Source of SGLang 0.5.23; https://github.com/sgl-project/sglang/issues/28530, https://github.com/sgl-project/sglang/pull/29249.",
    patches=(29249,),
)
def never_placed(node: Sheet) -> Answer:
    """P is the pool, p the page size, L the prompt's length, up(L) the length rounded up to whole pages, free what the pool has left (P when idle).

    - The front check (managers/utils.py) accepts L below max_req_input_len, which is 6 less than min(context, P) (managers/tp_worker.py). A prefill node
      refuses L > P as well (disaggregation/prefill.py).
    - An accepted request's max_new_tokens is cut to P - up(L) - p - 1, and to 0 where that is less (max_new_tokens_for_memory in
      mem_cache/allocator/base.py). On a prefill node it is 1 instead (_process_req in disaggregation/prefill.py).
    - The scheduler starts it when L + max_new_tokens + p < free (add_one_req in managers/schedule_policy.py, check_prefill in
      mem_cache/prefill_budget.py). For a prompt that is so long that max_new_tokens is 0, that is L < P - p; on a prefill node it is L < P - p - 1.

    So prompts from P - p tokens (on a prefill node from P - p - 1) up to max_req_input_len - 1 never start. With P = 2,048 and p = 16 these are 2,032
    to 2,041 tokens (2,031 to 2,041). There are none where pages have 6 tokens or fewer (5 on a prefill node), or where the context is below the pool
    by p - 6 tokens or more (p - 5).

    A request with ignore_eos on a server without prefix cache is held to more (add_one_req_ignore_eos): up(L) + max_new_tokens + p + 1 < free. On a
    prefill node that is every prompt over P - 2p; elsewhere it is any prompt whose max_new_tokens was cut to 1 or more."""
    if facts.POOL not in node and facts.POOL_LIMIT in node:
        return _never_placed_in_any(node)
    pool, page, role = node[facts.POOL], node[facts.PAGE], node[facts.ROLE]
    last = min(longest(node), pool) if role == PREFILL else longest(node)
    _was_read(node)
    first = pool // page * page - page - (1 if role == PREFILL else 0)
    if first > last:
        return None
    return (
        f"prompts of {first:,} to {last:,} tokens are accepted and can never be placed in a pool of {pool:,} tokens with pages of {page}, "
        "and everything queued behind one waits"
    )


def _never_placed_in_any(node: Sheet) -> Answer:
    """A manifest only limits the pool. Where the context is not below that limit it is below no pool, and then pages of more than 6 tokens (5 on a prefill
    node) leave such prompts in each. Raises NotKnown where a pool may leave none."""
    limit, page, context = node[facts.POOL_LIMIT], node[facts.PAGE], node[facts.CONTEXT]
    _was_read(node)
    if context < limit or page + (1 if node[facts.ROLE] == PREFILL else 0) <= SLACK:
        _ = node[facts.POOL]
    return (
        f"--max-total-tokens allows the KV pool {limit:,} tokens at most, and the advertised context is {context:,}: prompts that leave less than a page of "
        f"{page} of the pool free are accepted and can never be placed, and everything queued behind one waits"
    )


@rule(
    "CAP004",
    "some prompts that fit decode's pool can never be taken because of its reserve",
    engines=_SGLANG,
    roles=(DECODE,),
    why="Decode keeps num_reserved_decode_tokens free for every request. A prompt that fits the pool and not the pool less this reserve is accepted, "
    "waits for ever, and everything queued behind it waits too.",
    fix="Set --context-length at most to the pool less the reserve, or lower --num-reserved-decode-tokens, or enlarge the pool.",
    source="Source of SGLang 0.5.23.",
)
def reserve_over_pool(node: Sheet) -> Answer:
    """Decode takes a request when up(L) + num_reserved_decode_tokens <= free, with up(L) the prompt's length rounded up to whole pages (before 0.5.22 as
    it is), and stops at the first that does not fit (pop_preallocated and _required_admission_tokens in disaggregation/decode.py). When it is
    idle free is the pool. So prompts longer than the pool less the reserve, rounded down to whole pages, are never taken; the front check
    accepts them below max_req_input_len, which is 6 less than min(context, pool)."""
    if facts.POOL not in node and facts.POOL_LIMIT in node:
        return _reserve_over_limit(node)
    pool, page, reserve = node[facts.POOL], node[facts.PAGE], node[facts.RESERVE]
    last = min(longest(node), pool)
    _was_read(node)
    most = max(pool - reserve, 0)
    first = (most if versions.older(node, ROUNDED) else most // page * page) + 1
    if first > last:
        return None
    return (
        f"prompts of {first:,} to {last:,} tokens are accepted and can never be taken, because with the reserve of {reserve:,} they need more than "
        f"the pool of {pool:,} tokens, and everything queued behind one waits"
    )


def _reserve_over_limit(node: Sheet) -> Answer:
    """A manifest only limits the pool. Where the largest pool that it allows leaves such prompts, every smaller one does. Raises NotKnown where it leaves none."""
    limit, reserve, context = node[facts.POOL_LIMIT], node[facts.RESERVE], node[facts.CONTEXT]
    _was_read(node)
    if max(limit - reserve, 0) + 1 > min(limit, context) - SLACK - 1:
        _ = node[facts.POOL]
    return (
        f"--max-total-tokens allows the KV pool {limit:,} tokens at most, and the advertised context is {context:,}: prompts that do not fit the pool "
        f"together with the reserve of {reserve:,} (more than {max(limit - reserve, 0):,} tokens, or fewer where memory allows less) are accepted and can never "
        "be taken, and everything queued behind one waits"
    )


@rule(
    "CAP005",
    "prompts that are too long are cut short silently",
    engines=_SGLANG,
    why="With --allow-auto-truncate a prompt over the limit loses its end and is answered with HTTP 200. The client is told nothing, and the usage "
    "counts what was read, not what was sent.",
    fix="Start without --allow-auto-truncate: a prompt that is too long is then refused with 400.",
    source="validate_input_length in managers/utils.py of SGLang 0.5.23; https://github.com/sgl-project/sglang/pull/15369.",
)
def truncates(node: Sheet) -> Answer:
    return (
        "prompts over the limit are cut and answered with HTTP 200 (--allow-auto-truncate)"
        if node[facts.TRUNCATES]
        else None
    )


_POOL = facts.FACTS["pool"]
_SIZED_BY = tuple(facts.FACTS[name] for name in ("kv_dtype", "tp", "pp", "memory_fraction"))
_BESIDE = tuple(facts.FACTS[name] for name in ("page", "model", "revision", "version"))


@rule(
    "CAP006",
    "a KV pool, or what decides its size, is not what it was in the baseline",
    per="deployment",
    severity="warning",
    when=lambda deployment: bool(deployment.baseline),
    why="A new version, KV dtype, parallel width or memory fraction changes how many tokens a pool holds, and limits that were derived from the old "
    "pool elsewhere (a gateway, an advertised context) do not follow by themselves.",
    fix="Compare the new pool with every limit that was derived from the old one, then save a new baseline (--format json).",
    source="The operators' lesson of the incident: read the pool from the running engine after every change.",
)
def changed(deployment: Deployment) -> Answer:
    found, missing = [], []
    for node in deployment.nodes:
        before = deployment.baseline.get(node.name)
        if before is None:
            missing.append(f"{node.name}: it is not in the baseline; a new one would have it")
            continue
        try:
            if (said := _changed(node, before)) is not None:
                found.append(said)
        except NotKnown as unknown:
            missing.append(str(unknown))
    if not found and missing:
        raise NotKnown("; ".join(missing))
    return "; ".join(found) or None


def _changed(node: Sheet, before: Sheet) -> Answer:
    """What is another than in the baseline. Raises NotKnown where nothing is, and something that the baseline has is not known now."""
    differences = [
        _difference(node, before, fact) for fact in (_POOL, *_SIZED_BY) if _differs(node, before, fact)
    ]
    if not differences:
        for fact in (_POOL, *_SIZED_BY):
            if fact in before:
                _ = node[fact]
            elif fact in node:
                raise NotKnown(
                    f"{node.name}: {fact.says} is {node[fact]} now, and the baseline does not say what it was"
                )
        return None
    differences += [_difference(node, before, fact) for fact in _BESIDE if _differs(node, before, fact)]
    return f"{node.name}: {', '.join(differences)}"


def _differs(now: Sheet, before: Sheet, fact: Fact[object]) -> bool:
    ours, theirs = now.values(fact), before.values(fact)
    return len(ours) == len(theirs) == 1 and ours != theirs


def _difference(now: Sheet, before: Sheet, fact: Fact[object]) -> str:
    if fact is _POOL:
        return f"the KV pool holds {now[facts.POOL]:,} tokens (was {before[facts.POOL]:,})"
    return f"{fact.says} is {now[fact]} (was {before[fact]})"


def longest(node: Sheet) -> int:
    """The longest prompt that a node's front check accepts. Raises NotKnown."""
    if facts.LONGEST not in node and node.values(facts.ENGINE) == list(_SGLANG) and _read(node):
        return min(node[facts.POOL], node[facts.CONTEXT]) - SLACK - 1
    return node[facts.LONGEST] - 1


def _read(node: Sheet) -> bool:
    """Whether the source of a node's version was read. Raises NotKnown."""
    version = versions.of(node)
    return versions.parse(READ[0]) <= version and version.release <= versions.parse(READ[1]).release


def _was_read(node: Sheet) -> None:
    if not _read(node):
        raise NotKnown(
            f"{node.name}: which prompts SGLang {node[facts.VERSION]} can place is known for {READ[0]} to {READ[1]} only"
        )


def _agreed(nodes: Iterable[Sheet], fact: Fact[int]) -> list[int]:
    """The values of nodes of which it is known."""
    return [node[fact] for node in nodes if len(node.values(fact)) == 1]


__all__ = ["READ", "SLACK", "longest"]
