"""`hermetic exposure`: after an incident, which past responses fit its signature? From access logs of JSON lines.

The one thing to know: what fits the signature may have held somebody's data, what does not has no reason in these numbers to be suspected. Lines that lack
a field are counted as not judged, and are never taken for innocent. Bounded memory for logs of any size: only ids and times are kept.

What a proxy says of times is used for what it proves. The whole answer ended after its first token, so an answer that was whole too soon had its first
token too soon. The header may leave before the first token (servers that stream send it at once), so a late header shows a late token, and an early one
shows nothing.
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from hermetic.check.exposure_fields import KINDS, Found, Plans, in_time, number, tokens
from hermetic.check.exposure_halves import Counts
from hermetic.check.exposure_lines import LONGEST_LINE, lines
from hermetic.check.exposure_times import Bucket, TimeLine
from hermetic.options import OptionError

Sign = Literal["over the pool and answered", "faster than it can be read", "halves disagree"]
SIGNS: tuple[Sign, ...] = ("over the pool and answered", "faster than it can be read", "halves disagree")
NO_JSON = "is no JSON object"
MOST_IDS = 1_000_000
LONGEST_ID = 256  # characters: clients may choose it
MOST_FIELDS = 30  # names of a line's fields that are told
_BUFFER = 1024**2  # bytes that are read at once
_NO_PROMPT = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that send none
_HEALTH = frozenset({
    "/health", "/healthz", "/ready", "/readyz", "/live", "/livez", "/ping", "/version", "/metrics", "/v1/models", "/server_info",
    "/get_server_info", "/model_info", "/get_model_info", "/v1/loads",
})  # fmt: skip


class Hit(msgspec.Struct, frozen=True):
    """A response that fits. `prompt`: its tokens, and what `prefill` counted, if that is known; `where`: file and line."""

    id: str
    time: str
    signs: tuple[str, ...]
    prompt: int | None
    where: str
    prefill: int | None = None


class Lacking(msgspec.Struct):
    """Lines that could not be judged for one reason; `first`: where the first of them stands, `fields`: what it has instead."""

    why: str
    lines: int
    first: str
    fields: list[str] = []


class Exposure(msgspec.Struct, kw_only=True):
    """`answered`: of the lines that were judged those with a status of 2xx; `compared`: of these those of which prefill's count is known. `fits`: all responses that fit; `hits`: those of them that are listed, in the order of time; `times`: hits in steps of `step` seconds, quiet ones
    too; `no_time`: hits of which no time is known. `passed_over`: lines of requests that send no prompt (GET, health checks). `outside`: of another time.
    """

    pool: int
    lines: int = 0
    judged: int = 0
    answered: int = 0
    compared: int = 0
    outside: int = 0
    passed_over: int = 0
    fits: int = 0
    hits: list[Hit] = []
    signs: dict[str, int] = {}
    step: int = 0
    times: list[Bucket] = []
    no_time: int = 0
    not_judged: list[Lacking] = []
    not_asked: list[str] = []  # signs that could not be looked for, and why
    unread: list[str] = []

    @property
    def tells(self) -> bool:
        """Whether anything can be said of answers: refusals are easily judged where nothing says how long a prompt was."""
        return self.judged > 0 and (self.answered > 0 or not self.not_judged)


@dataclass(frozen=True)
class ExposureOptions:
    """`fields`: names by kind, in place of the usual ones. `prefill_speed`: tokens a second at best; None: not asked. `prefill_logs`: logs of the other
    half, of which each answer's request is looked for by its id."""

    pool: int
    since: datetime | None = None
    until: datetime | None = None
    prefill_speed: float | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    prefill_logs: Sequence[Path] = ()


def read(paths: Sequence[Path], options: ExposureOptions) -> Exposure:
    """Judge every line of every log; `-` is standard input. Raises OptionError for fields that cannot be meant."""
    with Counts() as counts:
        judge = _Judge(options, counts)
        for path in options.prefill_logs:
            _each(path, judge.prefill_line, judge.found.unread)
        if options.prefill_logs and not judge.prefill_kept:
            judge.found.unread.append("the prefill half: no line has a request id and prompt tokens")
        for path in paths:
            _each(path, judge.line, judge.found.unread)
        return judge.ended()


def _each(path: Path, take: Callable[[bytes | None, str, int], None], unread: list[str]) -> None:
    name = "standard input" if str(path) == "-" else os.fsencode(path).decode("utf-8", "backslashreplace")
    try:
        with _open(path) as stream:
            for at, line in lines(stream):
                take(line, name, at)
    except (OSError, EOFError, zlib.error) as error:
        unread.append(f"{name}: {getattr(error, 'strerror', None) or error}")


