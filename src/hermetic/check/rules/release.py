"""Release: when decode gives pages on after an abort, and whether the transfer into them is over by then.

The one thing to know: with deferred release decode waits for prefill's word that nothing is written any more, but not for ever: after
SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT (30 s by default in 0.5.19 to 0.5.23) it releases anyway. Prefill can only stop between two
batches, so one batch must take less time than that.

Read in the source of 0.5.19 to 0.5.23: environ.py (the variables and their defaults; 0.5.18 has none of them), disaggregation/decode.py
(resolve_deferred_releases: outcome "timeout" from 0.5.22 on, a line in the log in all), disaggregation/mooncake/conn.py (one batch_transfer_sync for each SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES pages of all layers; 0, the
default, sends everything that is to be sent at once; 0.5.19 does not know it), and which backends answer aborts
(supports_deferred_decode_kv_release): Mooncake, Ascend (built on it) and NIXL in 0.5.19 to 0.5.23, Mori from 0.5.22 on, fake never.
"""

from __future__ import annotations

from hermetic.check import facts, versions
from hermetic.check.deployment import DECODE, PREFILL, Pair
from hermetic.check.facts import NotKnown, Sheet
from hermetic.check.rules.capacity import longest
from hermetic.check.rules.registry import Answer, rule
from hermetic.check.rules.version import DEFERRED_SINCE

_SGLANG = ("sglang",)
ANSWER, MORI_SINCE, BATCHES_SINCE = ("mooncake", "ascend", "nixl", "mori"), "0.5.22", "0.5.20"


OFF = "deferred release is off (SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE): pages are given on while a transfer may still write into them"


@rule(
    "REL001",
    "decode's pages are released while a transfer may still write into them",
    engines=_SGLANG,
    roles=(PREFILL, DECODE),
    why="When a request is aborted during its transfer, decode gives its pages to the next request. Without deferred release nobody waits until "
    "prefill has stopped writing, and the next request reads what was meant for the aborted one. Both halves must take part: decode waits, "
    "prefill answers.",
    fix="Set SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=1 on both halves (the default since 0.5.21), with a backend that answers aborts.",
    source="https://github.com/sgl-project/sglang/pull/35049, https://github.com/sgl-project/sglang/pull/37454; disaggregation/common/conn.py of 0.5.19 to "
    "0.5.23. 0.5.18 has nothing of it.",
)
def not_deferred(node: Sheet) -> Answer:
    if node.values(facts.DEFERRED) == [False]:
        return OFF  # with every backend
    transport = node[facts.TRANSPORT]
    if transport == "fake":
        _ = node[facts.DEFERRED]
        return None  # nothing is transferred: DET009
    if transport == "mori" and versions.older(node, MORI_SINCE):
        return f"SGLang {node[facts.VERSION]} does not wait for transfers of mori before it releases pages: mori answers aborts since {MORI_SINCE}"
    if not defers(node):
        return f"SGLang {node[facts.VERSION]} has no deferred release, whatever it is told: pages are given on while a transfer may still write into them"
    if facts.DEFERRED in node and transport not in ANSWER:
        raise NotKnown(f"{node.name}: whether {transport} answers aborts is not known")
    return None


def defers(node: Sheet) -> bool:
    """Whether a node waits for transfers before it gives pages on: told to, and of a version that knows what it is told. Raises NotKnown."""
    if node.values(facts.DEFERRED) == [False]:
        return False
    if facts.DEFERRED not in node and node.get(facts.RELEASED, 0) > 0:
        return True  # it has waited, so it is on
    if facts.VERSION in node and versions.older(node, DEFERRED_SINCE):
        return False
    _ = node[facts.DEFERRED], node[facts.VERSION]
    return True


