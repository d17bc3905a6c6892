"""Coverage: a detector that is on and has looked at nothing.

The one thing to know: "no violations" is what a detector says that works and finds nothing, and what one says that does not run. Only a count of
what was looked at tells them apart.
"""

from __future__ import annotations

from hermetic.check import facts, versions
from hermetic.check.deployment import Pair
from hermetic.check.facts import NotKnown, Sheet
from hermetic.check.rules.detection import SKIPS_SINCE, is_checked
from hermetic.check.rules.registry import Answer, Fine, rule


@rule(
    "COV001",
    "the KV canary is on and has checked nothing",
    engines=("sglang",),
    why="A canary that was not installed, or whose checks were skipped because a buffer was too small, reports no violation either.",
    fix="Look for 'install_canary' and for 'per-forward verify skipped' in the log, and for protected_tokens in the '[canary]' lines "
    "(SGLANG_KV_CANARY_STATS_PRINT_EVERY_N_STEPS, 100 by default).",
    source="kv_canary/runner of SGLang 0.5.23.",
)
def canary_idle(node: Sheet) -> Answer:
    if node[facts.CANARY] == "none":
        return Fine("the canary is off")
    checked = node[facts.CANARY_CHECKED]
    if checked > 0 or (served := node[facts.SERVED_REQUESTS]) == 0:
        return None
    return (
        f"--kv-canary is {node[facts.CANARY]}, {served:,} requests were served, and it has checked no token"
    )


@rule(
    "COV002",
    "the KV checksum is on and compares nothing",
    engines=("sglang",),
    per="pair",
    why="SGLang counts the checksums that do not match, not those that do. Where decode skips a layout its requests are taken unverified, and that is said "
    "once for each layout.",
    fix="Give both halves the same --tp-size, --pp-size, --page-size and --kv-cache-dtype, and send a request through each pair after a start.",
    source="disaggregation/decode.py of SGLang 0.5.21 and 0.5.22 (compares whatever came) and of 0.5.23 (_kv_checksum_comparable).",
    severity="warning",
)
def checksum_idle(pair: Pair) -> Answer:
    """With the checksum on in both halves, decode compares every request whose layout it does not skip. 0.5.21 and 0.5.22 skip none. 0.5.23 writes a line for
    each layout that it skips, so a log from the start on without one shows that it skips none."""
    if not all(is_checked(half) for half in pair.halves):
        return Fine("the KV checksum is off in a half")  # DET001, DET010
    decode = pair.decode
    if decode.get(facts.CHECKSUM_SKIPPED, 0) > 0:
        skipped = decode[facts.CHECKSUM_SKIPPED]
        return f"the KV checksum is on, and decode's log says of {skipped:,} layout{'' if skipped == 1 else 's'} that requests are taken unverified"
    if versions.older(decode, SKIPS_SINCE):
        return None
    if versions.of(decode).release != versions.parse(SKIPS_SINCE).release:
        raise NotKnown(f"{decode.name}: when SGLang {decode[facts.VERSION]} skips a checksum is not known")
    if not (decode[facts.STARTED] and decode[facts.CHECKSUM_SKIPPED] == 0):
        raise NotKnown(
            f"{decode.name}: whether it skips a layout is not known; its log from the start on would say it"
        )
    return None
