"""What `hermetic simulate` is asked to do. Imports nothing heavy.

The one thing to know: a run is a function of `seed`, the numbers here and the code. `only` and `without` are how a failing
run is made small: the same plan, with requests and faults left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields


class SimulationError(ValueError):
    """It cannot be run as asked; the message says why. Exit code 2."""


@dataclass(frozen=True)
class Rates:
    """How much goes wrong. Probabilities for each message, write or request; the others are faults a hundred requests."""

    loss: float = 0.01  # of a message between processes
    duplicate: float = 0.01
    late: float = 0.03  # it is overtaken: it takes up to 0.6 s
    abort: float = 0.15  # of a request, by its client
    write_fails: float = 0.01  # and nothing of the batch can arrive any more
    write_doubt: float = 0.02  # no end within the transport's bound; its bytes come later, or never
    crash: float = 2.0
    freeze: float = 3.0  # stopped, for longer or shorter than silence is tolerated
    slow: float = 2.0
    cut: float = 3.0  # no messages between two processes
    cut_data: float = 2.0  # no pages between two workers
    damage_slot: float = 4.0  # a byte changes in a landing slot that was written
    damage_page: float = 3.0  # a byte changes in a page (of workers that verify at every read)
    drain: float = 1.0  # an operator drains a worker, and gives it work again
    leave: float = 1.5  # a worker is restarted in peace
    disable: float = 0.5  # the model is disabled for a while
    gateway: float = 0.5  # the gateway dies and another one takes its place

    def quiet(self) -> Rates:
        """Nothing goes wrong."""
        return Rates(**{one.name: 0.0 for one in fields(self)})


CLASSES = tuple(one.name for one in fields(Rates))


@dataclass(frozen=True)
class Narrowed:
    """A plan with parts left out. `only` and `faults`: numbers of requests and of planned faults that stay (None: all)."""

    only: tuple[int, ...] | None = None
    faults: tuple[int, ...] | None = None
    without: tuple[str, ...] = ()  # classes of faults that do not happen


@dataclass(frozen=True)
class SimulateOptions:
    """`seeds` runs, from `seed` on, of `requests` requests each."""

    seed: int = 1
    seeds: int = 1
    requests: int = 50
    rates: Rates = field(default_factory=Rates)
    narrowed: Narrowed = field(default_factory=Narrowed)
    mutant: str = ""
    mutants: bool = False  # every mutant: how many seeds until it is found
    transport: str = "simulated"  # or mooncake, which needs wall_clock
    wall_clock: bool = False
    processes: int = 2
    json: str = ""  # where a counterexample is saved
    shrink: bool = True
    trace: str = ""  # where the protocol's events are recorded, for `hermetic prove --conform`


__all__ = ["CLASSES", "Narrowed", "Rates", "SimulateOptions", "SimulationError"]
