"""Detection: SGLang's own checks of KV, whether they are on at both ends, and what they have found.

The one thing to know: both are off by default. The checksum (Adler-32 over what prefill sends, compared once when decode takes the request into a
batch) needs both halves and equal layouts, else requests go on unverified with one warning, or end as damaged before 0.5.23; the canary in log
mode reports and answers all the same.

Read in the source of 0.5.21 to 0.5.23: disaggregation/decode.py (_kv_checksum_comparable, _verify_kv_checksums), kv_canary/config.py (none, log, raise).
"""

from __future__ import annotations

from hermetic.check import facts, versions
from hermetic.check.deployment import DECODE, PREFILL, Pair
from hermetic.check.facts import Fact, Sheet
from hermetic.check.rules.registry import Answer, Fine, rule

_SGLANG, _HALVES = ("sglang",), (PREFILL, DECODE)
SKIPS_SINCE = "0.5.23"  # the first release that skips the checksum of another layout
# What the signature of a layout is made of, for a pair.
_LAYOUT = tuple(facts.FACTS[name] for name in ("tp", "pp", "page", "kv_dtype"))


@rule(
    "DET001",
    "the KV checksum is on in one half only",
    engines=_SGLANG,
    per="pair",
    why="Prefill writes the digest, decode compares it. With one half alone nothing is compared, and nothing says so at every request.",
    fix="Start both halves with --disaggregation-enable-kv-checksum.",
    source="The option's help in SGLang 0.5.23.",
)
def one_side(pair: Pair) -> Answer:
    prefill, decode = is_checked(pair.prefill), is_checked(pair.decode)
    if prefill != decode:
        on, off = ("prefill", "decode") if prefill else ("decode", "prefill")
        return f"--disaggregation-enable-kv-checksum is on in {on} and off in {off}, so nothing is compared"
    return None


@rule(
    "DET002",
    "the KV checksum is on and cannot be compared for this pair",
    engines=_SGLANG,
    per="pair",
    why="A digest is of one layout. Where the halves differ in tensor or pipeline parallel width, page size or dtype, decode of 0.5.23 takes the request "
    "unverified and says so once; that of 0.5.21 and 0.5.22 compares all the same, and ends every request as damaged.",
    fix="Give both halves the same --tp-size, --pp-size, --page-size and --kv-cache-dtype.",
    source="disaggregation/decode.py of SGLang 0.5.23 (_kv_checksum_comparable), and of 0.5.21 and 0.5.22, which have no such check.",
)
def not_comparable(pair: Pair) -> Answer:
    if not (is_checked(pair.prefill) and is_checked(pair.decode)):
        return None  # DET001, or off
    apart = [
        f"{fact.says}: {pair.prefill[fact]} and {pair.decode[fact]}"
        for fact in _LAYOUT
        if _known_to_differ(pair, fact)
    ]
    if apart:
        return f"both halves have the KV checksum on, and {_effect(pair.decode)}, because they differ in {', '.join(apart)}"
    for fact in _LAYOUT:
        _ = pair.prefill[fact], pair.decode[fact]
    return None


@rule(
    "DET003",
    "the KV checksum was skipped",
    engines=_SGLANG,
    roles=_HALVES,
    why="The log says that a prefill node's layout is another than this decode's, and that its requests are admitted unverified. It says so once for "
    "each layout, not once for each request.",
    fix="Give both halves the same --tp-size, --pp-size, --page-size and --kv-cache-dtype.",
    source="The log line 'KV checksum skipped' of SGLang 0.5.23.",
)
def skipped(node: Sheet) -> Answer:
    if not is_checked(node):
        return None
    if facts.CHECKSUM_SKIPPED not in node and facts.VERSION in node and versions.older(node, SKIPS_SINCE):
        return Fine(f"SGLang {node[facts.VERSION]} skips no layout")
    count = node[facts.CHECKSUM_SKIPPED]
    return (
        f"the KV checksum is on, and the log says {_times(count)} that a layout is not compared"
        if count > 0
        else None
    )


@rule(
    "DET004",
    "transferred KV was not what prefill had sent",
    engines=_SGLANG,
    roles=_HALVES,
    why="A checksum that does not match is damaged or foreign KV: memory, network or a page that was written by somebody else. The request was ended, "
    "but without the checksum it would have been answered.",
    fix="Take the nodes out, keep the logs, and look for the requests that were served by them before the checksum was on.",
    source="The log line 'KV checksum mismatch' of SGLang 0.5.23.",
)
def mismatch(node: Sheet) -> Answer:
    if facts.CHECKSUM_WRONG not in node and not is_checked(node):
        return None
    count = node[facts.CHECKSUM_WRONG]
    return (
        f"the log says {_times(count)} that transferred KV was not what prefill had sent"
        if count > 0
        else None
    )


@rule(
    "DET005",
    "the KV canary is off",
    severity="note",
    engines=_SGLANG,
    why="The canary writes who a row belongs to beside it and compares at every read. Without it a wrong page is answered from without a trace.",
    fix="Start with --kv-canary raise on a part of the fleet at least (it needs prefill CUDA graphs off), with --kv-canary-real-data partial.",
    source="kv_canary/config.py of SGLang 0.5.23.",
)
def canary_off(node: Sheet) -> Answer:
    return (
        "--kv-canary is none: a page of another request is read without a trace"
        if node[facts.CANARY] == "none"
        else None
    )


