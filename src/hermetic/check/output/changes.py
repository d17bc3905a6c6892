"""What is otherwise than in the round before, for who watches.

The one thing to know: a finding that is not there any more is not always mended: its node may have fallen silent. So each change says from which
state to which.
"""

from __future__ import annotations

from collections import defaultdict

from hermetic.check.output import words
from hermetic.check.result import Report, Verdict

_ABSENT = "not asked"


def changes(before: Report, now: Report) -> list[str]:
    """A line for each subject and kind of change; then for each source that is read, or is not read, otherwise than before."""
    old, new = _states(before), _states(now)
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key in dict.fromkeys([*new, *old]):
        was, is_now = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if was != is_now:
            code, subject = key
            found[subject, was, is_now].append(code)
    told = [f"{subject}: {was} -> {is_now}: {words.some(codes)}" for (subject, was, is_now), codes in found.items()]  # fmt: skip
    unread, again = _unread(now), _unread(before)
    told += [f"{source}: not read any more" for source in unread if source not in again]
    return told + [f"{source}: read again" for source in again if source not in unread]


def said_otherwise(before: Report, now: Report) -> list[Verdict]:
    """Findings of both whose sentence has changed: a count has risen, a pool is another."""
    old = {(one.code, one.subject, one.message) for one in before.of("finding")}
    return [one for one in now.of("finding") if (one.code, one.subject, one.message) not in old]


def _states(report: Report) -> dict[tuple[str, str], str]:
    """By code and subject; two proxies can have one name."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for verdict in report.verdicts:
        found[verdict.code, verdict.subject].append(verdict.state)
    return {key: " and ".join(sorted(states)) for key, states in found.items()}


def _unread(report: Report) -> list[str]:
    return list(dict.fromkeys(one.source for one in report.unread if not one.part))


__all__ = ["changes", "said_otherwise"]
