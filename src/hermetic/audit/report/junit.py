"""The report as JUnit XML, which every pipeline can show.

The one thing to know: a scenario passes only if it was played to its end, compared something, and found nothing. Everything
else is a failure (a finding) or skipped with the reason; an audit that could not run, or was broken off, is an error of its own.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from hermetic.audit.report import words
from hermetic.audit.result import Finding, Played, Report
from hermetic.audit.signatures import BY_NAME

_CLASS = "hermetic.audit"
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, section 2.2


def text(report: Report) -> str:
    """One test suite, a test case for each scenario."""
    suite = ElementTree.Element("testsuite", name=_xml(f"hermetic audit {report.target}"))
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (
        ("verdict", report.verdict), ("target", report.target), ("model", report.model), ("profile", report.profile),
        ("seed", str(report.seed)), ("requests", str(report.requests)), ("bound", words.bound_sentence(report)),
        ("command", report.command),
    ):  # fmt: skip
        ElementTree.SubElement(properties, "property", name=name, value=_xml(value))
    for played in report.scenarios:
        _scenario(suite, played, [f for f in report.findings if f.scenario == played.name])
    listed = {played.name for played in report.scenarios}
    for name in sorted({f.scenario for f in report.findings} - listed):
        _scenario(
            suite,
            Played(name=name, says="", state="done"),
            [f for f in report.findings if f.scenario == name],
        )
    if report.verdict == "could not run" or report.reason:
        case = ElementTree.SubElement(suite, "testcase", classname=_CLASS, name="the audit itself", time="0")
        why = words.reason(report)
        ElementTree.SubElement(case, "error", type="could not run", message=_xml(why)).text = _xml(why)
    cases = suite.findall("testcase")
    for kind, plural in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(plural, str(sum(case.find(kind) is not None for case in cases)))
    suite.set("tests", str(len(cases)))
    suite.set("time", f"{report.seconds:.3f}")
    suite.set("timestamp", _xml(report.started))
    top = ElementTree.Element("testsuites", name="hermetic audit")
    top.append(suite)
    ElementTree.indent(top, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(top, encoding="unicode") + "\n"


def _scenario(suite: ElementTree.Element, played: Played, findings: list[Finding]) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname=_CLASS, name=_xml(played.name), time=f"{played.seconds:.3f}"
    )
    for finding in findings:
        failure = ElementTree.SubElement(
            case, "failure", type=finding.evidence, message=_xml(words.sentence(finding.what, 300))
        )
        failure.text = _xml(_told(finding))
    standing = words.standing(played)
    if standing and not findings:
        ElementTree.SubElement(case, "skipped", message=_xml(standing))
    ElementTree.SubElement(case, "system-out").text = _xml("\n".join(_covered(played)))


def _covered(played: Played) -> list[str]:
    told = [words.visible(played.says), words.count(played.requests, "request")]
    told += [
        f"{c.evidence}: {c.findings} of {words.count(c.comparisons, 'comparison')}"
        + (f", with 95 % confidence {words.one_in(c.comparisons)}" if not c.findings else "")
        for c in played.coverage
        if c.comparisons
    ]
    left_out = words.left_out(played)
    return [
        item
        for item in [*told, words.standing(played), f"left out here: {left_out}" if left_out else ""]
        if item
    ]


def _told(finding: Finding) -> str:
    lines = [
        words.sentence(finding.what, 1000),
        words.sentence(finding.why, 1000),
        words.chance(finding.p),
        f"seen {words.count(finding.times, 'time')}",
    ]
    known = BY_NAME.get(finding.signature)
    if known is not None:
        lines += [
            f"looks like: {known.title}",
            known.cause,
            f"fixed: {known.fixed}" if known.fixed else "",
            known.todo,
        ]
    for name, answer in zip(("wrong", "beside"), finding.answers[:2], strict=False):
        lines += [
            f"{name}: request {answer.number} of tenant {words.line(answer.ask.tenant)}: {words.how(answer)}",
            "  asked: " + words.line(words.asked(answer.ask), 400),
            "  answered: " + words.line(answer.text or answer.error, 400),
        ]
    if finding.repeat:
        lines.append(f"again: {words.visible(finding.repeat)}")
    return "\n".join(item for item in lines if item)


def _xml(value: str) -> str:
    return _ILLEGAL.sub("\ufffd", words.visible(value))


__all__ = ["text"]
