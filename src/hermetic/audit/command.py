"""`hermetic audit`, from its options to its exit code: 0 nothing found, 1 a finding, 2 could not run, or not to its end."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from hermetic.audit.report import html, json_file, junit, terminal
from hermetic.audit.report.redact import without_keys
from hermetic.audit.result import Report
from hermetic.audit.run import BUDGETS, AuditOptions, audit
from hermetic.audit.target import TargetError
from hermetic.options import OptionError

_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Outputs:
    """Where the report goes beside the terminal."""

    html: Path | None = None
    json: Path | None = None
    junit: Path | None = None
    quiet: bool = field(default=False)

    def check(self) -> None:
        """Raises OptionError for a file that cannot be written, before an hour of probes and not after it."""
        for path in (self.html, self.json, self.junit):
            if path is not None and not (path.parent.is_dir() and not path.is_dir()):
                raise OptionError(f"{path} cannot be written: {path.parent} is no folder, or {path} is one")

    def write(self, report: Report) -> None:
        """Raises json_file.ReportFileError."""
        if self.html is not None:
            json_file.replace(self.html, html.page(report).encode())
        if self.json is not None:
            json_file.write(self.json, report)
        if self.junit is not None:
            json_file.replace(self.junit, junit.text(report).encode())


def seconds(text: str) -> float:
    """`90`, `90s`, `5m`, `2h`, in seconds. Raises OptionError."""
    found = _BUDGET.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise OptionError(f"--budget is {text!r}; it must be a time like 90s, 5m or 2h")
    return float(found[1]) * _SECONDS[found[2]]


def main(options: AuditOptions, outputs: Outputs) -> int:
    """Run it, show it, write it."""
    if options.profile not in BUDGETS:
        raise OptionError(f"--profile is {options.profile!r}; it must be one of {', '.join(BUDGETS)}")
    outputs.check()
    console = Console(highlight=False)
    live = terminal.Live(Console(stderr=True, highlight=False), quiet=outputs.quiet)
    try:
        with live:
            report = asyncio.run(audit(options, live))
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = without_keys(report, (options.target.api_key, options.target.second_key))
    outputs.write(report)
    terminal.summary(console, report)
    return code(report)


def code(report: Report) -> int:
    """What a pipeline gets to see. An audit that was broken off is never 0, and never 1: somebody has to look."""
    if report.reason or report.verdict == "could not run":
        return 2
    return 1 if report.verdict == "findings" else 0


__all__ = ["Outputs", "code", "main", "seconds"]
