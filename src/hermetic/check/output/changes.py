"""What is otherwise than in the round before, for who watches.

The one thing to know: a finding that is not there any more is not always mended: its node may have fallen silent. So each change says from which
state to which.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from hermetic.check.output import words
from hermetic.check.result import Report, Verdict

_ABSENT = "not asked"


def changes(before: Report, now: Report) -> list[str]:
    """A line for each subject and kind of change; then for each source that is read otherwise than before."""
    old, new = _states(before), _states(now)
    alike = {key for key, states in [*old.items(), *new.items()] if len(states) > 1}
    old, new = _apart(before, old, alike), _apart(now, new, alike)
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key in dict.fromkeys([*new, *old]):
        was, is_now = _said(old, key), _said(new, key)
        if was != is_now:
            code, subject = key
            found[subject, was, is_now].append(code)
    told = [f"{subject}: {was} -> {is_now}: {words.some(codes)}" for (subject, was, is_now), codes in found.items()]  # fmt: skip
    unread, again = _unread(now), _unread(before)
    told += [f"{source}: {why}" for source, why in unread.items() if again.get(source) != why]
    return told + [f"{source}: read, or not there any more" for source in again if source not in unread]


def said_otherwise(before: Report, now: Report) -> list[Verdict]:
    """Findings of both whose sentence has changed: a count has risen, a pool is another."""
    old = Counter((one.code, one.subject, one.message) for one in before.of("finding"))
    found: list[Verdict] = []
    for one in now.of("finding"):
        key = one.code, one.subject, one.message
        if old[key] <= 0:
            found.append(one)
        old[key] -= 1
    return found


_States = dict[tuple[str, str], list[str]]


def _states(report: Report) -> _States:
    """By code and subject."""
    found: _States = defaultdict(list)
    for verdict in report.verdicts:
        found[verdict.code, verdict.subject].append(verdict.state)
    return dict(found)


def _apart(report: Report, states: _States, alike: set[tuple[str, str]]) -> _States:
    """The same, with the place in the subject where several have one name, as two proxies can."""
    found = {key: said for key, said in states.items() if key not in alike}
    for one in report.verdicts:
        if (one.code, one.subject) in alike:
            found.setdefault((one.code, f"{one.subject} ({', '.join(one.where[:1])})"), []).append(one.state)
    return found


def _said(states: _States, key: tuple[str, str]) -> str:
    return " and ".join(sorted(states.get(key, [_ABSENT])))


def _unread(report: Report) -> dict[str, str]:
    """By source, all that was not read of it."""
    found: dict[str, list[str]] = defaultdict(list)
    for one in report.unread:
        if not one.left_out:
            found[one.source].append(f"{'read only in part' if one.part else 'not read'}: {one.why}")
    return {source: "; ".join(sorted(whys)) for source, whys in found.items()}


__all__ = ["changes", "said_otherwise"]
