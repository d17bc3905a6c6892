"""The report as GitHub workflow commands: one annotation for each finding, unknown and source that was not read.

Format: https://docs.github.com/actions/reference/workflow-commands-for-github-actions (escaping as its toolkit does).
"""

from __future__ import annotations

from hermetic.check.output import words
from hermetic.check.result import Report, Verdict

_LEVELS = {"error": "error", "warning": "warning", "note": "notice"}


def dump(report: Report, strict: bool = False) -> str:
    lines = [_annotation(_LEVELS[v.severity], v, words.message(v), report) for v in report.of("finding")]
    level = "error" if strict else "notice"
    lines += [_annotation(level, v, f"unknown: {words.message(v)}", report) for v in report.of("unknown")]
    for one in report.unread:
        if one.left_out:
            continue
        text = f"{one.source}: {one.why}"
        lines.append(f"::{'warning' if one.part else 'error'} title=not read::{_data(words.plain(text))}")
    lines += [f"::notice::{_data(words.plain(note))}" for note in report.notes]
    return "".join(f"{line}\n" for line in [*lines, f"::notice::{_data(words.headline(report, strict))}"])


def _annotation(level: str, verdict: Verdict, text: str, report: Report) -> str:
    unknown = "unknown: " if verdict.state == "unknown" else ""
    title = f"{verdict.code} {unknown}{words.title(verdict.code)}"
    places = [found for where in verdict.where if (found := words.place(where, report)) is not None]
    name, line = min(
        places, key=lambda one: one[1] is None, default=("", None)
    )  # one with a line, if there is any
    file = f"file={_property(name)}," + (f"line={line}," if line is not None else "") if name else ""
    return f"::{level} {file}title={_property(title)}::{_data(text)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


__all__ = ["dump"]
