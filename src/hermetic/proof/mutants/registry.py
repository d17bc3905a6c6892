"""Every mutant by name: the fault in the words of a report, its classes in FAULTS.md, and where it must be caught.

To add one: a function that is decorated with `replaces("module:Class.method")` and turns the original into the fault, and
an entry here. The one thing to know: `scope` is the smallest in which the explorer finds it, not the one that is proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from hermetic.proof.mutants import admission, drains, identity, landing
from hermetic.proof.mutants.patching import EXPLORER, MutantError, Patch, Reached, patched
from hermetic.proof.scopes import Scope

INDUCTION, SIMULATOR, SEAL, LAB = "induction", "simulator", "seal", "lab"
CATCHERS = (EXPLORER, INDUCTION, SIMULATOR, SEAL, LAB)


@dataclass(frozen=True)
class Mutant:
    """`number`: in the list of the proof's issue, 0 for those beyond it. `caught_by`: where it must be found. `weather`: rates
    of faults that the simulator runs it under, where they differ from the usual ones."""

    name: str
    fault: str
    classes: tuple[str, ...]
    patches: tuple[Patch, ...]
    caught_by: tuple[str, ...]
    scope: Scope | None = None
    number: int = 0
    weather: Mapping[str, float] = field(default_factory=dict)


def _scope(prompts: tuple[int, ...], pages: int, slots: int, fenceable: bool = True, **faults: int) -> Scope:
    return Scope("mutant", prompts, pages, slots, faults, fenceable=fenceable)


# Sessions repeat what was lost, so only one that ends takes news with it for good.
_CUT_OFF = {"freeze": 12.0, "cut": 12.0}

_LIST = (
    Mutant(
        "reject-becomes-placeholder",
        "A prompt that does not fit is replaced by one token and goes on, as if it had been served.",
        ("fail open", "partial state"),
        (admission.never_too_long, admission.placeholder_taken, admission.one_page_instead),
        (EXPLORER, SIMULATOR, LAB),
        _scope((2,), 2, 1),
        1,
    ),
    Mutant(
        "admit-unless-finished",
        "Decode asks whether every page is finished, not whether it was accepted: one that failed counts as well.",
        ("fail open", "partial state"),
        (landing.finished_is_enough,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 1, damage=1),
        2,
    ),
    Mutant(
        "trust-complete-count",
        "Decode believes prefill's word that everything is there, and counts nothing itself.",
        ("partial state", "fail open"),
        (landing.complete_is_believed,),
        (EXPLORER, INDUCTION, SIMULATOR, SEAL),
        _scope((1,), 1, 1),
        3,
    ),
    Mutant(
        "release-at-abort",
        "Decode frees the landing slots of an aborted request at once, with a write to them in flight.",
        ("in-flight reuse",),
        (drains.slots_free_at_the_end,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 1, abort=1),
        4,
    ),
    Mutant(
        "drain-target-cleared",
        "Prefill forgets an aborted request, and whom to tell, before its writes are over; asked later, it knows of none.",
        ("in-flight reuse", "lost signal"),
        (drains.target_cleared,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 1, abort=1),
        5,
    ),
    Mutant(
        "one-drain-target",
        "Prefill waits for one write of an aborted request; a second one overwrites the first.",
        ("in-flight reuse",),
        (drains.last_write_only,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((2,), 2, 2, abort=1),
        6,
    ),
    Mutant(
        "abort-unknown-unanswered",
        "An abort of a request that prefill has cleared already gets no answer, and decode waits for one.",
        ("lost signal", "leak"),
        (drains.abort_unanswered,),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, abort=1, loss=1),
        7,
        _CUT_OFF,
    ),
    Mutant(
        "release-on-other-failure",
        "Aborts wait to be drained, failures of other kinds release at once.",
        ("in-flight reuse",),
        (drains.prefill_failure_at_once, drains.decode_failure_at_once),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((2,), 2, 2, late=1),
        8,
    ),
    Mutant(
        "source-freed-while-read",
        "Prefill gives the pages of an aborted request back while a write still reads them.",
        ("in-flight reuse",),
        (drains.source_freed,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 1, abort=1),
        9,
    ),
    Mutant(
        "failed-send-counts-as-drained",
        "A write that failed counts as over, although its bytes may still be on their way.",
        ("in-flight reuse",),
        (drains.failed_means_stopped,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 1, late=1),
        10,
    ),
    Mutant(
        "stale-answer-by-reused-id",
        "A second attempt goes by the id of the first, and takes an answer that was meant for that.",
        ("id reuse", "stale reference"),
        (identity.next_attempt_hears_the_last, identity.attempt_not_compared),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 2, fenceable=False, silence=1, abort=1),
        11,
        _CUT_OFF,
    ),
    Mutant(
        "time-out-releases-anyway",
        "When a drain takes too long, its slots are given back without it.",
        ("in-flight reuse",),
        (drains.released_anyway,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 1, abort=1, deadline=1),
        12,
    ),
    Mutant(
        "double-close",
        "A path that handles an error closes leases that were closed before.",
        ("in-flight reuse", "leak"),
        (admission.book_closes_twice, admission.engine_closes_twice, admission.prefill_closes_twice),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, abort=1),
        13,
    ),
    Mutant(
        "one-half-cancelled",
        "The gateway cancels decode's half of a request and leaves prefill's to itself.",
        ("lost signal", "leak"),
        (admission.decode_only_dropped, admission.leaves_decode_only, admission.tells_decode_only),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, abort=1),
        14,
    ),
    Mutant(
        "batch-bound-over-deadline",
        "What may be in flight takes longer than the drain deadline, so a slow peer looks like a lost one.",
        ("in-flight reuse", "stuck queue"),
        (admission.bounds_unchecked, admission.overdue_under_way),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, abort=1),
        15,
    ),
    Mutant(
        "late-write-between-verify-and-copy",
        "The slot is hashed and then copied: a late write between the two is copied unseen.",
        ("stream order", "in-flight reuse"),
        (landing.remembers_slots, landing.copies_after_verify, landing.page_copied_after_verify),
        (EXPLORER, INDUCTION, SEAL),
        _scope((2,), 2, 1, late=1),
        16,
    ),
    Mutant(
        "credit-before-copy",
        "A slot is given to the next page before its own was copied out.",
        ("in-flight reuse", "stream order"),
        (landing.slot_back_before_copy, landing.consumed_before),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((2,), 2, 1),
        17,
    ),
    # ------------------------------------------------------------------ beyond the list
    Mutant(
        "nudge-says-nothing",
        "Nobody says again what may have been lost: one lost message holds a request for ever.",
        ("lost signal",),
        (drains.prefill_says_nothing, drains.decode_says_nothing),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, loss=1),
        weather=_CUT_OFF,
    ),
    Mutant(
        "fence-of-nothing",
        "Decode takes a peer for fenced whose writes still arrive.",
        ("stale reference", "in-flight reuse"),
        (drains.fence_of_nothing, drains.simulated_fence_of_nothing),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 1, late=1),
    ),
    Mutant(
        "drain-before-writes-end",
        "Prefill says drained as soon as it is asked, with a write still in flight.",
        ("in-flight reuse",),
        (drains.drained_when_asked,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 1, abort=1),
    ),
    Mutant(
        "slot-use-repeats",
        "Every use of a slot has the same number, so news of the last use passes for news of this one.",
        ("id reuse", "stale reference"),
        (identity.uses_repeat,),
        (EXPLORER, SIMULATOR),
        _scope((2,), 2, 1, duplicate=1),
    ),
    Mutant(
        "ends-forgotten",
        "Prefill forgets how a request ended at once, and a grant that comes late begins it again.",
        ("stale reference", "leak"),
        (identity.ends_forgotten,),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, abort=1),
    ),
    Mutant(
        "credit-used-twice",
        "A credit that is said again is taken for a further one, and its slot is written twice.",
        ("id reuse", "in-flight reuse"),
        (identity.credit_counts_again,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((2,), 2, 1, duplicate=1),
    ),
    Mutant(
        "landed-before-written",
        "Prefill announces a page when its write begins, not when it has ended.",
        ("stream order",),
        (landing.announced_before_written,),
        (EXPLORER, INDUCTION, SIMULATOR),
        _scope((1,), 1, 1),
    ),
    Mutant(
        "tail-left-behind",
        "Prefill calls a prompt complete when its full pages are sent; the last rows never come.",
        ("partial state",),
        (landing.complete_without_tail,),
        (EXPLORER, SIMULATOR),
        _scope((2,), 2, 1),
    ),
    Mutant(
        "verification-skipped",
        "A page that cannot be verified counts as verified.",
        ("fail open",),
        (landing.nothing_verified, landing.everything_is_good),
        (EXPLORER, INDUCTION, SIMULATOR, SEAL),
        _scope((1,), 1, 1, damage=1),
    ),
    Mutant(
        "tag-before-verify",
        "A page gets its tag when it is copied, and keeps it when verification refuses it.",
        ("fail open", "stream order"),
        (landing.remembers_round, landing.tagged_before, landing.page_tagged_at_copy),
        (EXPLORER,),
        _scope((1,), 1, 1, damage=1),
    ),
    Mutant(
        "ack-before-verify",
        "Decode acknowledges when everything was announced, and cannot ask for a bad page once more.",
        ("fail open", "stuck queue"),
        (landing.ack_before_verify,),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, damage=1),
    ),
    Mutant(
        "failure-reported-as-success",
        "Prefill reports a failed request as completed.",
        ("fail open",),
        (drains.failure_is_success,),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, late=1, loss=1),
    ),
    Mutant(
        "quarantine-forgets",
        "Slots that go out of use are dropped from the books, and never come back.",
        ("leak",),
        (drains.quarantine_forgets,),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, abort=1, deadline=1),
    ),
    Mutant(
        "leases-left",
        "Prefill's pages stay leased after an abort.",
        ("leak",),
        (drains.leases_stay,),
        (EXPLORER, SIMULATOR),
        _scope((1,), 1, 1, abort=1),
    ),
    Mutant(
        "all-slots-or-none",
        "A request waits until all the slots that it could use are free at once, and stands in its own way.",
        ("stuck queue",),
        (landing.all_or_nothing,),
        (EXPLORER, SIMULATOR),
        _scope((2,), 2, 1),
    ),
    Mutant(
        "firsts-by-slot",
        "First tokens are kept by place, not by ticket, and go to whoever comes there next.",
        ("slot bleed",),
        (landing.firsts_by_row,),
        (SIMULATOR, LAB),
    ),
    Mutant(
        "lineage-without-tenant",
        "The key of cached pages leaves out the tenant.",
        ("key scope",),
        (identity.root_without_tenant,),
        (SIMULATOR, LAB),
    ),
    Mutant(
        "nothing-differs",
        "Two workers become a pair whatever their models and layouts are.",
        ("layout mismatch",),
        (identity.nothing_differs,),
        (SEAL, SIMULATOR),
    ),
)  # fmt: skip

MUTANTS: dict[str, Mutant] = {m.name: m for m in sorted(_LIST, key=lambda m: m.number or len(_LIST))}


def find(name: str) -> Mutant:
    """Raises MutantError with the names that there are."""
    if name not in MUTANTS:
        raise MutantError(f"there is no mutant {name!r}; there are: {', '.join(MUTANTS)}")
    return MUTANTS[name]


@contextmanager
def applied(name: str, runs: str = "") -> Iterator[Reached]:
    """The product with this fault, until the block is left. "" changes nothing."""
    with patched(find(name).patches if name else (), runs) if name else _nothing() as reached:
        yield reached


@contextmanager
def _nothing() -> Iterator[Reached]:
    yield Reached(())
