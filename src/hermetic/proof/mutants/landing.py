"""Faults of landing: what is taken for here, whole or checked, and is not; slots given back while their bytes are needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from hermetic.handoff.actions import Copy, Enter, Forget, Report, Send, Write
from hermetic.handoff.decode import State as DecodeState
from hermetic.handoff.messages import Ack, Landed
from hermetic.handoff.outcome import Completed
from hermetic.handoff.prefill import State as PrefillState
from hermetic.proof.mutants.drains import DECODE, DRAFT, PREFILL, SLOTS
from hermetic.proof.mutants.patching import EXPLORER, WORKERS, Function, replaces

DECODE_WORKER = "hermetic.worker.decode:DecodeWorker"


def _enters(machine: Any) -> Any:
    machine.state = DecodeState.ENTERED
    machine._slots.release(machine.key)
    return [Send(Ack()), Enter(machine._complete.state), Report(Completed()), Forget()]


@replaces(f"{DECODE}._enter_if_whole")
def finished_is_enough(original: Function) -> Function:
    def _enter_if_whole(self: Any) -> Any:
        finished = self._verified | self._resent.keys()  # also what failed, and was asked for again
        if self._complete is None or self._copying or len(finished) != self._pages:
            return []
        return _enters(self)

    return _enter_if_whole


@replaces(f"{DECODE}._enter_if_whole")
def complete_is_believed(original: Function) -> Function:
    def _enter_if_whole(self: Any) -> Any:
        return [] if self._complete is None or self._copying else _enters(self)

    return _enter_if_whole


@replaces(f"{PREFILL}._pump")
def complete_without_tail(original: Function) -> Function:
    def _pump(self: Any) -> Any:
        out = original(self)
        nearly = len(self._landed) == self._pages - 1 and not self._in_flight
        if nearly and self.state is PrefillState.SENDING and self._computed is not None:
            self.state = PrefillState.COMPLETE
            out += self._completes()
        return out

    return _pump


@replaces(f"{PREFILL}._pump")
def announced_before_written(original: Function) -> Function:
    def _pump(self: Any) -> Any:
        out = []
        for action in original(self):
            out.append(action)
            if isinstance(action, Write):
                pages = tuple((page, use.slot, use.use) for page, use in action.pages)
                out.append(Send(Landed(action.batch, pages)))
        return out

    return _pump


@replaces(f"{DECODE}._landed")
def slot_back_before_copy(original: Function) -> Function:
    def _landed(self: Any, message: Any) -> Any:
        out = original(self, message)
        for action in out:
            if isinstance(action, Copy):
                self._slots.consume(self.key, action.slot)
        return out

    return _landed


@replaces(f"{SLOTS}.consume")
def consumed_before(original: Function) -> Function:
    """The second time, after the copy, it is not there any more; nobody asks."""

    def consume(self: Any, key: object, use: Any) -> None:
        if self.holds(key, use):
            original(self, key, use)

    return consume


@replaces(f"{DECODE}._completed")
def ack_before_verify(original: Function) -> Function:
    def _completed(self: Any, message: Any) -> Any:
        out = original(self, message)
        return [Send(Ack()), *out] if self.state is DecodeState.LANDING else out

    return _completed


@replaces(f"{DECODE}.wants")
def all_or_nothing(original: Function) -> Function:
    def wants(self: Any) -> int:
        wanted: int = original(self)
        return wanted if wanted <= self._slots.free else 0

    return wants


# ------------------------------------------------------------------------------------ what the decode worker does
@replaces(f"{DECODE_WORKER}._land_few", WORKERS)
def remembers_slots(original: Function) -> Function:
    def _land_few(self: Any, round_: Any) -> None:
        self.mutant_slots = [self._records[key].peer.receiver.memory[copy.slot.slot] for key, copy in round_]
        original(self, round_)

    return _land_few


@replaces(f"{DECODE_WORKER}._verify_landed", WORKERS)
def copies_after_verify(original: Function) -> Function:
    """The slot is hashed first (a copy of it, here), and then copied: what comes in between is not hashed."""

    def _verify_landed(self: Any, pages: Any, *expected: Any) -> Any:
        good = original(self, pages, *expected)
        for page, slot in zip(pages, self.mutant_slots, strict=True):
            np.copyto(self.engine.pool.memory[page], slot)
        return good

    return _verify_landed


@replaces(f"{DRAFT}.verify", EXPLORER)
def page_copied_after_verify(original: Function) -> Function:
    def verify(self: Any, t: int) -> None:
        page, (_, slot, _) = self.decode(t).checking
        pair = self.known(t).pair
        place = self.world.dpool_at(pair)
        before = self.contents[self.ids[place]]
        table = next(pages for ticket, pages, _ in before[2] if ticket == t)
        good = before[3][table[page]] == ("K", t, page, True)
        now = self.contents[self.ids[self.world.mem_at(pair)]][slot]
        self.page_op(place, "land", t, page, now)
        self.checked(t, page, good)

    return verify


@replaces(f"{DECODE_WORKER}._verify_landed", WORKERS)
def nothing_verified(original: Function) -> Function:
    return lambda self, pages, *_: np.ones(len(pages), np.bool_)


@replaces(f"{DRAFT}.checked", EXPLORER)
def everything_is_good(original: Function) -> Function:
    return lambda self, t, page, good: original(self, t, page, True)


@replaces(f"{DECODE_WORKER}._verify_landed", WORKERS)
def tagged_before(original: Function) -> Function:
    def _verify_landed(self: Any, pages: Any, fills: Any, words: Any, binds: Any) -> Any:
        for i, (key, copy) in enumerate(self.mutant_round):
            lineage = self.engine.reserved(key).chain.lineages[copy.page]
            self.engine.pool.set_tags(pages[i : i + 1], lineage[None], fills[i : i + 1])
        return original(self, pages, fills, words, binds)

    return _verify_landed


@replaces(f"{DECODE_WORKER}._land_few", WORKERS)
def remembers_round(original: Function) -> Function:
    def _land_few(self: Any, round_: Any) -> None:
        self.mutant_round = round_
        original(self, round_)

    return _land_few


@replaces(f"{DRAFT}.copy", EXPLORER)
def page_tagged_at_copy(original: Function) -> Function:
    def copy(self: Any, t: int) -> None:
        page = self.decode(t).copies[0][0]
        place = self.world.dpool_at(self.known(t).pair)
        original(self, t)
        if self.decode(t).stage == "machine":
            self.page_op(place, "tag", t, page)

    return copy


@replaces(f"{DECODE_WORKER}._enter", WORKERS)
def firsts_by_row(original: Function) -> Function:
    """The first tokens wait in one place for each peer, and whoever enters next takes what lies there."""

    def _enter(self: Any, key: Any, record: Any, state: bytes) -> None:
        waiting = self.__dict__.setdefault("mutant_states", {})
        taken = waiting.get(record.peer.segment, state)
        waiting[record.peer.segment] = state
        original(self, key, record, taken)

    return _enter
