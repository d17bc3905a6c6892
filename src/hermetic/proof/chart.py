"""A counterexample as a message sequence chart in plain text: lanes down, arrows across, the broken promise at the end.

      gateway      prefill-0                                  decode-0
         |             |------------- Started: 2 pages ---------->|
         |             |               x--- Credit (lost) --------|

The one thing to know: nothing is cut off. Text that does not fit beside a lane goes on below it; steps that are not drawn are
counted, and the line in their place says how to see them. In the explorer an arrow stands where a message *arrives*.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hermetic.proof.saved import Counterexample, Step

WIDTH = 100
FIRST, LAST = 14, 46  # of a chart that is folded: steps drawn at its beginning, and at its end
GAP, NARROW, MARGIN = 14, 7, 30  # columns between lanes, at least between lanes, right of the last lane

PROMISES = {
    "I1": "read own",
    "I2": "exclusive write",
    "I3": "no early reuse",
    "I4": "fail closed",
    "I5": "conservation",
    "I6": "blast radius",
    "L1": "no hang",
    "L2": "no leak",
    "refinement": "the code took a step that the abstract protocol does not have",
    "induction": "the invariant is not inductive",
    "conformance": "the recording is not a behaviour of the protocol",
    "handoff": "product code raised",
}
_FOUND = {"conformance": "found in a recording"}
_FATES = {"lost": " (lost)", "twice": " (will arrive twice)", "late": " (late)"}
_NO_LANES = ("network", "adversary")


def draw(found: Counterexample, width: int = WIDTH, *, full: bool = False) -> str:
    """The whole chart, lines of at most `width` columns (60 at least). `full`: every step, however many there are."""
    return "\n".join(line.rstrip() for line in _lines(found, max(width, 60), full))


def promise(kind: str) -> str:
    """`I3, no early reuse`."""
    return f"{kind}, {PROMISES[kind]}" if kind in PROMISES else kind


def _lines(found: Counterexample, width: int, full: bool) -> Iterator[str]:
    yield from _folded_text(f"{promise(found.kind)}: {found.text}", width)
    yield from _folded_text(_origin(found), width)
    yield ""
    if found.steps:
        lanes = _Lanes.of(found.steps, width)
        if lanes is None:
            yield from _listed(found.steps, width, full)
        else:
            yield from lanes.header()
            for part in _parts(found.steps, full):
                yield from [part] if isinstance(part, str) else lanes.step(*part)
        yield ""
    yield from _folded_text(f"==> {promise(found.kind)}: {found.text}", width, "    ")
    if found.shows:
        end = "in the end" if found.kind.startswith("L") else "before the last step"
        yield f"    {end if found.steps else 'there'}:"
        for line in found.shows:
            yield from _folded_text(f"      {line}", width, "        ")


def _origin(found: Counterexample) -> str:
    """By whom, in which scope, with what. Faults that the adversary could not do, and what is as ever, is not named."""
    faults = {n.partition(".")[2]: v for n, v in found.scope.items() if n.startswith("faults.") and v}
    usual = {"name": found.scope.get("name"), "fenceable": True, "prefills": 1, "decodes": 1, "at_most": 99}
    numbers = {
        n: v
        for n, v in found.scope.items()
        if not n.startswith("faults.") and (n not in usual or usual[n] != v)
    }
    scope = f"scope {found.scope['name']}" if "name" in found.scope else ""
    told = [
        ", ".join(f"{name} {_value(value)}" for name, value in each.items()) for each in (numbers, faults)
    ]
    parts = [
        ", ".join(x for x in (_FOUND.get(found.source, f"found by the {found.source}"), scope) if x),
        told[0],
        f"faults: {told[1]}" if faults else "",
        "" if found.seed is None else f"seed {found.seed}",
        f"with the mutant {found.mutant}" if found.mutant else "",
        f"{len(found.steps)} steps" if found.steps else "",
    ]
    return "; ".join(part for part in parts if part)


def _value(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _folded_text(text: str, width: int, indent: str = "  ") -> list[str]:
    lead = text[: min(len(text) - len(text.lstrip(" ")), width // 3)]
    return textwrap.wrap(
        _clean(text), width, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False
    ) or [""]


def _clean(text: str) -> str:
    """One line of printable characters."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text).split())


def _parts(steps: Sequence[Step], full: bool) -> Iterator[tuple[int, Step] | str]:
    """Numbered steps, and one line in place of those that are left out of a long chart."""
    left_out = range(FIRST, len(steps) - LAST)
    for number, step in enumerate(steps):
        if full or len(left_out) < 2 or number not in left_out:
            yield number + 1, step
        elif number == FIRST:
            yield f"  ... steps {FIRST + 1} to {left_out[-1] + 1} are not drawn ({_summary(steps[FIRST : left_out[-1] + 1])}); `hermetic prove --replay FILE --full` draws them ..."


def _summary(steps: Iterable[Step]) -> str:
    """Few enough words for one line."""
    counted = Counter(step.actor for step in steps)
    return ", ".join(f"{n} by {_clean(actor)[:12]}" for actor, n in counted.most_common(2))


def _said(step: Step) -> str:
    """What a step says when it has no lane to stand beside."""
    text = step.what + _FATES.get(step.fate, "")
    return _clean(f"{text}: {step.detail}" if step.detail else text)


def _listed(steps: Sequence[Step], width: int, full: bool) -> Iterator[str]:
    """For more workers than lanes fit: a line a step."""
    for part in _parts(steps, full):
        if isinstance(part, str):
            yield from _folded_text(part, width)
            continue
        number, step = part
        who = f"{step.actor} -> {step.to}" if step.to else step.actor
        yield from _folded_text(f"{number:>4} {step.key} {who}: {_said(step)}", width, "       ")