class _Judge:
    """All lines, one after the other."""

    def __init__(self, options: ExposureOptions, counts: Counts) -> None:
        self.options, self.found = options, Exposure(pool=options.pool)
        self._counts = counts
        self._plans = Plans(options.fields)
        self._lacking: dict[str, Lacking] = {}
        self._signs, self._times = Counter[str](), TimeLine()
        self._undecided = self._only_header = 0
        self._prefill_lines = self.prefill_kept = self._several = 0
        self._prefill_first = ""
        self._by_time = options.since is not None or options.until is not None

    def prefill_line(self, line: bytes | None, name: str, at: int) -> None:
        """One line of the other half's log: only what it counted, and for which request."""
        value = _object(line)
        if line is not None and line.isspace():
            return
        self._prefill_lines += 1
        fields = self._plans.of(value) if value is not None else None
        prompt = tokens(fields.get("prompt")) if fields is not None else None
        request = _id(fields) if fields is not None else ""
        if request and prompt is not None:
            self._counts.add(request, prompt)
            self.prefill_kept += 1
        elif not self._prefill_first:
            self._prefill_first = f"{name}, line {at}"

    def line(self, line: bytes | None, name: str, at: int) -> None:
        if line is not None and line.isspace():
            return
        found = self.found
        found.lines += 1
        value = _object(line)
        if value is None:
            self._lacks(NO_JSON if line else f"is longer than {LONGEST_LINE:,} bytes", name, at)
            return
        fields = self._plans.of(value)
        when = None
        if self._by_time:
            when = in_time(fields.get("time"))
            if when is None:
                self._lacks("no time", name, at, value)
                return
            if self._outside(when):
                found.outside += 1
                return
        prompt = tokens(fields.get("prompt"))
        if prompt is None and _sends_none(fields):
            found.passed_over += 1
            return
        status = number(fields.get("status"))
        if status is None:
            self._lacks("no status", name, at, value)
            return
        if not 200 <= status < 300:  # refused or failed, however long the prompt was
            found.judged += 1
            return
        if prompt is None:
            self._lacks("no prompt tokens", name, at, value)
            return
        found.judged += 1
        signs, other = self._judged(fields, prompt)
        if signs:
            self._hit(fields, (prompt, other), signs, when, f"{name}, line {at}")

    def _outside(self, when: datetime) -> bool:
        since, until = self.options.since, self.options.until
        return (since is not None and when < since) or (until is not None and when >= until)

    def _judged(self, fields: Found, prompt: float) -> tuple[list[Sign], float | None]:
        """The signs that an answer to a prompt of this length shows, and what prefill counted."""
        self.found.answered += 1
        other, signs = tokens(fields.get("prefill_prompt")), list[Sign]()
        if other is None and self.options.prefill_logs and (request := _id(fields)):
            other, several = self._counts.of(request, prompt)
            self._several += several
        self.found.compared += other is not None
        if max(prompt, other or 0) > self.options.pool:
            signs.append(SIGNS[0])
        if self.options.prefill_speed is not None:
            cached = tokens(fields.get("cached")) or 0  # was not read again
            if cached > prompt:  # which of the two is wrong is not known
                self._undecided += 1
            elif self._too_fast(fields, (prompt - cached) / self.options.prefill_speed):
                signs.append(SIGNS[1])
        if other is not None and float(other) != float(prompt):
            signs.append(SIGNS[2])
        return signs, other

    def _too_fast(self, fields: Found, need: float) -> bool:
        """Whether the first token came before `need` seconds; counted where it cannot be told."""
        first = fields.seconds("first")
        if first is not None:
            return first < need
        whole, header = fields.seconds("whole"), fields.seconds("header")
        if whole is not None and whole < need:
            return True
        if header is None or header < need:
            self._undecided += 1
            self._only_header += header is not None
        return False

    def _hit(
        self,
        fields: Found,
        counts: tuple[float, float | None],
        signs: list[Sign],
        when: datetime | None,
        where: str,
    ) -> None:
        when = when or in_time(fields.get("time"))
        self.found.fits += 1
        self._signs.update(signs)
        self._times.add(when)
        if len(self.found.hits) < MOST_IDS:
            prompt, other = counts
            name = _id(fields)[:LONGEST_ID]
            stamp = when.astimezone(UTC).isoformat() if when else ""
            self.found.hits.append(
                Hit(name, stamp, tuple(signs), int(prompt), where, None if other is None else int(other))
            )

    def _lacks(self, why: str, name: str, at: int, value: Mapping[str, Any] | None = None) -> None:
        known = self._lacking.get(why)
        if known is None:
            fields = [str(key)[:80] for key in list(value or ())[:MOST_FIELDS]]
            known = self._lacking[why] = Lacking(why, 0, f"{name}, line {at}", fields)
        known.lines += 1

    def ended(self) -> Exposure:
        found = self.found
        found.hits.sort(key=lambda hit: (not hit.time, hit.time))  # those without a time last
        found.signs, found.not_judged = dict(self._signs), list(self._lacking.values())
        found.step, found.times = self._times.shown()
        found.no_time = self._times.unknown
        found.not_asked = list(self._not_asked())
        return found

    def _not_asked(self) -> Iterator[str]:
        if self.options.prefill_speed is None:
            yield f"{SIGNS[1]}: give --prefill-speed, the tokens a second that one node reads at best"
        elif self._undecided:
            yield (
                f"{SIGNS[1]}: of {self._undecided:,} of {self.found.answered:,} answers no field says the seconds to the first token, or more tokens were cached than there are "
                "(--field first=NAME, or first=NAME:ms)"
            )
        if self._only_header:
            yield (
                f"{SIGNS[1]}: {self._only_header:,} of them say when the header came, which may be before the first token; where the server holds it back "
                "until then, name that field: --field first=upstream_header_time"
            )
        found = self.found
        if not found.compared and found.judged:
            yield (
                f"{SIGNS[2]}: no line says what the prefill half counted (--field prefill_prompt=NAME), and no answer is in a --prefill-log with its "
                "request id and prompt tokens"
            )
        elif found.compared < found.answered:
            yield f"{SIGNS[2]}: of {found.answered - found.compared:,} of {found.answered:,} answers nothing says what prefill counted"
        if left := self._prefill_lines - self.prefill_kept:
            yield (
                f"{SIGNS[2]}: {left:,} of {self._prefill_lines:,} lines of the prefill half have no request id or no prompt tokens (the first: {self._prefill_first}); "
                "--field names them, in both logs alike"
            )
        if self._several:
            yield f"{SIGNS[2]}: the ids of {self._several:,} answers were used for prompts of several lengths, and one that fits was taken for theirs"


