"""One cell of the table: a fault, a setting of the walls, three requests of three tenants, and what came of it.

The play. A *victim* runs to its end, so that decode's free pages are full of its rows, its marker among them. Then a
*reader* and a *bystander* of two other tenants run at once, on pages that the victim had; the fault hits the reader. The
one thing to know: whether a row of somebody else was read is decided by the witness, from bytes, never by the walls.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hermetic.engine.sequence import Phase, Sequence
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Completed, Failed, Outcome
from hermetic.lab.faults import TARGET, Fault, Page
from hermetic.lab.pair import Answer, LabPair
from hermetic.lab.tiny import make_tiny
from hermetic.lab.walls import Wall, without
from hermetic.lab.witness import Origin, Stranger, Witness

SIZE, CHUNK, PAGES = 16, 24, 24
VICTIM, READER, BYSTANDER = "alice", "bob", "carol"
MARKER = {VICTIM: (501, 502, 503, 504, 505), BYSTANDER: (506, 507, 508, 509, 510)}
_LENGTH = {
    VICTIM: 230,
    READER: 70,
    BYSTANDER: 85,
}  # reader: 4 full pages and 6 rows; victim: 15 pages, more than both others take
OUTPUTS = 14  # of the reader: grows into a sixth page


class Verdict(enum.Enum):
    """What became of the reader. LEAK and WRONG are what the walls are there to prevent."""

    CAUGHT = "caught"  # it failed with kv_integrity, and nothing wrong was emitted
    HARMLESS = "harmless"  # it got the answer that it gets undisturbed
    LEAK = "LEAK"  # its attention read another tenant's rows
    WRONG = "WRONG"  # its attention read rows that were not its own of that place, of no other tenant


@dataclass(frozen=True)
class Setting:
    """Which walls stand: what `--verify` was given, and what the lab took away."""

    name: str
    verify: str
    away: frozenset[Wall] = frozenset()


_O, _C, _L, _X = Wall.OWNERSHIP, Wall.COUNTS, Wall.LANDING, Wall.EXCLUSIVITY
SETTINGS = (
    Setting("product default", "landing"),
    Setting("--verify read", "read"),
    Setting("--verify tags", "tags"),
    Setting("ownership alone", "tags", frozenset({_C, _X})),
    Setting("landing alone", "landing", frozenset({_O, _C, _X})),
    Setting("read alone", "read", frozenset({_O, _C, _L, _X})),
    Setting("exclusivity alone", "tags", frozenset({_O, _C})),
    Setting("counts alone", "tags", frozenset({_O, _X})),
    Setting("no walls", "tags", frozenset({_O, _C, _X})),
)


def prompt(tenant: str) -> list[int]:
    """Token ids of one tenant's prompt; its marker comes back every eleven tokens, so that it is on every page."""
    rng = np.random.default_rng(list(tenant.encode()))
    tokens = rng.integers(1, 500, _LENGTH[tenant]).tolist()
    marker = MARKER.get(tenant, ())
    for at in range(3, len(tokens) - len(marker), 11):
        tokens[at : at + len(marker)] = marker
    return tokens


@functools.cache
def model(seed: int = 0) -> str:
    """A tiny random model of this seed, made once a process."""
    return make_tiny(Path(_folder().name) / f"tiny-{seed}", seed)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="hermetic-lab-")


def make_pair(verify: str, seed: int = 0, **options: Any) -> LabPair:
    defaults: dict[str, Any] = {
        "prefill_pages": PAGES,
        "decode_pages": PAGES,
        "page_size": SIZE,
        "chunk": CHUNK,
        "max_batch": 8,
        "threads": 1,  # products this small gain nothing from a second thread, and suffer when the machine is busy
    }
    return LabPair(model(seed), verify=verify, **(defaults | options))


@dataclass
class Scene:
    """A play in progress."""

    pair: LabPair
    witness: Witness
    victim_table: list[int]
    victim_pages: list[Page]  # whole pages, seals included, as decode held them
    reader: Key = field(init=False)
    bystander: Key = field(init=False)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def answer(self) -> Answer:
        return self.pair.answer(self.reader)

    @property
    def marker_row(self) -> int:
        """A row of the victim's page TARGET that holds a token of its marker."""
        on_page = prompt(VICTIM)[TARGET * SIZE : (TARGET + 1) * SIZE]
        return next(i for i, token in enumerate(on_page) if token in MARKER[VICTIM])

    def is_reader(self, key: Key) -> bool:
        return key.ticket == self.reader.ticket

    def prefilling(self) -> Sequence | None:
        """The reader while prefill computes it."""
        engine = self.pair.prefill.engine
        found = engine._live.get(self.reader, ())
        return next((s for s in found if s.phase is Phase.PREFILLING), None)

    def bystander_runs(self) -> bool:
        """Whether the bystander is in the decode batch too."""
        return any(s.phase is Phase.RUNNING for s in self.pair.decode.engine._live.get(self.bystander, ()))

    def patch(self, target: object, name: str, value: object) -> None:
        """Replace an attribute until the play is over."""
        self._stack.enter_context(mock.patch.object(target, name, value))

    def other_model_page(self) -> Page:
        """Page TARGET of the victim's prompt, as another model of the same shape computed and sealed it."""
        pair = make_pair("landing", seed=1)
        self.witness.watch(pair)
        return seeded(pair)[1][TARGET]

    def other_dtype_page(self) -> Page:
        """The same page in float32: twice as long."""
        return seeded(make_pair("landing", dtype="float32"))[1][TARGET]