@dataclass(frozen=True)
class _Lanes:
    """Where each lane stands. `gutter`: columns for a step's number and whose it is."""

    at: dict[str, int]
    titles: dict[str, str]
    keys: int
    width: int

    @classmethod
    def of(cls, steps: Sequence[Step], width: int) -> _Lanes | None:
        """None when there are more than fit."""
        names = dict.fromkeys(n for s in steps for n in (s.actor, s.to) if n and n not in _NO_LANES)
        order = sorted(names, key=_role)
        if not order:
            order = ["gateway"]
        keys = min(max(len(_clean(step.key)) for step in steps), 14)
        left, right = 6 + keys + 3, width - MARGIN
        gaps = len(order) - 1
        if left + gaps * NARROW > right:
            return None
        small = min(GAP, (right - left) // gaps) if gaps else 0
        at, column = {}, left
        for name, following in pairwise([*order, ""]):
            at[name] = column
            # Between prefill and decode stands what is worth reading: that gap gets the room that is left.
            wide = _role(name)[0] <= 1 < _role(following)[0] or (gaps == 1 and following)
            column += max(small, right - left - small * (gaps - 1)) if wide and following else small
        long = any(len(_clean(name)) >= small for name in order[:-1]) if gaps else False
        titles = {n: chr(65 + i) if long else _clean(n) for i, n in enumerate(order)}
        return cls(at, titles, keys, width)

    def header(self) -> list[str]:
        told = [f"{title}: {_clean(n)}" for n, title in self.titles.items() if title != _clean(n)]
        row = [" "] * self.width
        for name, column in self.at.items():
            title = self.titles[name]
            start = max(0, min(column - len(title) // 2, self.width - len(title)))
            row[start : start + len(title)] = title[: self.width]
        return [*(x for line in told for x in _folded_text(line, self.width)), "".join(row), self._row()]

    def step(self, number: int, step: Step) -> list[str]:
        key = _clean(step.key)
        fits = len(key) <= self.keys
        gutter = f"{number:>4}  {key if fits else '':<{self.keys}}"
        if not fits:
            step = Step(
                step.actor, step.what, step.to, "", f"{step.detail} ({key})".strip(), step.move, step.fate
            )
        if step.actor in self.at and step.to in self.at and step.actor != step.to:
            return self._arrow(gutter, step)
        return self._note(gutter, step)

    def _row(self, gutter: str = "") -> str:
        row = list(gutter.ljust(self.width))
        for column in self.at.values():
            row[column] = "|"
        return "".join(row)

    def _arrow(self, gutter: str, step: Step) -> list[str]:
        tail, head = self.at[step.actor], self.at[step.to]
        left, right = min(tail, head), max(tail, head)
        room = right - left - 1
        name, whole = _clean(step.what) + _FATES.get(step.fate, ""), _said(step)
        lost = step.fate == "lost"
        label = next((x for x in (whole, name) if x and len(x) + 6 <= room - lost * room // 4), "")
        row = list(self._row(gutter))
        start, end = left + 1, right
        if lost:  # it stops three quarters of the way
            start, end = (start, end - room // 4) if tail < head else (start + room // 4, end)
            row[left + 1 : right] = " " * room
            for column in self.at.values():
                row[column] = "|"
        row[start:end] = "-" * (end - start)
        point = "x" if lost else ">" if tail < head else "<"
        row[end - 1 if tail < head else start] = point
        if label:
            middle = (start + end - len(label) - 2) // 2
            row[middle : middle + len(label) + 2] = f" {label} "
        rest = "" if label == whole else _clean(step.detail) if label else whole
        below = self._beside(rest, left, right if room > 30 else self.width)
        return ["".join(row), *below]

    def _beside(self, text: str, left: int, right: int) -> list[str]:
        """Lines under an arrow, between its lanes when they leave room."""
        lines = []
        for part in textwrap.wrap(text, right - left - 5, break_on_hyphens=False):
            row = list(self._row())
            row[left + 3 : left + 3 + len(part) + 1] = f"{part} "
            lines.append("".join(row)[: self.width])
        return lines

    def _note(self, gutter: str, step: Step) -> list[str]:
        """What happens at one lane; what network and adversary do stands at the lane that it happens to, or at the left."""
        where = step.actor if step.actor in self.at else step.to
        column = self.at.get(where, min(self.at.values()) - 2)
        text = _said(step)
        if step.actor not in self.at:
            text = f"{step.actor}: {text}"
        elif step.to and step.to != step.actor:
            text = f"{text} -> {step.to}"
        mark = "*" if step.actor in self.at else "!"
        lines = []
        for i, part in enumerate(
            textwrap.wrap(text, self.width - column - 3, break_on_hyphens=False) or [""]
        ):
            row = list(self._row(gutter if i == 0 else ""))
            row[column] = mark if i == 0 else "|" if where in self.at else " "
            row[column + 1 : column + 3 + len(part)] = f" {part} "
            lines.append("".join(row)[: self.width])
        return lines


def _role(name: str) -> tuple[int, str, int, str]:
    """Gateway, prefill workers, decode workers, others; each by its number."""
    stem, _, number = name.rpartition("-")
    rank = {"gateway": 0, "prefill": 1, "decode": 2}.get(stem or name, 3)
    if not number.isdecimal() or not number.isascii():
        rank = next((r for role, r in (("prefill", 1), ("decode", 2)) if name.startswith(role)), rank)
        return rank, name, 0, name
    return rank, "", int(number[:9]), name


__all__ = ["FIRST", "LAST", "PROMISES", "WIDTH", "draw", "promise"]
