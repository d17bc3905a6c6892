"""What happened in a run: a digest of all of it, the last of it for a chart, and counts by kind.

The one thing to know: two runs of one seed have the same digest, in any process. So nothing goes into it that depends on
addresses, hash seeds or the real time.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hermetic.proof.saved import Step
from hermetic.worker import messages as m

KEPT = 6000  # events that a chart may be drawn from
DRAWN = 120  # steps of a counterexample at most


@dataclass(frozen=True)
class _Carried:
    """A message that arrived, or was lost on its way."""

    at: float
    source: str
    to: str
    raw: bytes
    fate: str


@dataclass(frozen=True)
class _Noted:
    """Something that happened at one place. `keys`: whose it was, where that is known."""

    at: float
    where: str
    what: str
    detail: str
    keys: tuple[str, ...]


class Events:
    """`clock` is the run's virtual time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._hash = hashlib.blake2b(digest_size=16)
        self._kept: deque[_Carried | _Noted] = deque(maxlen=KEPT)
        self.count = 0
        self.counts: Counter[str] = Counter()
        self.labels: dict[str, str] = {}  # of tickets: the request's number

    def carried(self, source: str, to: str, raw: bytes, fate: str = "") -> None:
        self.count += 1
        self._hash.update(f"{self._clock():.9f} {source} {to} {fate} ".encode())
        self._hash.update(raw)
        self._kept.append(_Carried(self._clock(), source, to, raw, fate))

    def noted(self, where: str, what: str, detail: str = "", keys: tuple[str, ...] = ()) -> None:
        self.count += 1
        self._hash.update(f"{self._clock():.9f} {where} {what} {detail}".encode())
        self._kept.append(_Noted(self._clock(), where, what, detail, keys))

    def counted(self, kind: str, number: int = 1) -> None:
        """A fault happened, or an outcome."""
        self.counts[kind] += number

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    # ------------------------------------------------------------------- for a chart

    def steps(self, keys: Collection[str]) -> tuple[Step, ...]:
        """The last events of these tickets (of all, when none is named), as steps of a counterexample."""
        found = [step for event in self._kept for step in self._drawn(event, keys)]
        return tuple(found[-DRAWN:])

    def _drawn(self, event: _Carried | _Noted, keys: Collection[str]) -> Iterator[Step]:
        if isinstance(event, _Noted):
            if not event.keys or not keys or set(event.keys) & set(keys):
                whose = ", ".join(self.label(key) for key in event.keys[:2])
                yield Step(event.where, event.what, key=whose, detail=event.detail, move=f"{event.at:.6f}")
            return
        envelope = m.decode(event.raw)
        outside = envelope.sequence == 0 or isinstance(envelope.body, m.Tokens | m.Stats | m.AskStats)
        if outside or (envelope.key is None and keys):
            return
        key = "" if envelope.key is None else str(envelope.key)
        if not keys or key in keys:
            name, detail = type(envelope.body).__name__, _told(envelope.body)
            yield Step(
                event.source, name, event.to, self.label(key), detail, f"{event.at:.6f}", fate=event.fate
            )

    def label(self, key: str) -> str:
        """`12/1`: request 12, attempt 1."""
        ticket, slash, attempt = key.partition("/")
        return self.labels.get(ticket, ticket) + slash + attempt

    def name(self, ticket: bytes, number: int) -> None:
        self.labels[ticket.hex()[:12]] = str(number)


def _told(body: Any) -> str:
    """The numbers of a message that matter."""
    match body:
        case m.Submit(prompt=prompt, peer=peer):
            return f"{prompt} prompt tokens of {len(body.tokens) // 4}, other half {peer}"
        case m.Cancel(code=code, drain=drain, choice=choice):
            what = "" if choice is None else f", choice {choice}"
            return f"{code}{', the transfer may finish' if drain else ''}{what}"
        case m.Ended(outcome=outcome):
            code = getattr(outcome, "code", "")
            return f"{type(outcome).__name__}{f' {code}: {outcome.reason}' if code else ''}"  # type: ignore[union-attr]
        case m.Welcome(segment=segment) if segment:
            return f"segment {segment}"
        case m.Hello() | m.Welcome():
            return ""
        case _:
            fields = [(name, getattr(body, name)) for name in body.__struct_fields__]
            return ", ".join(
                f"{name} {_short(value)}" for name, value in fields if not isinstance(value, bytes)
            )


def _short(value: object) -> str:
    text = str(value)
    if isinstance(value, tuple) and value and all(isinstance(x, tuple) for x in value):
        text = " ".join("/".join(map(str, x)) for x in value)
    return text if len(text) < 120 else text[:117] + "..."


__all__ = ["Events"]
