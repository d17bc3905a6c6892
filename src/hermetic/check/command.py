"""`hermetic check`, from its options to its exit code: 0 clean, 1 findings, 2 a source could not be read.

The one thing to know: what is not known is said, and is no success for who asks with --strict. A source that could not be read at all ends in 2,
whatever else was found: half a deployment has not been checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hermetic.check import sources
from hermetic.check import watch as watching
from hermetic.check.check import CheckOptions, run, unknown_patches
from hermetic.check.fetch import FetchOptions
from hermetic.check.output import github, json_file, sarif, text
from hermetic.check.result import Report
from hermetic.check.rules import pages
from hermetic.options import LONGEST_TIME, OptionError, parse_time

FORMATS = ("text", "json", "sarif", "github")


@dataclasses.dataclass(frozen=True)
class _Setting:
    """One key of the config file: its types in TOML, and how to say what it must be. `entries`: of a list, the type of each."""

    types: tuple[type, ...]
    must: str
    entries: type = str


_WORDS = 'a list of texts, like ["CAP", "VER001"]'
_SETTINGS = {
    "sources": _Setting((list,), 'a list of texts, like ["http://prefill-0:30000", "logs/"]'),
    "select": _Setting((list,), _WORDS),
    "ignore": _Setting((list,), _WORDS),
    "patches": _Setting((list,), "a list of numbers, like [38935]", int),
    "strict": _Setting((bool,), "true or false"),
    "baseline": _Setting((str,), "the name of a file, in quotes"),
    "format": _Setting((str,), f"one of {', '.join(FORMATS)}, in quotes"),
    "timeout": _Setting((int, float, str), 'seconds, like 4, or a time in quotes, like "4s"'),
    "ca": _Setting((str,), "the name of a file, in quotes"),
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """As on the command line; None and () where nothing was said."""

    sources: tuple[str, ...] = ()
    format: str | None = None
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    strict: bool = False
    patches: tuple[str, ...] = ()
    baseline: Path | None = None
    config: Path | None = None
    timeout: str | None = None
    api_key: str | None = dataclasses.field(default=None, repr=False)
    ca: str | None = None
    watch: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    verbose: bool = False
    explain: str | None = None


def main(asked: Asked) -> int:
    """Check, show, and say how it ended. Raises OptionError for what cannot be meant."""
    if asked.explain is not None:
        print(pages.explained(asked.explain))
        return 0
    settings = {} if asked.config is None else _settings(asked.config)
    form = asked.format or settings.get("format", "text")
    if form not in FORMATS:
        raise OptionError(f"--format is {form!r}; it must be one of {', '.join(FORMATS)}")
    options, strict = _options(asked, settings), asked.strict or settings.get("strict", False)
    if form != "text":  # there it stands in the report, where people see it
        for line in unknown_patches(options.patches):
            print(f"warning: {line}", file=sys.stderr)
    if asked.watch is not None:
        return _watch(asked, options, form, strict)
    if asked.metrics_port is not None:
        raise OptionError("--metrics-port goes with --watch")
    report = run(options)
    _show(report, form, strict, asked.verbose)
    return code(report, strict)


def _options(asked: Asked, settings: Mapping[str, Any]) -> CheckOptions:
    """What the command line says, else what the config file does; patches and rules that are left out add up."""
    baseline = asked.baseline or (Path(settings["baseline"]) if "baseline" in settings else None)
    timeout = _timeout(asked.config, settings.get("timeout", FetchOptions.timeout))
    if asked.api_key and not (asked.api_key.isascii() and asked.api_key.isprintable()):
        raise OptionError(
            "--api-key has a sign that cannot be sent in a header (a line end, or one outside ASCII)"
        )
    return CheckOptions(
        sources=asked.sources or tuple(settings.get("sources", ())),
        select=asked.select or tuple(settings.get("select", ())),
        ignore=(*asked.ignore, *settings.get("ignore", ())),
        patches=(*patches(asked.patches), *settings.get("patches", ())),
        baseline=None if baseline is None else json_file.load(baseline),
        fetch=FetchOptions(
            timeout=timeout if asked.timeout is None else parse_time("--timeout", asked.timeout),
            api_key=asked.api_key or None,
            ca=asked.ca or settings.get("ca"),
        ),
    )


def _timeout(config: Path | None, said: float | str) -> float:
    """Of a config file: seconds, or a time as on the command line. Raises OptionError."""
    if isinstance(said, str):
        return parse_time(f"--config {config}: timeout", said)
    if not 0 < said <= LONGEST_TIME:
        raise OptionError(f"--config {config}: timeout is {said}; it must be seconds, more than 0")
    return said


def _watch(asked: Asked, options: CheckOptions, form: str, strict: bool) -> int:
    """Until Ctrl-C, or SIGTERM."""
    every, figures = parse_time("--watch", asked.watch or ""), watching.Figures()
    sources.parse(options.sources)
    if asked.metrics_port is not None:
        port = watching.serve(figures, asked.metrics_host, asked.metrics_port)
        print(f"figures at http://{asked.metrics_host}:{port}/metrics", file=sys.stderr, flush=True)
    rounds = _Rounds(form, strict, asked.verbose)

    with contextlib.suppress(KeyboardInterrupt):
        watching.watch(lambda: run(options), every, rounds.told, figures)
    return 0


@dataclasses.dataclass
class _Rounds:
    """What --watch prints. JSON and SARIF say themselves when they were made."""

    form: str
    strict: bool
    verbose: bool
    number: int = 0
    before: Report | None = None

    def told(self, report: Report) -> None:
        self.number += 1
        with _room():
            if self.form == "text":
                console = Console(highlight=False)
                text.show_round(console, self.number, self.before, report, self.strict, self.verbose)
            else:
                if self.form == "github":
                    print(f"round {self.number} at {report.started}", flush=True)
                _write(report, self.form, self.strict, self.verbose)
        self.before = report


def _show(report: Report, form: str, strict: bool, verbose: bool) -> None:
    """Raises as `_room` does."""
    with _room():
        _write(report, form, strict, verbose)


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """Raises OptionError where there is no room for a report; BrokenPipeError where nobody reads any more."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OptionError(f"the report cannot be written: {error.strerror}") from None


