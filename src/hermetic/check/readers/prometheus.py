"""Prometheus's text format: the samples that somebody asks for, by the name of their metric.

The one thing to know: one line that cannot be read costs that line and no other, and it is said. A last line without an end may be cut in
the middle of its number, so it counts as one that cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from hermetic.check.readers import values

LONGEST_LINE = 16 * 1024
MOST_READ = (
    1024**2
)  # characters of samples that are asked for: the parser needs seconds for more, and no engine has so many

_SAMPLE = re.compile(
    r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\s*\{.*\})?\s+[-+]?(?:[0-9.]|Inf|NaN)\S*(?:\s+-?\d+)?\s*"
)
_NAME = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)")
_HEADER = re.compile(r"#\s*(HELP|TYPE)\s+[a-zA-Z_:]")


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


@dataclass
class Samples:
    """`broken`: numbers of the lines that could not be read, the first few; `lines_broken`: how many there are; `length`: of the lines that were."""

    samples: list[Sample] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    lines_broken: int = 0
    length: int = 0

    def of(self, name: str) -> list[Sample]:
        return [sample for sample in self.samples if sample.name == name]

    def least(self, name: str) -> float | None:
        """The smallest value of a metric over its ranks and engines: the one that a request may meet."""
        return min(self._numbers(name), default=None)

    def most(self, name: str) -> float | None:
        return max(self._numbers(name), default=None)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum over ranks and engines, of the samples with these labels; None if there is none."""
        return sum(found) if (found := list(self._numbers(name, **labels))) else None

    def _numbers(self, name: str, **labels: str) -> Iterator[float]:
        for sample in self.of(name):
            number = values.number(sample.value)
            if number is not None and labels.items() <= sample.labels.items():
                yield number

    def groups(self, *labels: str) -> list[tuple[dict[str, str], Samples]]:
        """The samples of each node, told apart by these labels; one group without samples where there are none."""
        found: dict[tuple[str, ...], Samples] = {}
        for sample in self.samples:
            key = tuple(sample.labels.get(label, "") for label in labels)
            found.setdefault(key, Samples()).samples.append(sample)
        bare = found.pop(("",) * len(labels), None) if len(found) == 2 else None
        if bare is not None:  # some metrics have fewer labels, and there is one node
            next(iter(found.values())).samples += bare.samples
        return [(dict(zip(labels, key, strict=True)), one) for key, one in found.items()] or [({}, Samples())]

    @property
    def why(self) -> str:
        """What could not be read, for people; empty if everything could."""
        if not self.broken:
            return ""
        told = ", ".join(map(str, self.broken))
        more = (
            f" and {self.lines_broken - len(self.broken):,} more"
            if self.lines_broken > len(self.broken)
            else ""
        )
        too_much = f", and more than {MOST_READ:,} characters of samples" if self.length > MOST_READ else ""
        return f"line {told}{more} cannot be read as Prometheus text (cut or damaged{too_much})"


def looks_like(body: bytes) -> bool:
    """Whether this is Prometheus text: headers or samples stand in most of its first lines, and at least one header or label."""
    first = [line for line in body[:65536].decode("utf-8", "replace").splitlines() if line.strip()][:60]
    headers = sum(bool(_HEADER.match(line)) for line in first)
    samples = sum(bool(_SAMPLE.fullmatch(line)) for line in first)
    labelled = headers or any("{" in line and _SAMPLE.fullmatch(line) for line in first)
    return bool(labelled) and (headers + samples) * 2 > len(first)


def read(body: bytes, names: Collection[str]) -> Samples:
    """The samples of these metrics. Raises nothing."""
    found = Samples()
    ends = body.count(b"\n")
    for number, line in enumerate(body.decode("utf-8", "replace").split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if number > ends or len(line) > LONGEST_LINE or not _read(line, names, found):
            found.lines_broken += 1
            if len(found.broken) < 3:
                found.broken.append(number)
    return found


def _read(line: str, names: Collection[str], found: Samples) -> bool:
    """Whether the line is in order. Only those of `names` go through the real parser, which is slow."""
    name = _NAME.match(line)
    if name is None or not _SAMPLE.fullmatch(line):
        return False
    if name[1] not in names:
        return True
    found.length += len(line)
    if found.length > MOST_READ:
        return False
    try:
        samples = [one for family in text_string_to_metric_families(line) for one in family.samples]
    except (ValueError, IndexError):  # the latter for a label without a name
        return False
    found.samples += [Sample(one.name, dict(one.labels), float(one.value)) for one in samples]
    return True


__all__ = ["Sample", "Samples", "looks_like", "read"]