def _id(fields: Found) -> str:
    """ "" where there is none: proxies write an empty text or `-` then."""
    value = fields.get("id")
    name = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    return "" if name.strip() in ("", "-") else name


def _sends_none(fields: Found) -> bool:
    """Whether the request cannot have sent a prompt: by its method, or a path that only says how the server is."""
    method, path = fields.get("method"), fields.get("path")
    if isinstance(request := fields.get("request"), str):  # GET /version HTTP/1.1
        first, _, rest = request.partition(" ")
        method, path = method or first, path or rest
    if isinstance(method, str) and method.upper() in _NO_PROMPT:
        return True
    return isinstance(path, str) and path.split(" ", 1)[0].partition("?")[0].rstrip("/") in _HEALTH


# ------------------------------------------------------------------------------------ small readers


def _open(path: Path) -> Any:
    """A context with the stream in it. Packed with gzip or not, by what stands in it."""
    if str(path) == "-" and sys.stdin is None:
        raise OSError("there is none")
    stream: BinaryIO = sys.stdin.buffer if str(path) == "-" else path.open("rb", buffering=_BUFFER)
    assert isinstance(stream, io.BufferedReader)
    if stream.peek(2)[:2] == b"\x1f\x8b":
        return io.BufferedReader(gzip.open(stream), _BUFFER)
    return nullcontext(stream) if str(path) == "-" else stream


def _object(line: bytes | None) -> dict[str, Any] | None:
    try:
        value = _DECODE(line) if line is not None else None
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if type(value) is dict else None


_DECODE = msgspec.json.Decoder().decode


def moment(option: str, text: str) -> datetime:
    """A time of the command line. Raises OptionError."""
    when = in_time(text)
    if when is None:
        raise OptionError(
            f"{option} is {text!r}; it must be a time like 2026-11-29T14:00Z (without a zone: UTC)"
        )
    return when


__all__ = ["KINDS", "NO_JSON", "SIGNS", "Exposure", "ExposureOptions", "Hit", "Lacking", "moment", "read"]
