"""How well `hermetic audit` tells leaky servers from clean ones: one audit of each, and a table.

    python -m hermetic.lab audited                       every fault, standard profile, each until its first finding
    python -m hermetic.lab audited none --seeds 50 --profile quick

Servers are the lab's (leaky.py), one at a time. The one thing to know: "none" is the product itself, without the lab's worker; an audit
that finds something there has raised a false alarm, and one that could not be played to its end says nothing and is counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hermetic.audit.chance import rule_of_three
from hermetic.audit.command import seconds
from hermetic.audit.report import json_file
from hermetic.audit.result import Report
from hermetic.audit.run import INTERRUPTED, AuditOptions, audit
from hermetic.audit.target import TargetOptions
from hermetic.lab.leaky import FAULTS, KEYS, LeakyError, LeakyOptions, LeakyServer, find
from hermetic.options import OptionError

CLEAN = "none"
PREFILL, DECODE = 1024, 4096  # tokens of the pools: prefill's is the smaller one, as in the incident


@dataclass(frozen=True)
class Row:
    """One audit of one server. `struck`: how often its fault had struck when the audit ended."""

    fault: str
    seed: int
    struck: int
    report: Report

    @property
    def found(self) -> bool:
        return bool(self.report.findings)

    @property
    def whole(self) -> bool:
        """Whether it says anything: a finding, or that there is none."""
        return self.report.verdict != "could not run"

    def cells(self) -> list[str]:
        """For the table: fault, rate, strikes, what found it, in which scenario, requests, seconds, what it said."""
        fault = FAULTS.get(self.fault)
        rate = "" if fault is None else f"1 in {round(1 / fault.rate)}"
        evidence = ", ".join(dict.fromkeys(f.evidence for f in self.report.findings))
        scenarios = ", ".join(dict.fromkeys(f.scenario for f in self.report.findings))
        said = self.report.findings[0].what if self.report.findings else self.report.reason
        return [
            self.fault, rate, str(self.struck), evidence or self.report.verdict, scenarios, str(self.report.requests),
            f"{self.report.seconds:.0f}", said.replace("|", "/").replace("\n", " ")[:120],
        ]  # fmt: skip


HEAD = ["fault", "strikes", "struck", "evidence", "scenario", "requests", "seconds", "what the first finding says"]  # fmt: skip


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def play(
    names: list[str], options: AuditOptions, seeds: range, into: Path | None, model: str = "smollm2"
) -> Iterator[Row]:
    """One audit for each name and seed; a server is started for each name. Raises LeakyError, OptionError."""
    for name in names:
        with tempfile.TemporaryDirectory(prefix="hermetic-audited-") as folder:
            serves = LeakyOptions(
                prefill_tokens=PREFILL, decode_tokens=DECODE, keys=True, leaky=name != CLEAN, model=model
            )
            with LeakyServer(Path(folder), serves) as server:
                for seed in seeds:
                    if name != CLEAN:
                        server.turn(name, seed=seed)
                    yield _one(name, server, options, seed, into)


def _one(name: str, server: LeakyServer, options: AuditOptions, seed: int, into: Path | None) -> Row:
    asked = AuditOptions(
        (server.url,), TargetOptions(api_key=KEYS[0], second_key=KEYS[1]), options.profile, options.scenarios, options.budget,
        seed, options.fail_fast,
    )  # fmt: skip
    report = asyncio.run(audit(asked))
    if report.reason == INTERRUPTED:
        raise KeyboardInterrupt
    if into is not None:
        json_file.write(into / f"{name}-{options.profile}-{seed}.json", report)
    return Row(name, seed, server.struck, report)


def summary(rows: list[Row]) -> str:
    """Faults found, and of clean servers the share of false alarms that so many audits without one leave possible."""
    clean = [row for row in rows if row.fault == CLEAN]
    leaky = [row for row in rows if row.fault != CLEAN]
    told = []
    if leaky:
        told.append(f"{sum(row.found for row in leaky)} of {len(leaky)} leaky servers found")
    if clean:
        whole = [row for row in clean if row.whole]
        alarms = sum(row.found for row in whole)
        bound = rule_of_three(len(whole))
        told.append(
            f"{alarms} of {len(whole)} audits of a clean server found something"
            + (f": at most {bound:.1%} do (95 %, rule of three)" if not alarms and bound is not None else "")
            + (f"; {len(clean) - len(whole)} could not run" if len(clean) > len(whole) else "")
        )
    return "; ".join(told)


def main(arguments: list[str]) -> int:
    """0: every leaky server was found, and nothing at a clean one. 1: not so. 2: a server did not start, or a clean one could not
    be audited to the end."""
    parser = argparse.ArgumentParser(
        prog="python -m hermetic.lab audited",
        description="Audits of leaky and of clean servers, as a table.",
    )
    parser.add_argument(
        "faults", nargs="*", help=f"of {', '.join(FAULTS)}, or {CLEAN} (default: all of them)"
    )
    parser.add_argument("--profile", default="standard", choices=("quick", "standard", "soak"))
    parser.add_argument("--scenario", action="append", default=[], help="only this one; repeat")
    parser.add_argument("--budget", help="of each audit, like 5m (default: the profile's)")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many audits of each server")
    parser.add_argument("--json", type=Path, help="a folder for the reports")
    parser.add_argument("--model", default="smollm2", help="what is served, as for `hermetic serve`")
    given = parser.parse_args(arguments)
    names = given.faults or list(FAULTS)
    rows = []
    try:
        for name in names:
            if name != CLEAN:
                find(name)
        if given.json is not None and not given.json.is_dir():
            raise OptionError(f"--json is {given.json}; it must be a folder")
        options = AuditOptions(
            (), profile=given.profile, scenarios=tuple(given.scenario),
            budget=None if given.budget is None else seconds(given.budget), fail_fast=names != [CLEAN],
        )  # fmt: skip
        print(line(HEAD), line(["---"] * len(HEAD)), sep="\n", flush=True)
        for row in play(names, options, range(given.seed, given.seed + given.seeds), given.json, given.model):
            rows.append(row)
            print(line(row.cells()), flush=True)
    except (OptionError, LeakyError) as error:
        print(f"hermetic.lab audited: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        if rows:
            print(f"\n{summary(rows)}  (on {os.cpu_count()} cores)")
    return code(rows)


def code(rows: list[Row]) -> int:
    """See `main`."""
    if any(row.found != (row.fault != CLEAN) for row in rows):
        return 1
    return 0 if all(row.whole for row in rows) else 2


__all__ = ["CLEAN", "Row", "code", "main", "play", "summary"]
