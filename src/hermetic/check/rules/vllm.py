"""vLLM: the pool against max_model_len, and how long prefill keeps pages for a decode node that has not read them yet.

The one thing to know: prefill does not know whether decode reads. It keeps a finished prompt's blocks under a lease and then gives them on; a read
that comes later gets the next prompt's blocks, is written to prefill's log as "Potentially invalid KV blocks", and is answered with HTTP 200.

Read in the source of 0.32:
- v1/core/block_pool.py: one block of the pool (the null block) is never given out. v1/core/kv_cache_utils.py: the size in the log and in
  kv_cache_size_tokens is int(blocks / n * max_model_len), with n = max_model_len / block_size rounded up, and counts that block as well. So a prompt
  of max_model_len tokens fits if blocks - 1 >= n, that is if the size is int((n + 1) / n * max_model_len) at least. 0.32 does not start otherwise.
- distributed/kv_transfer/kv_connector/v1/nixl: the lease is kv_lease_duration of kv_connector_extra_config, 30 s by default. A request that waits in
  decode's queue renews it every sixth of that, for two thirds of it; what waits in front of decode (a router, a gateway) renews nothing, and
  neither does a decode node whose engine stands still.
- config/kv_transfer.py: kv_load_failure_policy is fail by default.
"""

from __future__ import annotations

from hermetic.check import facts, hosts
from hermetic.check.deployment import BOTH, DECODE, PREFILL, Pair
from hermetic.check.facts import NotKnown, Sheet
from hermetic.check.rules.registry import Answer, Fine, rule

_VLLM = ("vllm",)


