"""The advertised context: how many tokens every reachable pair can hold. Pure.

The one thing to know: it never grows because somebody is away. A worker that died or left keeps its *place* until a worker
of its name comes back, the operator sets the context anew, or nobody at all is left. Without that, a small worker that
restarts would find the context grown past its pool, and be refused.

A set of places is complete when it can serve: a unified worker, or prefill and decode. Only a complete set defines the
context; until then the last one stays shown, and whoever joins helps to define the next.
"""

from __future__ import annotations

from dataclasses import dataclass

from hermetic.worker.messages import WorkerInfo


@dataclass(frozen=True)
class Place:
    """What a worker holds."""

    role: str
    max_tokens: int


class Window:
    """`tokens` is what is advertised, 0 before the first complete set."""

    def __init__(self, cap: int | None = None) -> None:
        self.cap, self.tokens = cap, 0
        self._places: dict[str, Place] = {}
        self._present: set[str] = set()

    @property
    def complete(self) -> bool:
        roles = {place.role for place in self._places.values()}
        return "unified" in roles or {"prefill", "decode"} <= roles

    def refuse(self, info: WorkerInfo) -> str | None:
        """Why a worker of this size does not join, or None."""
        alone = self._present <= {info.worker}
        if alone or not self.complete or info.max_tokens >= self.tokens:
            return None
        return (
            f"its pool holds {info.max_tokens} tokens ({info.pages} pages of {info.page_size}) and {self.tokens} are "
            f"advertised; give it a pool for {self.tokens} tokens, or lower what is advertised first: "
            f"hermetic context {info.max_tokens}"
        )

    def join(self, worker: str, role: str, max_tokens: int) -> None:
        """`worker` was let in; it takes the place of its name."""
        self._places[worker] = Place(role, max_tokens)
        self._present.add(worker)
        self._measure()

    def gone(self, worker: str) -> None:
        """`worker` died, left or does not answer. Its place stays, unless it was the last one here."""
        self._present.discard(worker)
        if not self._present:
            self._places.clear()

    def set_cap(self, tokens: int | None) -> None:
        """Advertise at most this much (None: what the pools hold). Gives up the places of those who are away."""
        self.cap = tokens
        self._places = {name: place for name, place in self._places.items() if name in self._present}
        if tokens is not None:
            self.tokens = min(self.tokens, tokens)
        self._measure()

    def _measure(self) -> None:
        if self.complete:
            held = min(place.max_tokens for place in self._places.values())
            self.tokens = held if self.cap is None else min(held, self.cap)
