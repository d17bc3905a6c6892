"""Faults of ends: what is given back before nobody can write into it or read it any more, and what never comes back."""

from __future__ import annotations

from typing import Any

from hermetic.handoff.actions import CloseLeases, Forget, Report, Send
from hermetic.handoff.messages import Abort, Drained
from hermetic.handoff.outcome import Completed, Failed
from hermetic.handoff.prefill import State as PrefillState
from hermetic.proof.mutants.patching import EXPLORER, WORKERS, Function, replaces

PREFILL = "hermetic.handoff.prefill:PrefillHandoff"
DECODE = "hermetic.handoff.decode:DecodeHandoff"
SLOTS = "hermetic.kv.slots:Slots"
DRAFT = "hermetic.proof.draft:Draft"


@replaces(f"{DECODE}._end")
def slots_free_at_the_end(original: Function) -> Function:
    def _end(self: Any, cause: Any) -> Any:
        self._quiet = True  # as if prefill had said drained
        return original(self, cause)

    return _end


@replaces(f"{PREFILL}._end")
def target_cleared(original: Function) -> Function:
    def _end(self: Any, cause: Any) -> Any:
        if not self._in_flight:
            return original(self, cause)
        self.state = PrefillState.ENDED
        return [Report(cause), Forget()]

    return _end


@replaces(f"{PREFILL}._drained_if_idle")
def last_write_only(original: Function) -> Function:
    def _drained_if_idle(self: Any) -> Any:
        if self._batches not in self._in_flight:
            self._in_flight.clear()
        return original(self)

    return _drained_if_idle


@replaces("hermetic.handoff.unknown:at_prefill")
def abort_unanswered(original: Function) -> Function:
    def at_prefill(ended: Any, message: Any) -> Any:
        answer = original(ended, message)
        return answer._replace(send=(), stale=True) if isinstance(message, Abort) else answer

    return at_prefill


@replaces(f"{PREFILL}._end")
def prefill_failure_at_once(original: Function) -> Function:
    def _end(self: Any, cause: Any) -> Any:
        if isinstance(cause, Failed):
            self._in_flight.clear()
        return original(self, cause)

    return _end


@replaces(f"{DECODE}._end")
def decode_failure_at_once(original: Function) -> Function:
    def _end(self: Any, cause: Any) -> Any:
        self._quiet = self._quiet or isinstance(cause, Failed)
        return original(self, cause)

    return _end


@replaces(f"{PREFILL}._end")
def source_freed(original: Function) -> Function:
    def _end(self: Any, cause: Any) -> Any:
        out = original(self, cause)
        return out if self.state is PrefillState.ENDED else [*out, CloseLeases()]

    return _end


@replaces(f"{PREFILL}._wrote")
def failed_means_stopped(original: Function) -> Function:
    def _wrote(self: Any, batch: int, ok: bool, stopped: bool) -> Any:
        return original(self, batch, ok, True)

    return _wrote


@replaces(f"{SLOTS}.quarantine")
def released_anyway(original: Function) -> Function:
    return lambda self, key: self.release(key)


@replaces(f"{SLOTS}.quarantine")
def quarantine_forgets(original: Function) -> Function:
    def quarantine(self: Any, key: object) -> int:
        count: int = original(self, key)
        for slot in self._of(key):
            del self._granted[slot]
            self._quarantined.discard(slot)
        return count

    return quarantine


@replaces(f"{PREFILL}._drained_if_idle")
def leases_stay(original: Function) -> Function:
    def _drained_if_idle(self: Any) -> Any:
        return [action for action in original(self) if not isinstance(action, CloseLeases)]

    return _drained_if_idle


@replaces(f"{PREFILL}.nudge")
def prefill_says_nothing(original: Function) -> Function:
    return lambda self: self._on("nudge", list)


@replaces(f"{DECODE}.nudge")
def decode_says_nothing(original: Function) -> Function:
    return lambda self: self._on("nudge", list)


@replaces(f"{PREFILL}._end")
def failure_is_success(original: Function) -> Function:
    def _end(self: Any, cause: Any) -> Any:
        return original(self, Completed() if isinstance(cause, Failed) else cause)

    return _end


@replaces(f"{DRAFT}.fence", EXPLORER)
def fence_of_nothing(original: Function) -> Function:
    def fence(self: Any, pair: int) -> None:
        flights = {t: self.flights(t) for t in self.of(pair)}
        original(self, pair)
        for t, mine in flights.items():  # their bytes still reach this memory
            self.put(t, 5, map(tuple, mine))

    return fence


@replaces("hermetic.proof.simulation.transport:Receiver.fence", WORKERS)
def simulated_fence_of_nothing(original: Function) -> Function:
    return lambda self: True


@replaces(f"{PREFILL}._end")
def drained_when_asked(original: Function) -> Function:
    def _end(self: Any, cause: Any) -> Any:
        out = original(self, cause)
        return out if self.state is PrefillState.ENDED else [*out, Send(Drained())]

    return _end