@rule(
    "REL002",
    "transfers are not split into batches",
    severity="warning",
    engines=_SGLANG,
    roles=(PREFILL,),
    why="Prefill sends everything that it has for a request in one call, and cannot stop in the middle of it. An abort waits for the whole call, and "
    "decode waits for it no longer than its time-out.",
    fix="Set SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES on prefill nodes, so that one batch takes a small part of the release time-out (1024 is usual).",
    source="disaggregation/mooncake/conn.py of SGLang 0.5.23; https://github.com/sgl-project/sglang/pull/32758.",
)
def no_batches(node: Sheet) -> Answer:
    if node[facts.TRANSPORT] != "mooncake":
        return None
    if node.get(facts.BATCH_PAGES, 1) <= 0:
        return "SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES is not set: one call may send a whole prompt, and an abort waits for it"
    if versions.older(node, BATCHES_SINCE):
        return f"SGLang {node[facts.VERSION]} sends everything that it has for a request in one call; {BATCHES_SINCE} can split it into batches"
    _ = node[facts.BATCH_PAGES]
    return None


@rule(
    "REL003",
    "one transfer batch takes longer than decode waits for it",
    engines=_SGLANG,
    per="pair",
    why="Decode releases the pages of an aborted request after its time-out, whether the transfer is over or not. A batch that takes longer is then "
    "written into pages that belong to somebody else.",
    fix="Lower SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES on prefill, or raise SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT on decode.",
    source="disaggregation/decode.py of SGLang 0.5.23 (resolve_deferred_releases).",
)
def batch_too_long(pair: Pair) -> Answer:
    """Pages of a batch (all pages of the longest prompt, if there is no bound) x bytes of a page / bytes a second."""
    prefill = pair.prefill
    if prefill[facts.TRANSPORT] != "mooncake":
        return None
    page, timeout = prefill[facts.PAGE], pair.decode[facts.RELEASE_TIMEOUT]
    whole = -(-min(longest(prefill), prefill[facts.POOL]) // page)
    bound = 0 if versions.older(prefill, BATCHES_SINCE) else prefill[facts.BATCH_PAGES]
    pages = whole if bound <= 0 else min(bound, whole)
    bytes_of_page = prefill[facts.KV_BYTES] / prefill[facts.POOL] * page
    speed = prefill[facts.TRANSFER_SPEED]
    if speed <= 0:
        raise NotKnown(f"{prefill.name}: no transfer was measured yet")
    seconds = pages * bytes_of_page / speed
    if seconds > timeout:
        return (
            f"a batch of {pages:,} pages ({pages * bytes_of_page / 1e6:,.0f} MB) takes {in_seconds(seconds)} at the measured {speed / 1e6:,.0f} MB/s, "
            f"and decode releases after {timeout:g} s"
        )
    return None


@rule(
    "REL004",
    "pages were released with their transfer still running",
    engines=_SGLANG,
    roles=(DECODE,),
    why="A deferred release that ends by time-out gives pages on although prefill has not said that it has stopped. Whoever got them may have read "
    "another request's KV.",
    fix="Find out why prefill did not answer (its log at that time, lost connections, batches that take too long), and take the answers given since for "
    "doubtful. Raise SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT.",
    source="sglang:decode_deferred_kv_release_total, outcome timeout, from 0.5.22 on; the log line 'Deferred KV release for room ... timed out after' of 0.5.19 to "
    "0.5.23 (disaggregation/decode.py).",
)
def released_by_timeout(node: Sheet) -> Answer:
    ended = node[facts.RELEASED_BY_TIMEOUT]
    if ended > 0:
        total = f" of {all_ended:,}" if (all_ended := node.get(facts.RELEASED, 0)) >= ended else ""
        return f"{ended:,}{total} deferred releases ended by time-out: their pages were given on without prefill's word that nothing is written any more"
    return None


def in_seconds(value: float) -> str:
    """A time as settings have it: 0.32 s, 8.5 s, 33 s, 1,200 s."""
    return f"{value:,.0f} s" if value >= 10 else f"{value:.2g} s"


__all__ = ["defers", "in_seconds"]