@rule(
    "VLLM001",
    "the KV pool cannot hold a prompt of max_model_len",
    engines=_VLLM,
    why="vLLM never gives out one block of its pool. A prompt that needs all of them waits for ever, and what is queued behind it too.",
    fix="Lower --max-model-len by a block, or give the pool more memory (--gpu-memory-utilization, --kv-cache-memory-bytes).",
    source="v1/core/block_pool.py and v1/core/kv_cache_utils.py of vLLM 0.32.",
)
def pool_below_length(node: Sheet) -> Answer:
    pool, context = node[facts.POOL], node[facts.CONTEXT]
    if pool < context:
        return f"the KV pool holds {pool:,} tokens and max_model_len is {context:,}: a prompt of more than {pool:,} tokens can never be computed here"
    if pool >= 2 * context:
        return None  # whatever the block size is
    blocks = -(-context // node[facts.PAGE])
    if pool < (needed := (blocks + 1) * context // blocks):
        return f"the KV pool is {pool:,} tokens, of which one block is never given out; a prompt of max_model_len ({context:,}) needs a pool of {needed:,}"
    return None


@rule(
    "VLLM002",
    "a request whose KV could not be loaded is computed again in place",
    severity="warning",
    engines=_VLLM,
    roles=(DECODE, BOTH),
    why="With kv_load_failure_policy recompute, decode goes on with the request after a failed read. For models with several KV groups a failed read "
    "is not reported block by block, so rows that never arrived can count as computed.",
    fix='Set "kv_load_failure_policy": "fail" in --kv-transfer-config (the default in 0.32): the client gets an error and can ask again.',
    source="config/kv_transfer.py and v1/core/sched/scheduler.py of vLLM 0.32; https://github.com/vllm-project/vllm/pull/52232.",
)
def recomputes(node: Sheet) -> Answer:
    policy = node[facts.LOAD_FAILURE]
    return (
        f'kv_load_failure_policy is "{policy}": a request goes on after its KV could not be loaded'
        if policy != "fail"
        else None
    )


@rule(
    "VLLM003",
    "requests wait longer for decode than prefill keeps their pages",
    engines=_VLLM,
    per="pair",
    severity="warning",
    why="Prefill gives a prompt's blocks on when the lease ends. Decode renews it while a request waits in its own queue and its engine runs; nobody "
    "renews it while the request is still on its way, or while decode stands still.",
    fix="Set kv_lease_duration in prefill's kv_connector_extra_config to more than the longest wait, and look at what makes requests wait.",
    source="distributed/kv_transfer/kv_connector/v1/nixl of vLLM 0.32; https://github.com/aws-samples/aws-do-eks/pull/84 (8 of 42 answers came from "
    "blocks that had been given on).",
)
def lease_too_short(pair: Pair) -> Answer:
    """The queue of a node that only prefills is one in front of prefill: nobody's pages are kept meanwhile."""
    if _one_way(pair):
        return Fine("prompts were seen to go the other way only, so nobody waits here for decode")
    waited, lease = pair.decode[facts.WAITED], pair.prefill[facts.LEASE]
    if waited >= lease:
        return f"requests were seen to wait up to {waited:g} s for decode, and prefill keeps their pages for {lease:g} s unless decode renews it"
    return None


def _one_way(pair: Pair) -> bool:
    """Whether of two nodes that may stand on either side the one that is taken for decode has only prefilled."""
    halves = pair.halves
    if any(facts.TRANSFERS not in half for half in halves):
        return False
    there, here = (half[facts.TRANSFERS] for half in halves)
    return there > 0 and here == 0


@rule(
    "VLLM004",
    "pages expired before decode had read them",
    engines=_VLLM,
    roles=(PREFILL, BOTH),
    why="Prefill has given on blocks that nobody had read. If decode reads them later, it reads somebody else's prompt.",
    fix="Raise kv_lease_duration above the longest wait in front of decode, and never send the kv_transfer_params of a request twice.",
    source="vllm:nixl_num_kv_expired_reqs_total, and 'Releasing expired KV blocks' in prefill's log; "
    "https://github.com/vllm-project/vllm/issues/52234.",
)
def expired(node: Sheet) -> Answer:
    count = node[facts.EXPIRED]
    return f"the pages of {_requests(count)} expired before decode had read them" if count > 0 else None


@rule(
    "VLLM005",
    "decode read pages that had expired",
    engines=_VLLM,
    roles=(PREFILL, BOTH),
    why="A decode node has read blocks that prefill had given on already: they may have held another prompt. The answer went out with HTTP 200.",
    fix="Take the answers of that time for leaked, raise kv_lease_duration, and never send the kv_transfer_params of a request twice or late.",
    source="vllm:nixl_num_notifications_after_expiry_total, and 'Potentially invalid KV blocks' in prefill's log.",
)
def read_late(node: Sheet) -> Answer:
    count = node[facts.READ_LATE]
    return (
        f"decode read the pages of {_requests(count)} after they had expired: they may have held another prompt"
        if count > 0
        else None
    )


@rule(
    "VLLM006",
    "transfers failed",
    severity="warning",
    engines=_VLLM,
    roles=(PREFILL, DECODE, BOTH),
    why="A read that fails leaves rows of a request unwritten. With kv_load_failure_policy fail the request ends; in other cases it may go on.",
    fix="Look for the first failure in decode's log (handshake, connection, memory registration).",
    source="vllm:nixl_num_failed_transfers_total.",
)
def failed(node: Sheet) -> Answer:
    count = node[facts.FAILED_TRANSFERS]
    return f"{count:,} transfer{'' if count == 1 else 's'} failed" if count > 0 else None


@rule(
    "VLLM007",
    "prefill names a side channel that decode cannot reach",
    engines=_VLLM,
    per="pair",
    why="Prefill sends VLLM_NIXL_SIDE_CHANNEL_HOST with every answer, and decode connects there. A loopback address leads decode on another host to "
    "itself: at best to nobody.",
    fix="Set VLLM_NIXL_SIDE_CHANNEL_HOST on each prefill node to an address that decode nodes reach and others do not.",
    source="envs.py of vLLM 0.32: the default is localhost.",
)
def side_channel(pair: Pair) -> Answer:
    inner = pair.prefill[facts.INNER_HOST]
    if not (
        hosts.is_loopback(inner) or hosts.is_everywhere(inner)
    ):  # whoever connects to 0.0.0.0 connects to itself
        return None
    pods = {half.loopback for half in pair.halves} - {""}
    if len(pods) == 2:
        return f"prefill names {inner} as its side channel, and decode is in a pod or container of its own, where that is decode itself"
    ours, theirs = (_host(half) for half in pair.halves)
    if ours == theirs or (hosts.is_loopback(ours) and hosts.is_loopback(theirs)):
        return None
    return f"prefill at {ours} names {inner} as its side channel, and decode is at {theirs}"


@rule(
    "VLLM008",
    "developer mode is on",
    engines=_VLLM,
    why="VLLM_SERVER_DEV_MODE=1 opens calls without a key that reset caches, put the engine to sleep, change weights and show its whole configuration.",
    fix="Start without VLLM_SERVER_DEV_MODE.",
    source="entrypoints/launchers/api_server/routers.py of vLLM 0.32.",
)
def developer(node: Sheet) -> Answer:
    return (
        "VLLM_SERVER_DEV_MODE is on: anyone who reaches the server can reset its caches, put it to sleep and read its configuration"
        if node[facts.DEVELOPER]
        else None
    )


def _host(node: Sheet) -> str:
    """Where a node serves. Raises NotKnown, also where it says "everywhere"."""
    if node.address is None or hosts.is_everywhere(node.address[0]):
        raise NotKnown(f"{node.name}: where it serves is not known; its URL would say it")
    return node.address[0]


def _requests(count: int) -> str:
    return "one request" if count == 1 else f"{count:,} requests"
