"""`hermetic exposure`, from its options to its exit code: 0 nothing fits, 1 something does, 2 it could not be told."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hermetic.check import exposure
from hermetic.check.exposure import NAMES, Exposure, ExposureOptions
from hermetic.check.output.words import counted, plain
from hermetic.options import OptionError

FORMATS = ("text", "json")
SHOWN = 40  # hits on a terminal
WIDE = 40  # signs of the longest bar


@dataclass(frozen=True)
class Asked:
    """As on the command line."""

    logs: tuple[Path, ...]
    pool: int
    since: str | None = None
    until: str | None = None
    prefill_speed: float | None = None
    fields: tuple[str, ...] = ()
    format: str = "text"
    ids: Path | None = None


def main(asked: Asked) -> int:
    """Raises OptionError."""
    if asked.format not in FORMATS:
        raise OptionError(f"--format is {asked.format!r}; it must be one of {', '.join(FORMATS)}")
    found = exposure.read(asked.logs, _options(asked))
    if asked.format == "json":
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    else:
        _show(Console(highlight=False), found)
    if asked.ids is not None:
        _write(asked.ids, found)
    if found.unread or not found.judged:
        return 2
    return 1 if found.hits else 0


def _options(asked: Asked) -> ExposureOptions:
    since = exposure.moment("--since", asked.since) if asked.since else None
    until = exposure.moment("--until", asked.until) if asked.until else None
    if since and until and since >= until:
        raise OptionError("--since is not before --until")
    return ExposureOptions(asked.pool, since, until, asked.prefill_speed, dict(map(_field, asked.fields)))


def _field(text: str) -> tuple[str, str]:
    kind, _, name = text.partition("=")
    if kind not in NAMES or not name:
        raise OptionError(f"--field {text!r}: write KIND=NAME, with a kind of {', '.join(NAMES)}")
    return kind, name


def _write(path: Path, found: Exposure) -> None:
    try:
        path.write_text("".join(f"{plain(hit.id)}\n" for hit in found.hits if hit.id), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--ids {path}: {error.strerror}") from None


def _show(console: Console, found: Exposure) -> None:
    for sign, number in sorted(found.signs.items()):
        console.print(Text(f"{counted(number, 'answer')}: {sign}", style="bold red"), soft_wrap=True)
    _times(console, found)
    for hit in found.hits[:SHOWN]:
        prompt = f"{hit.prompt:,} tokens" if hit.prompt is not None else ""
        said = "  ".join(
            part for part in (hit.time, plain(hit.id, 80), prompt, ", ".join(hit.signs), hit.where) if part
        )
        console.print(Text(plain(said)), soft_wrap=True)
    if len(found.hits) > SHOWN:
        console.print(
            Text(
                f"and {len(found.hits) - SHOWN:,} more: --ids FILE or --format json has all of them",
                style="dim",
            )
        )
    for reason, number in found.not_judged.items():
        console.print(
            Text(f"{counted(number, 'line')} not judged: {reason}", style="bold magenta"), soft_wrap=True
        )
    for one in found.not_asked:
        console.print(Text(f"not asked: {one}", style="dim"), soft_wrap=True)
    for one in found.unread:
        console.print(Text(f"not read: {plain(one)}", style="bold"), soft_wrap=True)
    console.print(Text(_headline(found), style="bold"), soft_wrap=True)


def _headline(found: Exposure) -> str:
    outside = f", {found.outside:,} of another time" if found.outside else ""
    fits = f"{len(found.hits):,} fit the signature" if found.judged else "nothing could be judged"
    return f"{found.lines:,} lines, {found.judged:,} judged{outside}: {fits} (pool of {found.pool:,} tokens)"


def _times(console: Console, found: Exposure) -> None:
    """Hits by hour."""
    hours, most = Counter(found.hours), max(found.hours.values(), default=0)
    table = Table(box=None, pad_edge=False, show_header=False)
    for hour in exposure.gaps(found.hours):
        table.add_row(hour, f"{hours[hour]:,}", Text("\u2588" * -(-WIDE * hours[hour] // most), style="red"))
    if found.hours.get(""):
        table.add_row("no time", f"{hours['']:,}", "")
    if table.row_count:
        console.print(table)


__all__ = ["Asked", "main"]
