"""Two charts as inline SVG: time to the first token by prompt length, and its drift over the audit.

The one thing to know: what is wrong, or out of the ordinary, is always drawn; of the ordinary points at most MOST are, evenly
chosen. Marks differ by shape as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

from hermetic.audit.report.words import line, seconds
from hermetic.audit.result import Sample

MOST = 1500  # ordinary points drawn
WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
FEW = 5  # neighbours below which nobody can say what is ordinary
FAR = 5.0  # robust standard deviations from the median of its neighbours that make an outlier
TIMES = 2.5  # and so many times slower or faster, so that a very even server has none


@dataclass(frozen=True)
class Point:
    """A sample in a chart. `times`: against the median of prompts of like length (1: as they are), None if unknown."""

    sample: Sample
    tokens: int
    value: float  # seconds
    times: float | None
    outlier: bool


def points(samples: Iterable[Sample]) -> tuple[list[Point], str]:
    """Samples that have a length and a time, against their neighbours, and what the time is. Of one that never got a first
    token it is how long it took altogether."""
    usable = [s for s in samples if s.prompt_tokens and s.prompt_tokens > 0]
    streamed = [s for s in usable if s.first is not None and s.first > 0]
    whole = len(streamed) * 10 < len(usable)
    chosen = [(s, s.seconds if whole else s.first) for s in (usable if whole else streamed)]
    timed = [(s, max(t, 1e-4)) for s, t in chosen if t is not None and s.how == "answered"]
    bins: dict[int, list[float]] = {}
    for sample, time in timed:
        bins.setdefault(_bin(sample), []).append(math.log(time))
    usual = {
        where: (centre := median(logs), 1.4826 * median(abs(value - centre) for value in logs))
        for where, logs in bins.items()
        if len(logs) >= FEW
    }
    found = []
    for sample, time in timed:
        usual_here = usual.get(_bin(sample))
        off = None if usual_here is None else math.log(time) - usual_here[0]
        spread = usual_here[1] if usual_here is not None else 0.0
        strange = off is not None and abs(off) > max(FAR * spread, math.log(TIMES))
        found.append(
            Point(sample, sample.prompt_tokens or 1, time, None if off is None else math.exp(off), strange)
        )
    kept = {point.sample.number for point in found}
    found += [
        Point(s, s.prompt_tokens or 1, max(s.first or s.seconds, 1e-4), None, False)
        for s in usable
        if (s.wrong or s.how == "silent") and s.number not in kept
    ]
    return found, "whole answer" if whole else "first token"


def _bin(sample: Sample) -> int:
    """Prompts of like length: half an octave."""
    return round(2 * math.log2(sample.prompt_tokens or 1))


def latency(samples: Sequence[Sample]) -> str:
    """The time to the first token by prompt length, both logarithmic. Empty if there is nothing to draw."""
    found, what = points(samples)
    if len(found) < 3:
        return ""
    x = _log_axis([p.tokens for p in found], LEFT, WIDTH - RIGHT)
    y = _log_axis([p.value for p in found], HEIGHT - BOTTOM, TOP)
    body = _grid(x, y, lambda v: f"{v:,.0f}", seconds)
    body += _labels("tokens of prompt, by the server's count", f"time to the {what}")
    body += [_mark(p, x.at(p.tokens), y.at(p.value)) for p in _drawn(found)]
    alone = f"Time to the {what} by prompt length"
    return _svg(alone, body) + _legend(found)


def drift(samples: Sequence[Sample]) -> str:
    """How much slower or faster than usual for its length, over the audit, with a running median. Empty if too few."""
    found, what = points(samples)
    usable = [p for p in found if p.times is not None]
    if len(usable) < 3 * FEW:
        return ""
    usable.sort(key=lambda p: p.sample.sent)
    x = _plain_axis([p.sample.sent for p in usable], LEFT, WIDTH - RIGHT)
    y = _log_axis([p.times for p in usable if p.times is not None] + [0.5, 2.0], HEIGHT - BOTTOM, TOP, base=2)
    body = _grid(x, y, seconds, lambda v: f"{v:g}\u00d7" if v >= 1 else f"1/{1 / v:g}")
    body += _labels("since the audit began", f"{what} against the usual")
    body += [_mark(p, x.at(p.sample.sent), y.at(p.times or 1.0)) for p in _drawn(usable)]
    body.append(_running(usable, x, y))
    return _svg("Drift over the audit", body)


def outliers(samples: Sequence[Sample]) -> int:
    """How many answers took far longer or shorter than others of like length."""
    return sum(point.outlier for point in points(samples)[0])


def _drawn(found: Sequence[Point]) -> list[Point]:
    ordinary = [p for p in found if not (p.outlier or p.sample.wrong or p.sample.how == "silent")]
    special = [p for p in found if p.outlier or p.sample.wrong or p.sample.how == "silent"]
    step = max(1, math.ceil(len(ordinary) / MOST))
    return ordinary[::step] + sorted(special, key=lambda p: p.sample.wrong)[-MOST:]


def _mark(point: Point, x: float, y: float) -> str:
    sample = point.sample
    told = f"request {sample.number}, {line(sample.scenario, 60)}, {sample.prompt_tokens or 0:,} tokens, {seconds(point.value)}"
    if sample.wrong:
        shape = f'<path class="bad" d="M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"/>'
        told += ", shown as a finding"
    elif sample.how == "silent":
        shape = f'<path class="mute" d="M{x - 5:.1f} {y + 4:.1f}h10l-5 -9z"/>'
        told += ", no answer"
    elif point.outlier:
        shape = f'<circle class="odd" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
        told += f", {point.times:.1f} times the usual" if point.times is not None else ""
    else:
        return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>'
    return f"<g><title>{escape(told)}</title>{shape}</g>"


def _running(found: Sequence[Point], x: _Axis, y: _Axis) -> str:
    """The median of each 24th of the time, as a line."""
    low, high = found[0].sample.sent, found[-1].sample.sent
    width = (high - low) / 24 or 1.0
    boxes: dict[int, list[float]] = {}
    for point in found:
        boxes.setdefault(int((point.sample.sent - low) / width), []).append(point.times or 1.0)
    steps = [
        (low + (box + 0.5) * width, median(values))
        for box, values in sorted(boxes.items())
        if len(values) > 2
    ]
    path = "L".join(f"{x.at(min(at, high)):.1f} {y.at(value):.1f}" for at, value in steps)
    return f'<path class="trend" d="M{path}"/>' if len(steps) > 1 else ""


# ---------------------------------------------------------------------------------------------- axes


@dataclass(frozen=True)
class _Axis:
    """From values to places; `ticks` are values."""

    low: float
    high: float
    first: float
    last: float
    ticks: tuple[float, ...]
    log: bool

    def at(self, value: float) -> float:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        part = (value - low) / (high - low)
        return self.first + min(1.0, max(0.0, part)) * (self.last - self.first)


def _log_axis(values: Sequence[float], first: float, last: float, base: int = 10) -> _Axis:
    low, high = min(values), max(values)
    if high < low * 2:
        middle = math.sqrt(low * high)
        low, high = middle / 1.6, middle * 1.6
    low, high = low / 1.12, high * 1.12
    if base == 2:
        ticks = [2.0**k for k in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    else:
        steps = (1, 2, 5) if high / low < 1000 else (1, 3) if high / low < 30000 else (1,)
        ticks = [m * 10.0**k for k in range(-5, 10) for m in steps]
    inside = tuple(t for t in ticks if low <= t <= high)
    return _Axis(low, high, first, last, inside[:: max(1, math.ceil(len(inside) / 9))], True)


_STEPS = (
    0.001,
    0.01,
    0.1,
    0.5,
    1,
    2,
    5,
    10,
    20,
    30,
    60,
    120,
    300,
    600,
    1200,
    1800,
    3600,
    7200,
    14400,
)  # seconds


def _plain_axis(values: Sequence[float], first: float, last: float) -> _Axis:
    low, high = 0.0, max(*values, 1e-3)
    rough = high / 6
    step = next((s for s in _STEPS if s >= rough), rough)
    return _Axis(low, high, first, last, tuple(step * k for k in range(int(high / step) + 1)), False)


def _grid(x: _Axis, y: _Axis, name_x: Callable[[float], str], name_y: Callable[[float], str]) -> list[str]:
    parts = [f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>']
    for tick in x.ticks:
        at = x.at(tick)
        parts.append(f'<path class="line" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name_x(tick))}</text>'
        )
    for tick in y.ticks:
        at = y.at(tick)
        parts.append(f'<path class="line" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{escape(name_y(tick))}</text>')
    return parts


def _labels(x: str, y: str) -> list[str]:
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return [
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>',
        f'<text transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{escape(y)}</text>',
    ]


def _svg(title: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(body)}</svg>'
    )


def _legend(found: Sequence[Point]) -> str:
    """Only what is there."""
    bad = sum(p.sample.wrong for p in found)
    mute = sum(p.sample.how == "silent" and not p.sample.wrong for p in found)
    odd = sum(p.outlier and not p.sample.wrong for p in found)
    plain = len(found) - bad - mute - odd
    entries = [
        ('<circle class="dot" cx="7" cy="7" r="3"/>', f"{plain:,} as others of like length", plain),
        ('<circle class="odd" cx="7" cy="7" r="4.5"/>', f"{odd:,} far from them", odd),
        ('<path class="mute" d="M2 11h10l-5 -9z"/>', f"{mute:,} never answered", mute),
        ('<path class="bad" d="M2 2l10 10m0 -10l-10 10"/>', f"{bad:,} shown as a finding", bad),
    ]
    shown = "".join(
        f'<span><svg viewBox="0 0 14 14">{sign}</svg>{text}</span>' for sign, text, n in entries if n
    )
    return f'<p class="legend">{shown}</p>'


__all__ = ["drift", "latency", "outliers", "points"]
