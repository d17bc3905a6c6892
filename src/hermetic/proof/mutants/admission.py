"""Faults of the way in and of the gateway: refusals that go on, halves that are not told, bounds that do not hold, and
double gives on the way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hermetic.proof.mutants.drains import DRAFT
from hermetic.proof.mutants.patching import EXPLORER, WORKERS, Function, replaces

ENGINE = "hermetic.engine.engine:Engine"
PREFILL_WORKER = "hermetic.worker.prefill:PrefillWorker"
WORLD = "hermetic.proof.world:World"


@replaces(f"{ENGINE}.admit", WORKERS)
def never_too_long(original: Function) -> Function:
    def admit(self: Any, job: Any) -> Any:
        refusal = original(self, job)
        too_long = refusal is not None and refusal.code == "context_length_exceeded"
        return None if too_long and self.role.value == "prefill" else refusal

    return admit


@replaces(f"{PREFILL_WORKER}._take", WORKERS)
def placeholder_taken(original: Function) -> Function:
    def _take(self: Any, key: Any, job: Any, submit: Any) -> Any:
        if job.prompt + job.params.max_tokens > self.engine.max_tokens:
            job = replace(job, tokens=np.zeros(1, np.int64), prompt=1)
        return original(self, key, job, submit)

    return _take


@replaces("hermetic.proof.halves:PrefillHalf.submit", EXPLORER)
def one_page_instead(original: Function) -> Function:
    def submit(self: Any, up: bool) -> None:
        pages, self.pages = self.pages, 1
        original(self, up)
        self.pages = pages

    return submit


@replaces("hermetic.proof.pages:PageBook.close", EXPLORER)
def book_closes_twice(original: Function) -> Function:
    def close(self: Any, ticket: int) -> None:
        leases = list(self.held.get(ticket, []))
        original(self, ticket)
        for lease in leases:
            self.pool.close(lease)

    return close


@replaces(f"{ENGINE}._fail", WORKERS)
def engine_closes_twice(original: Function) -> Function:
    def _fail(self: Any, key: Any, code: str, reason: str) -> None:
        leases = [x for s in self._live.get(key, ()) for x in (s.full, s.growing) if x is not None]
        original(self, key, code, reason)
        for lease in leases:
            self.pool.close(lease)

    return _fail


@replaces(f"{PREFILL_WORKER}._perform", WORKERS)
def prefill_closes_twice(original: Function) -> Function:
    def _perform(self: Any, key: Any, record: Any, actions: Any) -> None:
        leases = list(record.sending)
        original(self, key, record, actions)
        for lease in leases:
            if not lease.open:
                self.engine.pool.close(lease)

    return _perform


@replaces("hermetic.gateway.runs:Runs._drop", WORKERS)
def decode_only_dropped(original: Function) -> Function:
    def _drop(self: Any, attempt: Any, code: str, reason: str, drain: bool = False) -> None:
        rest = {remote: None for remote in attempt.holding if remote is not attempt.halves[0]}
        for remote in rest:
            del attempt.holding[remote]
        original(self, attempt, code, reason, drain)
        attempt.holding.update(rest)

    return _drop


@replaces(f"{DRAFT}.leave", EXPLORER)
def leaves_decode_only(original: Function) -> Function:
    def leave(self: Any, t: int) -> None:
        original(self, t)
        self.put(t, 2, self.known(t)._replace(cancel_p=False))

    return leave


@replaces(f"{DRAFT}.told", EXPLORER)
def tells_decode_only(original: Function) -> Function:
    def told(self: Any, t: int, half: str, outcome: Any) -> None:
        before = self.known(t).cancel_p
        original(self, t, half, outcome)
        self.put(t, 2, self.known(t)._replace(cancel_p=before))

    return told


@replaces("hermetic.worker.build:check_bounds", WORKERS)
def bounds_unchecked(original: Function) -> Function:
    return lambda config, geometry: None


@replaces(f"{WORLD}._local", EXPLORER)
def overdue_under_way(original: Function) -> Function:
    """The deadline is shorter than a batch takes: it passes while a write is simply on its way."""

    def _local(self: Any, draft: Any, t: int, g: Any, busy: Any) -> Any:
        yield from original(self, draft, t, g, busy)
        if draft.d_state(t) == "DRAINING" and any(f.mode == "flying" for f in draft.flights(t)):
            yield ("overdue", t), lambda d: d.overdue(t)

    return _local
