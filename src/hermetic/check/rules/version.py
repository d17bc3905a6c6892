"""Versions: what each release of SGLang mends between prefill and decode, and halves that do not match.

The one thing to know: a build with the fix in it looks like one without. `--has-patch NUMBER` attests the pull request, and the report then says
"attested" instead of finding it; what is attested has not been seen.

Each claim was compared with the source of 0.5.19 to 0.5.23; that of 0.5.16 to 0.5.18 was looked into for deferred release, and has none.
"""

from __future__ import annotations

from hermetic.check import facts, versions
from hermetic.check.deployment import DECODE, PREFILL, Pair
from hermetic.check.facts import NotKnown, Sheet
from hermetic.check.rules.registry import Answer, Fine, rule

_SGLANG, _HALVES = ("sglang",), (PREFILL, DECODE)
DEFERRED_SINCE = "0.5.19"  # the first release that has deferred release, if it is told to
DEFERS_SINCE = "0.5.21"  # the first that defers by itself


@rule(
    "VER001",
    "this SGLang answers over-long prompts from other requests' KV cache",
    engines=_SGLANG,
    roles=_HALVES,
    why="Before 0.5.20 a prompt over prefill's limit is replaced by a one-token placeholder, and the placeholder goes on to decode. Decode has "
    "reserved pages for the real prompt, gets one, and reads all: the others hold what earlier requests left. The client gets HTTP 200.",
    fix="Run 0.5.20 or later on both halves. Until then refuse in front of the pair every prompt over the smallest prefill pool, and take the answers "
    "given so far for leaked (`hermetic exposure` finds them in access logs).",
    source="Reproduced with SGLang 0.5.19 and a model of 135M parameters on a CPU: a prompt about the weather that was too long was answered with an "
    "earlier prompt's words. docs/incident.md stages the same chain on Hermetic's own workers. "
    "https://github.com/sgl-project/sglang/issues/30233, fixed by https://github.com/sgl-project/sglang/pull/36988: from 0.5.20 on prefill asks whether a "
    "request was aborted before it hands it over (_retire_aborted_prefill_result in disaggregation/prefill.py).",
    patches=(30325, 36988, 38935),
)
def leaks(node: Sheet) -> Answer:
    if versions.older(node, "0.5.20"):
        return f"SGLang {node[facts.VERSION]} answers prompts over prefill's limit from other requests' KV cache; 0.5.20 refuses them"
    return None


@rule(
    "VER002",
    "this SGLang takes refused requests into the handoff",
    severity="warning",
    engines=_SGLANG,
    roles=_HALVES,
    why="Before 0.5.21 a request that is refused at intake still does the handshake, takes a metadata buffer and a step of the model on a placeholder, "
    "and decode reserves pages for it, before the refusal reaches the client. It is one missed check away from the incident.",
    fix="Run 0.5.21 or later on both halves.",
    source="https://github.com/sgl-project/sglang/pull/38935; is_unadmitted_reject in disaggregation/prefill.py of 0.5.21.",
    patches=(38935,),
)
def no_refusal(node: Sheet) -> Answer:
    if versions.older(node, "0.5.21"):
        return f"SGLang {node[facts.VERSION]} takes requests that it has refused into the handoff; 0.5.21 refuses them at the door"
    return None


@rule(
    "VER003",
    "this SGLang releases decode's pages at once unless it is told not to",
    engines=_SGLANG,
    roles=_HALVES,
    why="Before 0.5.21 deferred release is off unless SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is set, and before 0.5.19 there is none. A "
    "request that is aborted while its pages arrive gives them to somebody else, and prefill goes on writing into them.",
    fix="Run 0.5.21 or later on both halves. 0.5.19 and 0.5.20 defer with SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=1 on both; earlier ones "
    "do not know the variable.",
    source="environ.py of 0.5.16 to 0.5.23; https://github.com/sgl-project/sglang/pull/35049, https://github.com/sgl-project/sglang/pull/35360.",
)
def not_deferred_by_default(node: Sheet) -> Answer:
    if versions.older(node, DEFERRED_SINCE):
        return f"SGLang {node[facts.VERSION]} has no deferred release: it never waits for a transfer before it releases its pages; {DEFERS_SINCE} does"
    if versions.older(node, DEFERS_SINCE) and not node.get(facts.DEFERRED, False):
        return f"SGLang {node[facts.VERSION]} does not wait for a transfer before it releases its pages, unless it is told to; {DEFERS_SINCE} does"
    return None


@rule(
    "VER004",
    "this SGLang takes an old answer to an abort for the new one",
    severity="warning",
    engines=_SGLANG,
    roles=_HALVES,
    why="Before 0.5.22 prefill's answer to an abort does not say which request it is about, only which room. When a room's number is used again, an "
    "answer that is late releases the pages of a request whose transfer still runs.",
    fix="Run 0.5.22 or later on both halves.",
    source="AbortNotification in disaggregation/common/conn.py of SGLang 0.5.22, which ignores answers without a generation; 0.5.19 to 0.5.21 send the room "
    "alone (_send_abort_ack).",
)
def untagged_answers(node: Sheet) -> Answer:
    if versions.older(node, "0.5.22"):
        return (
            f"SGLang {node[facts.VERSION]} does not tag its answers to aborts with the request; 0.5.22 does"
        )
    return None


