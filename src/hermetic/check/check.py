"""One check: sources in, a report out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hermetic.check import facts, hosts, sources
from hermetic.check.deployment import Deployment
from hermetic.check.facts import Sheet
from hermetic.check.fetch import FetchOptions
from hermetic.check.result import Report, Told, Verdict
from hermetic.check.rules import RULES, Rule, judge
from hermetic.options import OptionError

FAMILIES = (
    "CAP",
    "VER",
    "REL",
    "DET",
    "PAIR",
    "VLLM",
    "PRX",
    "EXP",
    "COV",
    "HRM",
    "SRC",
)  # in the order of reports
_STATES = ("finding", "unknown", "attested", "passed")
_SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class CheckOptions:
    """`select`, `ignore`: codes, or beginnings of codes (CAP); an empty `select` is all. `patches`: numbers of fixes that are attested.

    `baseline`: an earlier report."""

    sources: tuple[str, ...]
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    patches: tuple[int, ...] = ()
    baseline: Report | None = None
    fetch: FetchOptions = field(default_factory=FetchOptions)


def run(options: CheckOptions) -> Report:
    """Read all sources and ask all rules. Raises OptionError for options that cannot be meant."""
    rules = chosen(options.select, options.ignore)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    named = sources.parse(options.sources)
    collected = sources.collect(named, options.fetch)
    deployment = Deployment(
        collected.nodes, collected.proxies, frozenset(options.patches), _baseline(options.baseline)
    )
    verdicts = judge(deployment, rules)
    names = [node.name for node in (*deployment.with_role("prefill"), *deployment.nodes)]
    places = {name: place for place, name in reversed([*enumerate(names)])}  # where it stands first
    ordered = sorted(verdicts, key=lambda verdict: _order(verdict, places))
    return Report(
        started=began,
        sources=[source.shown for source in named],
        files=collected.files,
        nodes=[_told(node) for node in collected.nodes],
        verdicts=ordered,
        unread=collected.unread,
        notes=_notes(options, deployment, ordered),
    )


def _separate(codes: Sequence[str]) -> tuple[str, ...]:
    """`--select CAP,VER` is `--select CAP --select VER`."""
    return tuple(one.strip() for code in codes for one in code.split(","))


def chosen(select: Sequence[str], ignore: Sequence[str]) -> list[Rule]:
    """Raises OptionError for a code that no rule begins with."""
    select, ignore = _separate(select), _separate(ignore)
    for option, codes in (("--select", select), ("--ignore", ignore)):
        for code in codes:
            if not code or not any(name.startswith(code.upper()) for name in RULES):
                raise OptionError(
                    f"{option} {code!r}: no rule begins so; `hermetic check --explain all` lists them"
                )
    wanted = tuple(code.upper() for code in select) or ("",)
    left_out = tuple(code.upper() for code in ignore)
    left = [
        one
        for code, one in RULES.items()
        if code.startswith(wanted) and not (left_out and code.startswith(left_out))
    ]
    if not left:
        raise OptionError("--select and --ignore leave no rule, so nothing would be checked")
    return left


def _order(verdict: Verdict, places: Mapping[str, int]) -> tuple[int, int, int, str, int]:
    """Findings first; of them the gravest, then by family, code, and prefill before decode."""
    place = places.get(verdict.subject, 2 * len(places))  # no node stands behind that
    severity = _SEVERITIES.index(verdict.severity) if verdict.state == "finding" else 0
    family = FAMILIES.index(RULES[verdict.code].family)
    return _STATES.index(verdict.state), severity, family, verdict.code, place


def _told(node: Sheet) -> Told:
    return Told(
        name=node.name,
        role=_one(node, facts.ROLE),
        engine=_one(node, facts.ENGINE),
        version=_one(node, facts.VERSION),
        sources=node.sources,
        facts={name: [{"value": s.value, "where": s.where} for s in seen] for name, seen in node.facts()},
    )


def _one(node: Sheet, fact: facts.Fact[str]) -> str:
    """For people: the value, or all that were said."""
    return " or ".join(node.values(fact))


def _baseline(report: Report | None) -> dict[str, Sheet]:
    found: dict[str, Sheet] = {}
    for told in report.nodes if report is not None else ():
        sheet = found[told.name] = Sheet(name=told.name, sources=["the baseline"])
        for name, seen in told.facts.items():
            if name in facts.FACTS:
                for one in seen:
                    sheet.add(facts.FACTS[name], _value(one), f"the baseline, {one.get('where', '')}")
    return found


def _value(one: dict[str, Any]) -> object:
    value = one.get("value")
    return tuple(value) if isinstance(value, list) else value


def _notes(options: CheckOptions, deployment: Deployment, verdicts: Sequence[Verdict]) -> list[str]:
    notes = []
    attested = [verdict.code for verdict in verdicts if verdict.state == "attested"]
    if attested:
        notes.append(
            f"Rests on what was attested, not on what was seen: {', '.join(dict.fromkeys(attested))}."
        )
    notes += _homeless(deployment.nodes)
    notes += _resting_on_nothing(deployment.patches, verdicts)
    if options.select or options.ignore:
        asked = f"only {', '.join(options.select)}" if options.select else "all"
        notes.append(f"Rules asked: {asked}{' but ' + ', '.join(options.ignore) if options.ignore else ''}.")
    missing = sorted(set(deployment.baseline) - {node.name for node in deployment.nodes})
    if missing:
        notes.append(f"The baseline has nodes that were not read now: {', '.join(missing)}.")
    return notes


def _homeless(nodes: Sequence[Sheet]) -> list[str]:
    """Files that do not say of which node they are, and were taken for one of their own."""
    files = [
        next(iter({node.name} & {*_files(node)}), _files(node)[0])
        for node in nodes
        if (node.address is None and node.name in _files(node)) or _may_be_of_another(node, nodes)
    ]
    if not files or len(nodes) == 1:
        return []
    shown = ", ".join(files[:4]) + (f" and {len(files) - 4} more" if len(files) > 4 else "")
    return [
        f"Of which node it is was not said, so each was taken for a node of its own: {shown}. NAME=FILE says it, like "
        f"a={files[0]} for this file and a=FILE for another of the same node."
    ]


def _files(node: Sheet) -> list[str]:
    return [Path(source).name for source in node.sources]


def _may_be_of_another(node: Sheet, nodes: Sequence[Sheet]) -> bool:
    """A log or a saved answer with an address that every machine has, where another node of its role has the same port."""
    if node.address is None or not hosts.is_anywhere(node.address[0]):
        return False
    if not node.read & {facts.START, facts.SERVER_INFO} or any("://" in source for source in node.sources):
        return False
    roles = node.values(facts.ROLE)
    return any(
        other is not node
        and other.address is not None
        and other.address[1] == node.address[1]
        and (not roles or any(role in roles for role in other.values(facts.ROLE)))
        for other in nodes
    )


def unknown_patches(patches: Iterable[int]) -> list[str]:
    """A line for each number that no rule knows: a slip of the pen, or a fix that settles nothing here."""
    known = sorted({number for rule in RULES.values() for number in rule.patches})
    return [
        f"--has-patch {number}: attested, rests on nothing: no rule knows this fix; known are {', '.join(map(str, known))}"
        for number in sorted(set(patches) - set(known))
    ]


def _resting_on_nothing(patches: Iterable[int], verdicts: Sequence[Verdict]) -> list[str]:
    """The same, and those that rules know and that nothing in this report needs."""
    used = {
        number
        for verdict in verdicts
        if verdict.state == "attested"
        for number in RULES[verdict.code].patches
    }
    unknown = unknown_patches(patches)
    known = {number for rule in RULES.values() for number in rule.patches}
    return unknown + [
        f"--has-patch {number}: attested, and nothing in this report rests on it"
        for number in sorted((set(patches) & known) - used)
    ]


__all__ = ["FAMILIES", "CheckOptions", "chosen", "run", "unknown_patches"]
