"""`hermetic audit`, from its options to its exit code: 0 nothing found, 1 a finding, 2 could not run, or not to its end.

The one thing to know: whatever ends an audit, its report is shown and written, and what fails on the way out ends in 2. A
pipeline that finds the files of this run finds its verdict in them, also where there was nothing to audit.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.text import Text

from hermetic.audit.learned import Learned
from hermetic.audit.report import html, json_file, junit, terminal, words
from hermetic.audit.report.redact import without_keys
from hermetic.audit.result import Report
from hermetic.audit.run import BUDGETS, AuditOptions, audit
from hermetic.audit.scenarios import chosen
from hermetic.options import OptionError, parse_time


class Written(NamedTuple):
    """Of the files that were asked for: the names of those that were written, and of the others why not."""

    done: list[str]
    wrong: list[str]


@dataclass(frozen=True)
class Outputs:
    """Where the report goes beside the terminal."""

    html: Path | None = None
    json: Path | None = None
    junit: Path | None = None
    quiet: bool = field(default=False)

    def check(self) -> None:
        """Raises OptionError for a file that cannot be written, before an hour of probes and not after it."""
        paths = [path for path in (self.html, self.json, self.junit) if path is not None]
        for path in paths:
            json_file.check(path)
        files = [os.path.realpath(path) for path in paths if path.is_file() or not path.exists()]
        if len(set(files)) < len(files):
            raise OptionError("--report, --json and --junit: two of them name the same file")

    def write(self, report: Report) -> Written:
        """Every file that can be written."""
        written = Written([], [])
        forms: list[tuple[Path | None, Callable[[], bytes]]] = [
            (self.html, lambda: html.page(report).encode()),
            (self.json, lambda: json_file.dump(report)),
            (self.junit, lambda: junit.text(report).encode()),
        ]
        for path, form in forms:
            if path is None:
                continue
            try:
                json_file.replace(path, form())
                written.done.append(str(path))
            except json_file.ReportFileError as error:
                written.wrong.append(str(error))
        return written


def seconds(text: str) -> float:
    """A budget: `90`, `90s`, `5m`, `2h`, in seconds. Raises OptionError."""
    return parse_time("--budget", text)


def main(options: AuditOptions, outputs: Outputs) -> int:
    """Run it, show it, write it. Raises OptionError for options that cannot be meant, before anything is asked."""
    if options.profile not in BUDGETS:
        raise OptionError(f"--profile is {options.profile!r}; it must be one of {', '.join(BUDGETS)}")
    chosen(options.scenarios, options.profile, Learned(model=""))
    outputs.check()
    try:
        with terminal.Live(quiet=outputs.quiet) as live:
            report = asyncio.run(audit(options, live))
        report = without_keys(report, (options.target.api_key, options.target.second_key))
        written = outputs.write(report)
        wrong = [*written.wrong, *_show(report, written.done)]
    except KeyboardInterrupt:
        print(
            "error: interrupted at once, so its reports are not written, or not all of them", file=sys.stderr
        )
        return 2
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 2 if wrong else code(report)


def _show(report: Report, written: list[str]) -> list[str]:
    """The summary on standard output, with the files that were written. What could not be shown, if anything; of an audit
    that played nothing, why."""
    played = any(one.requests for one in report.scenarios)
    console = terminal.Sheet(highlight=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # signs that this terminal does not have
    try:
        if played:
            terminal.summary(console, report)
        if written:
            files = Text(f"written: {words.line(', '.join(written), 1000)}", style="dim")
            console.print(files, soft_wrap=True)
        console.file.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python fails once more when it flushes at its end
        return [f"the summary cannot be shown: {error.strerror}"]
    return [] if played else [words.line(report.reason, 1000)]


def code(report: Report) -> int:
    """What a pipeline gets to see. An audit that was broken off is never 0, and never 1: somebody has to look."""
    if report.reason or report.verdict == "could not run":
        return 2
    return 1 if report.verdict == "findings" else 0


__all__ = ["Outputs", "code", "main", "seconds"]
