"""The sending side of the transfer engines, driven by an engine that does what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from hermetic.transport import staged
from hermetic.transport.base import Written
from hermetic.transport.staged import ENTRIES_IN_FLIGHT, StagedSender, State

SLOTS, STRIDE = 8, 64


class Told:
    """An engine whose batches end when the test says how."""

    def __init__(self) -> None:
        self.started: list[tuple[int, ...]] = []
        self.states: list[State] = []
        self.closed = threading.Event()
        self.threads: set[int] = set()

    def start(self, slots: Sequence[int]) -> ToldFlight:
        self.threads.add(threading.get_ident())
        self.started.append(tuple(slots))
        self.states.append(State.RUNNING)
        return ToldFlight(self, len(self.states) - 1)

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed.set()


class ToldFlight:
    def __init__(self, engine: Told, number: int) -> None:
        self._engine, self._number = engine, number

    def state(self) -> State:
        self._engine.threads.add(threading.get_ident())
        return self._engine.states[self._number]


@pytest.fixture
def engine() -> Told:
    return Told()


def sender_of(engine: Told, slots: int = SLOTS, timeout_s: float = 60.0) -> StagedSender:
    return StagedSender(np.zeros((slots, STRIDE), np.uint8), engine, "told", timeout_s)


def page(value: int) -> np.ndarray:
    return np.full(STRIDE, value, np.uint8)


def polled(sender: StagedSender, count: int) -> list[Written]:
    ended: list[Written] = []
    until = time.monotonic() + 30
    while len(ended) < count and time.monotonic() < until:
        ended += sender.poll()
        time.sleep(1e-3)
    return ended


def until_started(engine: Told, count: int) -> None:
    until = time.monotonic() + 30
    while len(engine.started) < count:
        assert time.monotonic() < until
        time.sleep(1e-3)


def test_batches_are_reported_in_the_order_in_which_they_end(engine: Told) -> None:
    sender = sender_of(engine)
    for batch in range(3):
        sender.write(batch, [(page(batch), batch)])
    until_started(engine, 3)
    for number in (2, 0, 1):
        engine.states[number] = State.DONE
        assert polled(sender, 1) == [Written(number, ok=True, stopped=True)]
    sender.close()


def test_a_source_may_change_as_soon_as_write_returns() -> None:
    engine, stage = Told(), np.zeros((SLOTS, STRIDE), np.uint8)
    sender = StagedSender(stage, engine, "told")
    source = page(5)
    sender.write(1, [(source, 3)])
    source[:] = 6
    assert set(stage[3].tolist()) == {5}
    assert not stage[np.arange(SLOTS) != 3].any()
    sender.close()


def test_what_the_engine_gives_up_is_in_doubt_and_its_slots_are_not_written_again(engine: Told) -> None:
    sender = sender_of(engine)
    sender.write(1, [(page(1), 0), (page(1), 1)])
    until_started(engine, 1)
    engine.states[0] = State.LOST
    assert polled(sender, 1) == [Written(1, ok=False, stopped=False)]
    sender.write(2, [(page(2), 1)])  # bytes that the engine may still read and send would be other bytes
    assert polled(sender, 1) == [Written(2, ok=False, stopped=True)]
    sender.write(3, [(page(2), 2)])
    until_started(engine, 2)
    assert engine.started == [(0, 1), (2,)]
    sender.close()


def test_a_slot_whose_write_is_on_its_way_takes_no_other(engine: Told) -> None:
    sender = sender_of(engine)
    sender.write(1, [(page(1), 0)])
    sender.write(2, [(page(2), 0)])
    assert polled(sender, 1) == [Written(2, ok=False, stopped=True)]
    engine.states[0] = State.DONE
    assert polled(sender, 1) == [Written(1, ok=True, stopped=True)]
    sender.write(3, [(page(3), 0)])
    until_started(engine, 2)
    sender.close()


def test_a_batch_that_does_not_end_is_in_doubt_after_the_time_out(engine: Told) -> None:
    sender = sender_of(engine, timeout_s=0.05)
    sender.write(1, [(page(1), 0)])
    assert polled(sender, 1) == [Written(1, ok=False, stopped=False)]
    engine.states[0] = State.DONE  # too late to be believed
    assert polled_nothing(sender)
    sender.close()


def polled_nothing(sender: StagedSender) -> bool:
    time.sleep(0.05)
    return sender.poll() == []


def test_an_empty_batch_is_done_without_the_engine(engine: Told) -> None:
    sender = sender_of(engine)
    sender.write(1, [])
    assert sender.poll() == [Written(1, ok=True, stopped=True)]
    sender.close()
    assert engine.started == []


def test_the_engine_never_holds_more_pages_than_its_queue_takes(engine: Told) -> None:
    batches, size = 3 * ENTRIES_IN_FLIGHT // 16, 16
    sender = sender_of(engine, slots=batches * size)
    for batch in range(batches):
        sender.write(batch, [(page(1), batch * size + i) for i in range(size)])
    ended: list[Written] = []
    for number in range(batches):
        until_started(engine, number + 1)
        running = sum(size for state in engine.states if state is State.RUNNING)
        assert running <= ENTRIES_IN_FLIGHT
        engine.states[number] = State.DONE
        ended += polled(sender, 1)
    assert [x.batch for x in ended if x.ok] == list(range(batches))
    sender.close()


def test_closing_ends_the_engine_in_its_own_thread_and_leaves_open_batches_in_doubt(engine: Told) -> None:
    sender = sender_of(engine)
    sender.write(1, [(page(1), 0)])
    until_started(engine, 1)
    sender.close()
    sender.close()
    assert engine.closed.is_set()
    assert engine.threads == engine.threads - {threading.get_ident()}
    assert len(engine.threads) == 1
    assert sender.poll() == [Written(1, ok=False, stopped=False)]
    sender.write(2, [(page(1), 1)])
    assert sender.poll() == [Written(2, ok=False, stopped=True)]


def test_neither_an_answer_nor_closing_waits_for_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "_JOIN_S", 0.05)
    free = threading.Event()

    class Hanging(Told):
        def start(self, slots: Sequence[int]) -> ToldFlight:
            free.wait(60)
            return super().start(slots)

    engine = Hanging()
    sender = sender_of(engine, timeout_s=0.05)
    sender.write(1, [(page(1), 0)])
    assert polled(sender, 1) == [Written(1, ok=False, stopped=False)]  # nor is the answer put off
    sender.write(2, [(page(1), 1)])
    sender.close()
    assert sender.poll() == [Written(2, ok=False, stopped=False)]
    assert not engine.closed.is_set()
    free.set()
    assert engine.closed.wait(30)  # it is freed by the thread that was in it
    assert sender.poll() == []


def test_an_engine_that_breaks_leaves_everything_in_doubt(
    engine: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def broken(slots: Sequence[int]) -> ToldFlight:
        raise SystemExit  # ends a thread without a word

    engine.start = broken  # type: ignore[method-assign]
    sender = sender_of(engine)
    sender.write(1, [(page(1), 0)])
    assert polled(sender, 1) == [Written(1, ok=False, stopped=False)]
    assert engine.closed.wait(30)
    sender.write(2, [(page(1), 1)])
    assert sender.poll() == [Written(2, ok=False, stopped=True)]
    sender.close()
