"""Faults of identity: one name for two things, or a name that leaves out what makes the difference."""

from __future__ import annotations

from typing import Any

from hermetic.proof.mutants.drains import DRAFT, PREFILL, SLOTS
from hermetic.proof.mutants.landing import DECODE_WORKER
from hermetic.proof.mutants.patching import EXPLORER, WORKERS, Function, replaces

UP = 3  # proof.model.UP


@replaces(f"{DRAFT}.begin", EXPLORER)
def next_attempt_hears_the_last(original: Function) -> Function:
    """What is on its way for the first attempt comes to the second, which has the same id."""

    def begin(self: Any, t: int, pair: int) -> None:
        original(self, t, pair)
        if t % 2 and self.known(t - 1).pair == pair:
            self.put(t, UP, self.at(t - 1, UP))
            self.put(t - 1, UP, ())

    return begin


@replaces(f"{DECODE_WORKER}._from_prefill", WORKERS)
def attempt_not_compared(original: Function) -> Function:
    def _from_prefill(self: Any, peer: Any, key: Any, body: Any) -> None:
        newest = max(
            (k for k in self._records if k.ticket == key.ticket), key=lambda k: k.attempt, default=key
        )
        original(self, peer, newest, body)

    return _from_prefill


@replaces(f"{SLOTS}.grant")
def uses_repeat(original: Function) -> Function:
    def grant(self: Any, key: object, number: int) -> Any:
        for slot in self._free:
            self._uses[slot] = 0
        return original(self, key, number)

    return grant


@replaces("hermetic.handoff.unknown:at_prefill")
def ends_forgotten(original: Function) -> Function:
    return lambda ended, message: original(None, message)


@replaces(f"{PREFILL}._credit")
def credit_counts_again(original: Function) -> Function:
    def _credit(self: Any, first: int, slots: Any) -> Any:
        again = [slot for slot in slots if slot in self._numbers and slot not in self._credits]
        out = original(self, first, slots)
        self._credits.extend(again)
        return [*out, *self._pump()] if again else out

    return _credit


@replaces("hermetic.worker.core:Worker._root", WORKERS)
def root_without_tenant(original: Function) -> Function:
    import msgspec

    return lambda self, submit: original(self, msgspec.structs.replace(submit, scope=""))


@replaces("hermetic.worker.core:difference", WORKERS)
def nothing_differs(original: Function) -> Function:
    return lambda ours, theirs: None
