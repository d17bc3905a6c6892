"""What a run will do, drawn from its seed before it begins: the deployment, the requests, and the faults with their times.

The one thing to know: every purpose has a stream of random numbers of its own, named after it, so that leaving out a request
or a kind of fault leaves the rest of the plan as it was.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hermetic.options import OptionError
from hermetic.proof.simulation.model import GEOMETRY, PAGE_SIZE, VOCAB
from hermetic.proof.simulation.options import CLASSES, Narrowed, Rates
from hermetic.worker.build import WorkerConfig, check_bounds
from hermetic.worker.wire import CurveKeys

WINDOW = 64  # tokens: the model's
GAP = 0.12  # seconds between two requests, on average
FAMILIES = 3  # of prompts that begin alike
TENANTS = ("red", "blue")
SILENT = 2.5  # seconds: --silent-after
DRAIN = 2.0  # seconds: --drain-deadline
WRITE_TIMEOUT = DRAIN / 2  # seconds: a transport's own bound
GATEWAY = "gateway"
WEATHER = (0.0, 0.5, 1.0, 2.0)  # each seed has more of some faults, and none of others
MISFIT = "prefill-x"
PLANNED = (
    "crash",
    "freeze",
    "slow",
    "cut",
    "cut_data",
    "damage_slot",
    "damage_page",
    "drain",
    "leave",
    "disable",
    "gateway",
)


def dice(seed: int, *purpose: object) -> random.Random:
    """Random numbers for one purpose."""
    return random.Random(f"{seed}/" + "/".join(map(str, purpose)))


@dataclass(frozen=True)
class Shape:
    """The deployment. `fenceable`: the transport can fence a peer that lives (Mooncake, NIXL); else only a dead one (shared
    memory). `one_host`: a process can be seen to end; else it can only be silent."""

    prefills: int
    decodes: int
    prefill_pages: int
    decode_pages: int
    slots: int
    floor: int  # bytes a second that a transfer reaches at least
    chunk: int
    batch: int
    verify: str
    fenceable: bool
    one_host: bool
    on_disconnect: str
    boast: int  # tokens that prefill's engines really hold when they announce WINDOW (0: what they announce)
    misfit: bool  # a prefill worker of another model asks to join
    skew: tuple[tuple[float, float], ...]  # of each worker's clock: seconds ahead, and its rate

    @property
    def workers(self) -> tuple[str, ...]:
        return (
            *(f"prefill-{i}" for i in range(self.prefills)),
            *(f"decode-{i}" for i in range(self.decodes)),
        )


@dataclass(frozen=True)
class Ask:
    """One request. `abort`: None, or ("after", seconds) or ("tokens", count); `stop`: a choice that is cancelled after so
    many tokens, as for a stop string."""

    number: int
    at: float
    tokens: tuple[int, ...]
    max_tokens: int
    tenant: str
    n: int = 1
    abort: tuple[str, float] | None = None
    stop: tuple[int, int] | None = None
    too_long: bool = False


@dataclass(frozen=True)
class Fault:
    """One planned fault. `to`: the other end of what is cut; `pick`: which slot, page or byte is damaged."""

    number: int
    at: float
    kind: str
    target: str = ""
    to: str = ""
    seconds: float = 0.0
    pick: int = 0


@dataclass(frozen=True)
class Asked:
    """With a seed: everything that a plan follows from."""

    requests: int
    rates: Rates = field(default_factory=Rates)
    narrowed: Narrowed = field(default_factory=Narrowed)


@dataclass(frozen=True)
class Plan:
    """`rates`: those of faults that are drawn while it runs. No fault begins or lasts after `quiet_at`. `asked`: what it was
    made from, besides its seed."""

    seed: int
    asked: Asked
    shape: Shape
    rates: Rates
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...]
    quiet_at: float


def make(seed: int, asked: Asked) -> Plan:
    """The plan of a seed, narrowed."""
    requests, rates, narrowed = asked.requests, asked.rates, asked.narrowed
    without = {name: 0.0 for name in narrowed.without}
    weather = dice(seed, "weather")
    scaled = {one: getattr(rates, one) * weather.choice(WEATHER) for one in CLASSES}
    rates = Rates(**{**scaled, **without})
    shape = _shape(dice(seed, "shape"))
    span = 0.5 + requests * GAP
    asks = [_ask(dice(seed, "ask", i), i, rates) for i in range(requests)]
    faults = _faults(seed, shape, rates, requests, span)
    if narrowed.only is not None:
        asks = [ask for ask in asks if ask.number in narrowed.only]
    if narrowed.faults is not None:
        faults = [fault for fault in faults if fault.number in narrowed.faults]
    quiet = max([span, *(ask.at for ask in asks), *(fault.at + fault.seconds for fault in faults)]) + 0.1
    return Plan(seed, asked, shape, rates, tuple(asks), tuple(faults), quiet)


def _floor(rng: random.Random, slots: int) -> int:
    """A --transfer-floor that workers with so many slots start with (`build.check_bounds` says which)."""
    floor: int = rng.choice([4096, 4096, 8192, 65536])
    while True:
        config = WorkerConfig(
            name="", role="decode", model="", dtype="", kv_bytes=0, page_size=PAGE_SIZE, verify="", context_length=None,
            chunk=1, max_batch=1, threads=1, host="", secret=b"", keys=CurveKeys(b"", b"", b"", b""), log_format="",
            slots=slots, transfer_floor=floor, drain_seconds=DRAIN,
        )  # fmt: skip
        try:
            check_bounds(config, GEOMETRY)
        except OptionError:
            floor *= 2
        else:
            return floor


def _shape(rng: random.Random) -> Shape:
    prefills, decodes = rng.choice([(1, 1), (1, 2), (2, 1), (2, 2), (2, 2), (2, 2)])
    slots = rng.choice([1, 2, 3, 6])
    return Shape(
        prefills=prefills,
        decodes=decodes,
        prefill_pages=rng.choice([16, 20, 32, 48]),
        decode_pages=rng.choice([16, 24, 32, 64]),
        slots=slots,
        floor=_floor(rng, slots),
        chunk=rng.choice([4, 8, 16, 32]),
        batch=rng.choice([2, 4, 8]),
        verify=rng.choice(["landing", "landing", "read"]),
        fenceable=rng.random() < 0.45,
        one_host=rng.random() < 0.5,
        on_disconnect=rng.choice(["drain", "cancel"]),
        boast=rng.choice([0, 0, 0, 0, 0, 0, 32]),
        misfit=rng.random() < 0.15,
        skew=tuple(
            (rng.uniform(0.0, 4000.0), rng.uniform(0.98, 1.02)) for _ in range(prefills + decodes + 1)
        ),
    )


def _ask(rng: random.Random, number: int, rates: Rates) -> Ask:
    at = 0.5 + number * GAP + rng.uniform(0.0, 3 * GAP)
    family = random.Random(f"family/{rng.randrange(FAMILIES)}")
    common = [family.randrange(VOCAB) for _ in range(5 * PAGE_SIZE)]
    prompt = common[: rng.randrange(len(common) + 1)] + [
        rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))
    ]
    max_tokens = rng.choice([1, 2, 4, 6, 10, 16])
    n = 2 if rng.random() < 0.06 else 1
    leaves, waits, by_tokens = rng.random() < rates.abort, rng.expovariate(4.0), rng.random() < 0.3
    abort: tuple[str, float] | None = (
        ("tokens", float(rng.randrange(1, 4))) if by_tokens else ("after", waits)
    )
    stop = (rng.randrange(n), rng.randrange(1, max_tokens + 1)) if rng.random() < 0.05 else None
    too_long = rng.random() < 0.02
    if not leaves:
        abort = None
    if too_long:
        max_tokens, abort, stop = WINDOW, None, None
    return Ask(number, at, tuple(prompt), max_tokens, rng.choice(TENANTS), n, abort, stop, too_long)


def _faults(seed: int, shape: Shape, rates: Rates, requests: int, span: float) -> list[Fault]:
    found: list[Fault] = []
    for kind in PLANNED:
        rng = dice(seed, "faults", kind)
        expected = getattr(rates, kind) * requests / 100
        count = int(expected) + (rng.random() < expected % 1)
        for _ in range(count):
            found.append(_fault(rng, kind, shape, span))
    found.sort(key=lambda fault: (fault.at, fault.kind))
    return [Fault(i, *(getattr(f, name) for name in _FIELDS)) for i, f in enumerate(found)]


_FIELDS = ("at", "kind", "target", "to", "seconds", "pick")


def _fault(rng: random.Random, kind: str, shape: Shape, span: float) -> Fault:
    workers = shape.workers
    prefills = [name for name in workers if name.startswith("prefill")]
    decodes = [name for name in workers if name.startswith("decode")]
    at, pick = 0.4 + rng.random() * span, rng.randrange(1 << 30)
    target, to = rng.choice(workers), ""
    seconds = rng.choice([0.05, 0.2, 0.6, 1.5, 3.5, 3.5]) * rng.uniform(0.8, 1.2)
    match kind:
        case "cut":
            ends = [(a, b) for a in prefills for b in decodes] + [(GATEWAY, b) for b in workers]
            target, to = rng.choice(ends)
        case "cut_data":
            target, to = rng.choice(prefills), rng.choice(decodes)
        case "damage_slot":
            target, seconds = rng.choice(decodes), 0.0
        case "damage_page":
            seconds = 0.0
        case "disable" | "gateway":
            target, seconds = GATEWAY, min(seconds, 1.2)
    return Fault(0, at, kind, target, to, seconds, pick)


__all__ = [
    "DRAIN",
    "GATEWAY",
    "MISFIT",
    "PLANNED",
    "SILENT",
    "WINDOW",
    "WRITE_TIMEOUT",
    "Ask",
    "Asked",
    "Fault",
    "Plan",
    "Shape",
    "dice",
    "make",
]
