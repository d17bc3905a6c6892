"""`hermetic exposure`, from its options to its exit code: 0 nothing fits, 1 something does, 2 it could not be told."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hermetic.check import exposure
from hermetic.check.exposure import KINDS, NO_JSON, SIGNS, Exposure, ExposureOptions, Lacking
from hermetic.check.exposure_times import Bucket
from hermetic.check.output import json_file
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
    prefill_logs: tuple[Path, ...] = ()


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
    if found.unread or not found.tells:
        return 2
    return 1 if found.hits else 0


def _options(asked: Asked) -> ExposureOptions:
    since = exposure.moment("--since", asked.since) if asked.since else None
    until = exposure.moment("--until", asked.until) if asked.until else None
    if since and until and since >= until:
        raise OptionError("--since is not before --until")
    if asked.prefill_speed is not None and not math.isfinite(asked.prefill_speed):
        raise OptionError(f"--prefill-speed is {asked.prefill_speed}; it must be tokens a second")
    if [str(path) for path in (*asked.logs, *asked.prefill_logs)].count("-") > 1:
        raise OptionError("- is standard input, which can be read only once")
    if both := [path for path in asked.prefill_logs for log in asked.logs if _same(path, log)]:
        raise OptionError(
            f"--prefill-log {both[0]}: is one of the logs to be judged as well; each answer would be compared with itself"
        )
    fields = dict(map(_field, asked.fields))
    return ExposureOptions(asked.pool, since, until, asked.prefill_speed, fields, asked.prefill_logs)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there, or is standard input
        return False


def _field(text: str) -> tuple[str, str]:
    kind, _, name = text.partition("=")
    if kind not in KINDS or not name:
        raise OptionError(f"--field {text!r}: write KIND=NAME, with a kind of {', '.join(KINDS)}")
    return kind, name


def _write(path: Path, found: Exposure) -> None:
    try:
        path.write_text("".join(f"{plain(hit.id)}\n" for hit in found.hits if hit.id), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--ids {path}: {error.strerror}") from None


def _show(console: Console, found: Exposure) -> None:
    for sign in SIGNS:  # the gravest first
        if number := found.signs.get(sign):
            console.print(Text(f"{counted(number, 'answer')}: {sign}", style="bold red"), soft_wrap=True)
    _times(console, found)
    for hit in found.hits[:SHOWN]:
        prompt = f"{hit.prompt:,} tokens" if hit.prompt is not None else ""
        if hit.prefill is not None and hit.prefill != hit.prompt:
            prompt += f" (prefill: {hit.prefill:,})"
        parts = (hit.time or "no time", plain(hit.id, 80), prompt, ", ".join(hit.signs), plain(hit.where))
        console.print(Text("  ".join(filter(None, parts))), soft_wrap=True)
    if found.fits > SHOWN:
        console.print(Text(_rest(found), style="dim"), soft_wrap=True)
    for one in found.not_judged:
        console.print(Text(_lacking(one, found), style="bold magenta"), soft_wrap=True)
    for reason in found.not_asked:
        console.print(Text(f"not known: {reason}", style="dim"), soft_wrap=True)
    for reason in found.unread:
        console.print(Text(f"not read: {plain(reason)}", style="bold"), soft_wrap=True)
    console.print(Text(_headline(found), style="bold"), soft_wrap=True)


def _rest(found: Exposure) -> str:
    listed = (
        "all of them" if len(found.hits) == found.fits else f"the first {len(found.hits):,} that were read"
    )
    return f"and {found.fits - SHOWN:,} more: --ids FILE or --format json has {listed}"


def _lacking(one: Lacking, found: Exposure) -> str:
    """With the fields that the first of them has, since one of them may be the one that is missing under another name."""
    if one.why == NO_JSON and one.lines == found.lines:
        return f"{counted(one.lines, 'line')} not judged: none is a JSON object; let nginx (log_format ... escape=json), Envoy (json_format) or the gateway write one a line"
    fields = f", which has {', '.join(map(plain, one.fields))}" if one.fields else ""
    field = _FIELD_OF.get(one.why)
    name = f"; --field {field}=NAME says which it is" if field and fields else ""
    return f"{counted(one.lines, 'line')} not judged: {one.why} (the first: {plain(one.first)}{fields}{name})"


_FIELD_OF = {"no time": "time", "no status": "status", "no prompt tokens": "prompt"}


def _headline(found: Exposure) -> str:
    outside = f", {found.outside:,} of another time" if found.outside else ""
    passed = f", {found.passed_over:,} without a prompt (GET, health checks)" if found.passed_over else ""
    fits = f"{found.fits:,} fit the signature" if found.tells else "nothing could be judged"
    return f"{found.lines:,} lines, {found.judged:,} judged{outside}{passed}: {fits} (pool of {found.pool:,} tokens)"


def _times(console: Console, found: Exposure) -> None:
    """Hits by time, quiet times too."""
    most = max((bucket.hits for bucket in found.times), default=0)
    table = Table(box=None, pad_edge=False, show_header=False)
    for bucket in found.times:
        table.add_row(bucket.start, f"{bucket.hits:,}", _bar(bucket, most))
    if found.no_time:
        table.add_row("no time", f"{found.no_time:,}", "")
    if table.row_count:
        console.print(table)


def _bar(bucket: Bucket, most: int) -> Text:
    return Text("\u2588" * -(-WIDE * bucket.hits // most), style="red")


def schema() -> bytes:
    """Of --format json: `python -m hermetic.check.exposed docs/exposure-schema.json`."""
    return json_file.schema_of(Exposure, "What hermetic exposure --format json writes")


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(schema())

__all__ = ["Asked", "main", "schema"]
