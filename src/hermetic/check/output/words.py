"""Sentences that all forms of a report share, and what makes a server's text safe to show."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hermetic.check.result import Report, Verdict
from hermetic.check.rules import RULES

_LINE = re.compile(r", line (\d{1,9})\b")
MOST = 4  # names in a list, before it says how many more
_NO_FILES = ("http://", "https://", "standard input", "command line")
LONGEST = 600  # characters of one message; logs and answers can hold anything


def plain(text: str, limit: int = LONGEST) -> str:
    """One line without control characters or marks that reorder text."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    joined = " ".join(shown.split())
    return joined if len(joined) <= limit else joined[: limit - 1] + "\u2026"


def message(verdict: Verdict) -> str:
    """Of a finding: whose it is, and what is wrong."""
    said = plain(verdict.message)
    return said if said.startswith(verdict.subject) else f"{plain(verdict.subject, 120)}: {said}"


def headline(report: Report, strict: bool) -> str:
    """How it ended, with counts."""
    findings, unknown = report.of("finding"), report.of("unknown")
    unread = [one for one in report.unread if not one.part]
    if unread and not report.nodes and not report.verdicts:
        return f"Nothing was checked: {counted(len(unread), 'source')} not read"
    parts = [
        counted(len(findings), "finding"),
        f"{len(unknown)} unknown",
        f"{len(report.of('passed'))} passed",
    ]
    if unread:
        parts.append(f"{counted(len(unread), 'source')} not read")
    end = "Not clean" if findings or (strict and unknown) else "Could not be read" if unread else "Clean, as far as it is known" if unknown else "Clean"  # fmt: skip
    return f"{end}: {', '.join(parts)}"


def place(where: str, report: Report) -> tuple[str, int | None] | None:
    """The file of the report's sources that a fact stands in ("prefill.log, line 7", "compose.yml, service prefill"), and the line if it is said. None
    for what is no file."""
    sources = [source for node in report.nodes for source in node.sources] + report.sources
    # a place in a file (a service of a compose file) is a source of its own, so the files themselves come first
    source = _longest(where, report.files) or _longest(where, sources)
    if not source or (source not in report.files and source.startswith(_NO_FILES)):
        return None
    line = _LINE.match(where.removeprefix(source))
    return source, int(line[1]) if line is not None and int(line[1]) > 0 else None


def _longest(where: str, sources: Sequence[str]) -> str:
    """The source that a place begins with."""
    found = [one for one in sources if where == one or where.startswith((f"{one}, ", f"{one}: "))]
    return max(found, key=len, default="")


def some(names: Sequence[str]) -> str:
    """The first few of many, and how many more."""
    return ", ".join(names[:MOST]) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def counted(number: int, one: str) -> str:
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def title(code: str) -> str:
    return RULES[code].title


__all__ = ["counted", "headline", "message", "place", "plain", "some", "title"]
