"""Charts of counterexamples: drawn by hand here, once, and compared."""

from __future__ import annotations

import string

from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.proof.chart import FIRST, LAST, draw
from hermetic.proof.saved import Counterexample, Step

STEPS = (
    Step("gateway", "Submit", "decode-0", "A/1"),
    Step("gateway", "Submit", "prefill-0", "A/1"),
    Step("decode-0", "reserves its pages", key="A/1"),
    Step("decode-0", "Grant", "prefill-0", "A/1", "3 tokens, 2 pages"),
    Step("prefill-0", "Started", "decode-0", "A/1", fate="twice"),
    Step("decode-0", "Credit", "prefill-0", "A/1", "from 0: slot 0 use 1, slot 1 use 1", fate="lost"),
    Step("prefill-0", "Landed", "decode-0", "A/1", "batch 1: page 0 in slot 0 use 1", fate="lost"),
    Step("adversary", "the client leaves", "gateway", "A/1"),
    Step("adversary", "its process ends; another begins", "decode-0"),
    Step("network", "is cut"),
)
FOUND = Counterexample(
    "I3",
    "slot 0 is free while a write of page 0 of A/1 may still arrive in it",
    STEPS,
    scope={"name": "tiny", "prompts": [2, 1], "slots": 2, "faults.crash": 1, "faults.loss": 0},
    mutant="release-at-abort",
    shows=("slot 0: free", "batch 1 of A/1, page 0 -> slot 0 use 1, is under way"),
)

BY_HAND = """
I3, no early reuse: slot 0 is free while a write of page 0 of A/1 may still arrive in it
found by the explorer, scope tiny; prompts 2+1, slots 2; faults: crash 1; with the mutant
  release-at-abort; 10 steps

         gateway      prefill-0                                   decode-0
            |             |                                           |
   1  A/1   |------------------------ Submit ------------------------>|
   2  A/1   |-- Submit -->|                                           |
   3  A/1   |             |                                           * reserves its pages
   4  A/1   |             |<------- Grant: 3 tokens, 2 pages ---------|
   5  A/1   |             |------- Started (will arrive twice) ------>|
   6  A/1   |             |          x-------- Credit (lost) ---------|
            |             |  from 0: slot 0 use 1, slot 1 use 1       |
   7  A/1   |             |--------- Landed (lost) --------x          |
            |             |  batch 1: page 0 in slot 0 use 1          |
   8  A/1   ! adversary: the client leaves                            |
   9        |             |                                           ! adversary: its process
            |             |                                           | ends; another begins
  10      ! network: is cut                                           |

==> I3, no early reuse: slot 0 is free while a write of page 0 of A/1 may still arrive in it
    before the last step:
      slot 0: free
      batch 1 of A/1, page 0 -> slot 0 use 1, is under way
""".strip("\n")


def test_a_chart_looks_like_the_one_drawn_by_hand() -> None:
    assert draw(FOUND) == BY_HAND


def test_a_counterexample_without_steps_says_what_is_wrong_and_where() -> None:
    found = Counterexample(
        "induction", "a conjunct breaks", source="induction", shows=("slot s1 is granted to B",)
    )
    assert draw(found).splitlines() == [
        "induction, the invariant is not inductive: a conjunct breaks",
        "found by the induction",
        "",
        "==> induction, the invariant is not inductive: a conjunct breaks",
        "    there:",
        "      slot s1 is granted to B",
    ]


def test_a_long_chart_says_which_steps_it_leaves_out_and_draws_them_when_asked() -> None:
    steps = tuple(Step("decode-0", f"moment {n}") for n in range(1, 101))
    found = Counterexample("L1", "A/1 never ends", steps)
    short = draw(found)
    assert (
        f"steps {FIRST + 1} to {100 - LAST} are not drawn ({100 - FIRST - LAST} by decode-0); `hermetic prove --replay FILE --full`"
        in short
    )
    drawn = [n for n in range(1, 101) if f" moment {n}\n" in short]
    assert drawn == [*range(1, FIRST + 1), *range(100 - LAST + 1, 101)]
    full = draw(found, full=True)
    assert all(f" moment {n}\n" in full for n in range(1, 101))


def test_one_step_more_than_fits_is_drawn_and_not_replaced_by_a_line() -> None:
    steps = tuple(Step("decode-0", f"moment {n}") for n in range(FIRST + LAST + 1))
    assert "not drawn" not in draw(Counterexample("L1", "", steps))


def test_more_workers_than_lanes_fit_are_told_a_line_a_step() -> None:
    steps = tuple(Step(f"prefill-{n}", "Landed", f"decode-{n}", "B/1", "batch 1") for n in range(12))
    chart = draw(Counterexample("I2", "two writers", steps))
    assert "   5 B/1 prefill-4 -> decode-4: Landed: batch 1" in chart.splitlines()


def test_lanes_with_long_names_are_lettered_and_the_letters_explained() -> None:
    step = Step("prefill-in-the-cellar-of-house-seven", "Abort", "decode-a", "A/1")
    chart = draw(Counterexample("conformance", "", (step, Step("gateway", "Cancel", "decode-a"))))
    assert "B: prefill-in-the-cellar-of-house-seven" in chart.splitlines()


TEXT = st.text(string.printable + "äß→\x00\u2028", max_size=60)
LANES = st.one_of(
    st.sampled_from(
        ["gateway", "prefill-0", "prefill-1", "decode-0", "decode-1", "network", "adversary", ""]
    ),
    TEXT,
)
STEP = st.builds(
    Step,
    actor=LANES,
    what=TEXT,
    to=LANES,
    key=TEXT,
    detail=TEXT,
    fate=st.sampled_from(["", "lost", "twice", "late", "?"]),
)


@settings(max_examples=300)
@given(
    steps=st.lists(STEP, max_size=12), text=TEXT, width=st.integers(60, 140), shows=st.lists(TEXT, max_size=3)
)
def test_whatever_the_steps_are_the_chart_fits_the_width(
    steps: list[Step], text: str, width: int, shows: list[str]
) -> None:
    found = Counterexample("I1", text, tuple(steps), {"a": 1, "b": [1, 2]}, shows=tuple(shows))
    chart = draw(found, width)
    assert all(len(line) <= width for line in chart.split("\n"))
    assert all(line.isprintable() for line in chart.split("\n"))


@settings(max_examples=300)
@given(steps=st.lists(STEP, max_size=12), width=st.integers(60, 140))
def test_no_letter_of_a_step_is_left_out(steps: list[Step], width: int) -> None:
    chart = draw(Counterexample("I1", "", tuple(steps)), width)
    letters = sum(c.isalpha() and c.isascii() for s in steps for c in s.what + s.detail)
    drawn = sum(c.isalpha() and c.isascii() for c in chart)
    assert drawn >= letters