@rule(
    "DET006",
    "the KV canary reports and lets the answer go out",
    severity="warning",
    engines=_SGLANG,
    why="In log mode a violation is a line in the log. The request that read the wrong page is answered all the same.",
    fix="Use --kv-canary raise where a wrong answer is worse than none, and alarm on the log line elsewhere.",
    source="kv_canary/config.py of SGLang 0.5.23.",
)
def canary_logs(node: Sheet) -> Answer:
    return (
        "--kv-canary is log: a violation is written to the log, and the answer still goes out"
        if node[facts.CANARY] == "log"
        else None
    )


@rule(
    "DET007",
    "the KV canary found rows of somebody else",
    engines=_SGLANG,
    why="A violation after the warm-up means that a request has read rows that were not written for it.",
    fix="Take the node out of service, keep its log, and find the requests that ran at that time.",
    source="kv_canary/runner/violation_reporter.py of SGLang 0.5.23.",
)
def canary_found(node: Sheet) -> Answer:
    if facts.CANARY_WRONG not in node and node[facts.CANARY] == "none":
        return Fine("the canary is off, so it looks at nothing")
    count = node[facts.CANARY_WRONG]
    return (
        f"the log has {count:,} violation{'' if count == 1 else 's'} of the KV canary after the warm-up"
        if count > 0
        else None
    )


@rule(
    "DET008",
    "the KV canary found violations while the server warmed up",
    severity="note",
    engines=_SGLANG,
    why="Before the first request of a client nobody's data is in the pool, and some warm-up steps touch rows that were never written. Violations then "
    "are no leak; they hide one that comes in the same lines.",
    fix="Compare with the same line of a start without load. Nothing else, if none comes after 'fired up and ready to roll'.",
    source="Seen in logs of servers that were started with the canary.",
)
def canary_warm_up(node: Sheet) -> Answer:
    if facts.CANARY_WARM_UP not in node and node[facts.CANARY] == "none":
        return Fine("the canary is off, so it looks at nothing")
    count = node[facts.CANARY_WARM_UP]
    return (
        f"the log has {count:,} violation{'' if count == 1 else 's'} of the KV canary, all before the server was ready"
        if count > 0
        else None
    )


@rule(
    "DET009",
    "nothing is transferred: the transfer backend is a fake",
    engines=_SGLANG,
    roles=_HALVES,
    why="The fake backend is for measurements of one half. It moves no KV and says that it has, so decode answers from whatever is in its pages.",
    fix="Use --disaggregation-transfer-backend mooncake or nixl.",
    source="disaggregation/fake/conn.py of SGLang 0.5.23.",
)
def fake(node: Sheet) -> Answer:
    return (
        "--disaggregation-transfer-backend is fake: no KV is moved, and decode reads whatever is in its pages"
        if node[facts.TRANSPORT] == "fake"
        else None
    )


@rule(
    "DET010",
    "nothing checks KV that is moved",
    severity="note",
    engines=_SGLANG,
    per="pair",
    why="With the checksum off in both halves a page that arrives damaged, or that somebody else has written meanwhile, is answered from.",
    fix="Start both halves with --disaggregation-enable-kv-checksum (SGLang 0.5.21 or later).",
    source="Off by default in SGLang 0.5.21 to 0.5.23; earlier versions have none.",
)
def both_off(pair: Pair) -> Answer:
    if not is_checked(pair.prefill) and not is_checked(pair.decode):
        return "the KV checksum is off in both halves: KV that arrives damaged is not noticed"
    return None


@rule(
    "DET011",
    "each rank decides alone whether transferred KV is damaged",
    severity="warning",
    engines=_SGLANG,
    roles=(DECODE,),
    why="Every rank compares the digest of its own part. In 0.5.21 and 0.5.22 a rank on which it does not match drops the request by itself, while the "
    "others go on with it: they then run different batches, and wait for each other for ever.",
    fix="Run 0.5.23 or later, where all ranks agree first.",
    source="_verify_kv_checksums in disaggregation/decode.py of SGLang 0.5.21 to 0.5.23; 0.5.20 has no checksum.",
)
def ranks_decide_alone(node: Sheet) -> Answer:
    if not versions.older(node, SKIPS_SINCE) or not is_checked(node):
        return None
    if node[facts.TP] > 1:
        return f"SGLang {node[facts.VERSION]} with {node[facts.TP]} ranks drops a damaged request on some of them only; {SKIPS_SINCE} lets all agree"
    return None


def is_checked(node: Sheet) -> bool:
    """Whether the checksum is on. Versions before 0.5.21 have none, and their pages cannot say so."""
    if facts.CHECKSUM not in node and facts.VERSION in node and versions.older(node, "0.5.21"):
        return False
    return node[facts.CHECKSUM]


def _effect(decode: Sheet) -> str:
    """What decode does with a request whose digest is of another layout."""
    if facts.VERSION not in decode:
        return f"requests are taken unverified (before {SKIPS_SINCE}: ended as damaged)"
    return (
        "requests are ended as damaged"
        if versions.older(decode, SKIPS_SINCE)
        else "requests are taken unverified"
    )


def _known_to_differ(pair: Pair, fact: Fact[object]) -> bool:
    ours, theirs = pair.prefill.values(fact), pair.decode.values(fact)
    return len(ours) == len(theirs) == 1 and ours != theirs


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


__all__ = ["SKIPS_SINCE", "is_checked"]