def _write(report: Report, form: str, strict: bool, verbose: bool) -> None:
    if form == "text":
        text.show(Console(highlight=False), report, strict, verbose)
        return
    made = {
        "json": lambda: json_file.dump(report),
        "sarif": lambda: sarif.dump(report),
        "github": lambda: github.dump(report, strict).encode(),
    }[form]()
    sys.stdout.buffer.write(made)
    sys.stdout.buffer.flush()


def code(report: Report, strict: bool = False) -> int:
    """What a pipeline gets to see."""
    if any(not one.part for one in report.unread):
        return 2
    return 1 if report.of("finding") or (strict and report.of("unknown")) else 0


def _settings(path: Path) -> dict[str, Any]:
    try:
        whole = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path} is not TOML: {error}") from None
    table = whole.get("check")
    if not isinstance(table, dict) or set(whole) != {"check"}:
        raise OptionError(f"--config {path}: it has one table, [check]")
    for name, value in table.items():
        setting = _SETTINGS.get(name)
        if setting is None:
            raise OptionError(
                f"--config {path}: there is no setting {name!r}; there are {', '.join(_SETTINGS)}"
            )
        if not _is(value, setting):
            raise OptionError(f"--config {path}: {name} must be {setting.must}")
    return table


def _is(value: object, setting: _Setting) -> bool:
    """In Python true is a number as well; in TOML it is none."""
    if isinstance(value, bool):
        return bool in setting.types
    if isinstance(value, list):
        return list in setting.types and all(type(one) is setting.entries for one in value)
    return isinstance(value, setting.types)


def patches(given: Sequence[str]) -> tuple[int, ...]:
    """Numbers of fixes, with or without #. Raises OptionError."""
    numbers = []
    for one in given:
        digits = one.strip().removeprefix("#")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise OptionError(f"--has-patch {one!r}: give the number of the fix, like 38935")
        numbers.append(int(digits))
    return tuple(numbers)


__all__ = ["FORMATS", "Asked", "code", "main", "patches"]