def seeded(pair: LabPair) -> tuple[list[int], list[Page]]:
    """Run the victim to its end. Returns its page table on decode, and copies of its pages while they were live."""
    key = pair.submit(prompt(VICTIM), VICTIM, max_tokens=4)
    pair.run(lambda: len(pair.answer(key).tokens) >= 3)
    (seq,) = pair.decode.engine._live[key]
    pages = [pair.decode.engine.pool.memory[p].copy() for p in seq.pages]
    table = seq.pages.tolist()
    pair.run()
    assert isinstance(pair.answer(key).outcome, Completed)
    return table, pages


@dataclass(frozen=True)
class Played:
    """What came of one play."""

    verdict: Verdict
    outcome: Outcome | None
    tokens: tuple[int, ...]
    strangers: tuple[Stranger, ...]  # rows that the reader's attention read and that were not its own
    leaked: tuple[Origin, ...]  # those of other tenants
    quarantined: int
    resends: int
    rows_read: int

    @property
    def markers(self) -> set[tuple[str, int]]:
        """(tenant, token) of every planted marker token whose row was read."""
        return {(o.owner.tenant, o.token) for o in self.leaked if o.token in MARKER.get(o.owner.tenant, ())}


class StageError(AssertionError):
    """A play ended in a way that no verdict covers; the message says how."""


@contextlib.contextmanager
def _stage(setting: Setting, fault: Fault | None) -> Iterator[Scene]:
    pair, witness = make_pair(setting.verify), Witness()
    witness.watch(pair)
    scene = Scene(pair, witness, *seeded(pair))
    with scene._stack, without(pair, set(setting.away)):
        ticket = (len(pair.answers) + 1).to_bytes(16, "little")
        scene.reader = Key(ticket, 1)
        if fault is not None:
            fault.arm(scene)
        assert pair.submit(prompt(READER), READER, max_tokens=OUTPUTS) == scene.reader
        scene.bystander = pair.submit(prompt(BYSTANDER), BYSTANDER, max_tokens=OUTPUTS)
        yield scene


@functools.cache
def undisturbed() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The answers of reader and bystander when nothing goes wrong."""
    with _stage(SETTINGS[0], None) as scene:
        scene.pair.run()
        if scene.witness.strangers:
            raise StageError(f"without a fault, strange rows were read: {scene.witness.strangers[0]}")
        return tuple(scene.answer.tokens), tuple(scene.pair.answer(scene.bystander).tokens)


def play(fault: Fault, setting: Setting) -> Played:
    """Play one cell. Raises StageError when a bystander is harmed, something is not given back, or nothing fits."""
    expected, beside = undisturbed()
    with _stage(setting, fault) as scene:
        struck = False

        def watch() -> bool:
            nonlocal struck
            if not struck and fault.due(scene):
                fault.strike(scene)
                struck = True
            return False

        pair, where = scene.pair, f"{fault.name} / {setting.name}"
        pair.run(watch)
        other = pair.answer(scene.bystander)
        if not isinstance(other.outcome, Completed) or tuple(other.tokens) != beside:
            raise StageError(f"{where}: the bystander got {other.tokens} and ended with {other.outcome}")
        if strange := scene.witness.read_by(scene.bystander.ticket):
            raise StageError(f"{where}: the bystander read a strange row: {strange[0]}")
        pair.check()
        if not pair.idle():
            raise StageError(f"{where}: something is still held: {pair.decode.stats()}")
        tokens, outcome = tuple(scene.answer.tokens), scene.answer.outcome
        strangers, leaked = (
            scene.witness.read_by(scene.reader.ticket),
            scene.witness.leaked_to(scene.reader.ticket),
        )
        if isinstance(outcome, Failed) and outcome.code == "kv_integrity":
            if tokens != expected[: len(tokens)]:
                raise StageError(f"{where}: caught, but {tokens} had been emitted, not {expected}")
            verdict = Verdict.CAUGHT
        elif leaked:
            verdict = Verdict.LEAK
        elif strangers:
            verdict = Verdict.WRONG
        elif isinstance(outcome, Completed) and tokens == expected:
            verdict = Verdict.HARMLESS
        else:
            raise StageError(f"{where}: {tokens} were emitted, not {expected}; it ended with {outcome}")
        return Played(
            verdict,
            outcome,
            tokens,
            tuple(strangers),
            tuple(leaked),
            pair.decode.engine.pool.counts().quarantined + pair.prefill.engine.pool.counts().quarantined,
            pair.decode.landing.resends,
            scene.witness.rows_read,
        )
