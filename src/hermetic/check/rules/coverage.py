"""Coverage: a detector that is on and has looked at nothing.

The one thing to know: "no violations" is what a detector says that works and finds nothing, and what one says that does not run. Only a count of
what was looked at tells them apart.
"""

from __future__ import annotations

from hermetic.check import facts
from hermetic.check.facts import NotKnown, Sheet
from hermetic.check.rules.detection import is_checked
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
    "the KV checksum is on and may compare nothing",
    engines=("sglang",),
    roles=("decode",),
    why="SGLang counts the checksums that do not match, not those that do. Where the log says that layouts are skipped, and transfers arrived, nothing says "
    "that any was compared.",
    fix="Give both halves the same --tp-size, --pp-size, --page-size and --kv-cache-dtype, and send a request through each pair after a start.",
    source="disaggregation/decode.py of SGLang 0.5.23 (_kv_checksum_comparable).",
    severity="warning",
)
def checksum_idle(node: Sheet) -> Answer:
    if not is_checked(node):
        return None
    skipped = node[facts.CHECKSUM_SKIPPED]
    if skipped > 0:
        return f"the KV checksum is on, and the log says of {skipped:,} layout{'' if skipped == 1 else 's'} that requests are taken unverified"
    if node.get(facts.CHECKSUM_WRONG, 0) > 0:
        return None
    raise NotKnown(
        f"{node.name}: SGLang counts the checksums that do not match, not those that do, so nothing says that any was compared"
    )
