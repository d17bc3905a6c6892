"""What each fault must come to under each setting of the walls, worked out by reasoning, before anything was run.

The reasons, one for each kind of fault:

- *The incident.* Pages that never came have no tag (ownership); fewer pages were announced than reserved (counts); the
  one page that came is not the prompt's first page (landing, read). Exclusivity has nothing to say about it.
- *In a landing slot, before the copy.* Every page that was announced arrives, so counts agree and tags are set: only a
  check of the bytes sees it, on landing or when they are read. A damage that happens once is healed by the resend; with
  checks at the read alone there is no resend any more, and the request fails.
- *In a live page, after it was verified.* Landing is over and tags say nothing about bytes: only a check at every read
  sees it. This is what the default does not cover, and what `--verify read` is for.
- *In prefill's own page.* Not sent yet: its seal was made from the values, not from the memory, so landing sees the
  damage; tags do not. Sent already: decode has good bytes, but later chunks of the prompt attended to bad ones; that is
  a read of a live page again.
- *A late write to a slot.* With exclusivity a slot is not a page: nothing happens. Without, it is a live page.
- *A page table that points elsewhere.* The tag there is null or of another lineage (ownership), and so are mask and
  bind terms (read). Nothing lands, so landing, counts and exclusivity see nothing.

LEAK where the bytes are another tenant's, WRONG where they are the request's own or nobody's.
"""

from __future__ import annotations

from hermetic.lab.faults import (
    MUTATIONS,
    Computed,
    Fault,
    Incident,
    Landed,
    Late,
    Live,
    Mutation,
    TableToFreed,
    TableToOther,
    bit_flipped,
    models_page,
    tenants_page,
    tenants_row,
)
from hermetic.lab.scene import SETTINGS, Verdict

LETTERS = {"c": Verdict.CAUGHT, "h": Verdict.HARMLESS, "L": Verdict.LEAK, "W": Verdict.WRONG}
OF_OTHERS = frozenset(
    {tenants_page, tenants_row, models_page}
)  # mutations that bring in another tenant's rows

# In the order of scene.SETTINGS: product default, --verify read, --verify tags | ownership, landing, read, exclusivity,
# counts alone | no walls. "!" is LEAK or WRONG, by what the mutation brings in.
INCIDENT = "ccc cccLc L"
LANDED = "cc! !cc!! !"
LANDED_ONCE = "hh! !hc!! !"
LIVE = "!c! !!c!! !"
UNSENT = "cc! !cc!! !"
SENT = "!c! !!c!! !"
LATE = "hhh !!ch! !"
TABLE = "ccc cLcLL L"


def _row(fault: Fault, cells: str, mutation: Mutation | None = None) -> tuple[Fault, tuple[Verdict, ...]]:
    bad = "L" if mutation in OF_OTHERS else "W"
    verdicts = tuple(LETTERS[c] for c in cells.replace(" ", "").replace("!", bad))
    assert len(verdicts) == len(SETTINGS)
    return fault, verdicts


TABLE_OF_FAULTS: tuple[tuple[Fault, tuple[Verdict, ...]], ...] = (
    _row(Incident(), INCIDENT),
    *(_row(Landed(mutation), LANDED, mutation) for mutation in MUTATIONS),
    _row(Landed(bit_flipped, once=True), LANDED_ONCE, bit_flipped),
    *(_row(Live(mutation), LIVE, mutation) for mutation in MUTATIONS),
    _row(Computed(bit_flipped, sent=False), UNSENT, bit_flipped),
    _row(Computed(bit_flipped, sent=True), SENT, bit_flipped),
    _row(Late(bit_flipped), LATE, bit_flipped),
    _row(Late(tenants_page), LATE, tenants_page),
    _row(TableToFreed(), TABLE),
    _row(TableToOther(), TABLE),
)