@rule(
    "VER005",
    "this SGLang reports a failed Mooncake send as drained",
    engines=_SGLANG,
    roles=_HALVES,
    why="Before 0.5.22 a send that failed in Mooncake counts as ended, although part of it may still be written. Decode then gives the pages on too "
    "early.",
    fix="Run 0.5.22 or later on both halves.",
    source="poison_deferred_ack_room in disaggregation/mooncake/conn.py of SGLang 0.5.22.",
)
def failed_send_drained(node: Sheet) -> Answer:
    if versions.older(node, "0.5.22") and node[facts.TRANSPORT] == "mooncake":
        return f"SGLang {node[facts.VERSION]} reports a Mooncake send that failed as drained; 0.5.22 does not"
    return None


@rule(
    "VER006",
    "this SGLang may restore KV from the host on some ranks only",
    severity="warning",
    engines=_SGLANG,
    roles=(DECODE,),
    why="Before 0.5.22 a rank on which KV could not be restored from host memory fails the request by itself, while the other ranks take it as "
    "restored. They then run different batches: the answer is wrong, or they wait for each other for ever.",
    fix="Run 0.5.22 or later, or start decode without --disaggregation-decode-enable-radix-cache or --enable-hierarchical-cache; it restores only with both.",
    source="disaggregation/decode_hicache_mixin.py and decode.py of SGLang 0.5.21 and 0.5.22; enable_decode_hicache in managers/scheduler.py of 0.5.19 to "
    "0.5.23.",
)
def restore_differs(node: Sheet) -> Answer:
    if not versions.older(node, "0.5.22") or not node.get(facts.RESTORES, True):
        return None
    if node[facts.TP] > 1 or node[facts.PP] > 1:
        _ = node[facts.RESTORES]
        return f"SGLang {node[facts.VERSION]} with {node[facts.TP]} x {node[facts.PP]} ranks may take KV for restored from the host on some of them only; 0.5.22 lets all agree"
    return None


@rule(
    "VER007",
    "this SGLang has no figures about deferred releases",
    severity="note",
    engines=_SGLANG,
    roles=(DECODE,),
    why="Before 0.5.22 there is no sglang:decode_deferred_kv_release_total. That a release ended by time-out, with the transfer still running, is in decode's "
    'log alone ("timed out after ... without a full drain ack").',
    fix="Run 0.5.22 or later and alarm on the outcome timeout.",
    source="observability/metrics_collector.py of SGLang 0.5.22.",
)
def no_figures(node: Sheet) -> Answer:
    if versions.older(node, "0.5.22"):
        return f"SGLang {node[facts.VERSION]} does not count how deferred releases end, and says so in its log alone; 0.5.22 counts them"
    return None


@rule(
    "VER008",
    "the halves run different versions",
    severity="warning",
    engines=("sglang", "vllm"),
    per="pair",
    why="The protocol between the halves changes between releases (deferred release, tagged answers, checksums), and a half that does not know a "
    "message ignores it.",
    fix="Run the same version on both halves.",
    source="https://github.com/sgl-project/sglang/pull/38961 lists what the older half silently leaves out.",
)
def versions_differ(pair: Pair) -> Answer:
    prefill, decode = pair.prefill[facts.VERSION], pair.decode[facts.VERSION]
    if len(facts.one_release([prefill, decode])) > 1:
        return f"prefill runs {prefill} and decode {decode}"
    return None


@rule(
    "VER009",
    "the halves have different versions of the transfer engine",
    severity="warning",
    engines=("sglang", "vllm"),
    per="pair",
    why="Mooncake and NIXL change their wire format and their memory registration between releases; a mixed pair may fail in the middle of a transfer.",
    fix="Install the same version of the transfer engine on both halves.",
    source="Release notes of Mooncake and NIXL. Nothing that an engine answers says which one it has: the output of pip freeze on each node does, and so "
    "does a manifest that gives both halves one image.",
)
def engines_differ(pair: Pair) -> Answer:
    """What was seen installed of the transport that the pair uses; else one image for both, by its digest or a tag that names a version."""
    if all(facts.TRANSPORT_VERSION in half for half in pair.halves):
        prefill, decode = (_engine_of(half) for half in pair.halves)
        return None if prefill == decode else f"prefill has {prefill} and decode {decode}"
    ours, theirs = (half.values(facts.IMAGE) for half in pair.halves)
    if len(ours) == 1 and ours == theirs:
        return Fine(f"both halves run {ours[0]}, with the transfer engine that is in it")
    _ = pair.prefill[facts.TRANSPORT_VERSION], pair.decode[facts.TRANSPORT_VERSION]
    return None


def _engine_of(half: Sheet) -> str:
    """The version of the engine that moves its KV, with its name. Raises NotKnown."""
    moves = half[facts.TRANSPORT]
    told = [one for one in half.values(facts.TRANSPORT_VERSION) if one.startswith(f"{moves} ")]
    if len(told) != 1:
        raise NotKnown(
            f"{half.name}: the version of {moves} is not known; its sources name {half[facts.TRANSPORT_VERSION]}"
        )
    return told[0]
