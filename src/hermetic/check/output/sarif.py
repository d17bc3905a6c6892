"""The report as SARIF 2.1.0 (OASIS), for code scanning and whatever else reads it.

The one thing to know: findings are of kind `fail`, unknowns of kind `open`: neither is dropped. A result names a file and line where the
fact that it rests on stands in a file; a node that was asked over HTTP is a logical location.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from hermetic import __version__
from hermetic.check.output import words
from hermetic.check.result import Report, Verdict
from hermetic.check.rules import RULES, Rule

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
MOST_LOCATIONS = 10  # of one result


def dump(report: Report) -> bytes:
    codes = list(dict.fromkeys(verdict.code for verdict in report.verdicts))
    notices = [
        _notice(f"{one.source}: {one.why}", "error" if not one.part else "warning") for one in report.unread
    ]
    notices += [_notice(note, "note") for note in report.notes]
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "hermetic check", "version": __version__, "rules": [_rule(RULES[code]) for code in codes]}},
        "invocations": [{"executionSuccessful": not any(not one.part for one in report.unread), "toolExecutionNotifications": notices}],
        "results": [_result(verdict, codes.index(verdict.code), report) for verdict in report.verdicts],
    }  # fmt: skip
    whole = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.fix},
        "defaultConfiguration": {"level": rule.severity},
    }


def _notice(text: str, level: str) -> dict[str, Any]:
    return {"message": {"text": words.plain(text)}, "level": level}


def _result(verdict: Verdict, index: int, report: Report) -> dict[str, Any]:
    kinds = {"finding": "fail", "unknown": "open", "passed": "pass", "attested": "review"}
    kind = kinds[verdict.state]
    result: dict[str, Any] = {
        "ruleId": verdict.code,
        "ruleIndex": index,
        "kind": kind,
        "level": verdict.severity if kind == "fail" else "none",
        "message": {"text": words.message(verdict) if verdict.message else f"{words.plain(verdict.subject)}: passed"},
        "locations": _locations(verdict, report),
        "partialFingerprints": {"subjectAndRule/v1": f"{verdict.code}/{words.plain(verdict.subject)}"},
    }  # fmt: skip
    return result


def _locations(verdict: Verdict, report: Report) -> list[dict[str, Any]]:
    subject = [{"fullyQualifiedName": words.plain(verdict.subject), "kind": "resource"}]
    found = []
    for file, line in dict.fromkeys(
        filter(None, (words.place(where, report) for where in verdict.where)), None
    ):
        physical: dict[str, Any] = {"artifactLocation": {"uri": quote(file)}}
        if line is not None:
            physical["region"] = {"startLine": line}
        found.append({"physicalLocation": physical, "logicalLocations": subject})
        if len(found) == MOST_LOCATIONS:
            break
    return found or [{"logicalLocations": subject}]


__all__ = ["SCHEMA", "dump"]
