"""Requests: tickets, attempts, what their halves say, and running them again when a worker is lost.

The gateway holds the prompt and every token streamed, so a choice whose worker is gone (or that gave its pages back) runs
again from prompt + tokens so far, as the next attempt on another pair, and its client's stream goes on. Sampling depends
on the seed and the output's index only, so it goes on with the same tokens.

The one thing to know: a request ends once. By its choices' ends, or by the first failure that is not made good by running
again; that failure is what the client sees, and it cancels both halves at once. What a half says about an attempt that
is over is counted and has no effect, but for its end: until both halves have said theirs (or a bound has passed) the
attempt stays known, because it still takes pages there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from typing import ParamSpec

import numpy as np

from hermetic.gateway.backend import Failed, Finish, Generate, Refused, Token
from hermetic.gateway.options import ClusterOptions
from hermetic.gateway.pairing import Halves, Need, choose, may_stand, standing, stands
from hermetic.gateway.remote import Remote
from hermetic.gateway.wire import Entropy
from hermetic.handoff import outcome as ended
from hermetic.handoff.messages import Key
from hermetic.worker import messages as m

log = logging.getLogger("hermetic.gateway")
P = ParamSpec("P")

END_SECONDS = (
    60.0  # within which the halves of an attempt that is over say so; then it is counted off without them
)
RERUN_WAIT = 0.25  # seconds before the first re-run on the very pair that failed; doubles
PAIR_WAIT = 5.0  # for a pair whose workers are both there to stand again, before a request is given up

# Outcome codes of workers -> HTTP status. What is not here is a 500.
_STATUS = {
    "context_length_exceeded": 400,
    "empty_prompt": 400,
    "invalid_token_id": 400,
    "invalid_request": 400,
    "no_pair": 503,
    "worker_lost": 503,
    "deadline_exceeded": 504,
}
# What says nothing about the request itself: it may go well on another pair, or on the same one a moment later.
RERUN = frozenset({"worker_lost", "transport_error", "no_pair"})
# A half lost sight of this gateway or of the attempt, and the other half heard of it sooner than we: a lost worker.
_FORGOTTEN = frozenset({"gateway_lost", "unknown_ticket"})
INTEGRITY = "kv_integrity"  # never run again: it must be seen


@dataclass(eq=False, repr=False)  # they name each other: a repr would be the whole cluster
class Attempt:
    """One attempt of some choices of a run, on one pair (or one unified worker)."""

    run: Run
    key: Key
    halves: Halves  # decode (or unified) first
    choices: set[int]  # that still get their tokens from here
    length: int  # tokens at its start
    outputs: int  # of them, those that an earlier attempt made
    holding: dict[Remote, None] = field(default_factory=dict)  # halves that have not said their end
    producing: bool = False  # a token came: decode has verified every page, and needs prefill no more
    dropped: bool = False  # cancelled, or not wanted any more
    expiry: asyncio.TimerHandle | None = None

    @property
    def tokens_so_far(self) -> int:
        made = sum(len(self.run.outputs[c]) - self.outputs for c in self.choices)
        return self.length + max(0, made)


@dataclass(eq=False, repr=False)  # they name each other: a repr would be the whole cluster
class Run:
    """One request from its first attempt to its end, and the stream that its client reads."""

    runs: Runs
    request: Generate
    ticket: bytes
    seed: int
    age: int
    salt: str
    outputs: dict[int, list[int]]  # tokens of each choice, over all attempts
    open: set[int]  # choices whose end the client has not read
    wanted: set[int]  # choices whose end is not known yet
    attempts: int = 0
    reruns: Counter[int] = field(default_factory=Counter)  # by choice
    failed: set[Halves] = field(default_factory=set)  # pairs that it failed on: others first
    live: dict[Key, Attempt] = field(default_factory=dict)
    queue: asyncio.Queue[Token | Finish | Refused | Failed] = field(default_factory=asyncio.Queue)
    over: bool = False
    integrity: bool = False  # it has been counted as an integrity failure
    timers: set[asyncio.TimerHandle] = field(default_factory=set)

    def __aiter__(self) -> AsyncIterator[Token | Finish]:
        return self._events()

    async def _events(self) -> AsyncIterator[Token | Finish]:
        while self.open or not self.queue.empty():
            event = await self.queue.get()
            if isinstance(event, Refused | Failed):
                raise event
            if isinstance(event, Finish):
                self.open.discard(event.index)
            yield event

    async def cancel(self, index: int) -> None:
        self.open.discard(index)
        self.runs.stop_choice(self, index)

    async def aclose(self) -> None:
        if not self.over:
            drain = self.runs.options.on_disconnect == "drain"
            self.runs.close(self, "client_gone", "the client left", drain)

    def fail(self, error: Refused | Failed) -> None:
        """End the run with its first cause; later ones say nothing new."""
        if not self.over:
            self.queue.put_nowait(error)
            self.runs.close(self, error.code, error.message)


class Runs:
    """All requests that are open. `remotes` is the members' own dict, looked at for every choice of a pair; `on_integrity`
    is called once for each request that met a page that was not its own; tickets and seeds come from `entropy`."""

    def __init__(
        self,
        options: ClusterOptions,
        remotes: dict[str, Remote],
        on_integrity: Callable[[], None],
        clock: Callable[[], float],
        entropy: Entropy,
    ) -> None:
        self.options, self._remotes, self._on_integrity = options, remotes, on_integrity
        self._clock, self._entropy = clock, entropy
        self._runs: dict[bytes, Run] = {}
        self._attempts: dict[Key, Attempt] = {}
        self._ages = 0
        self.stale = 0
        self.reruns = 0  # for whatever reason, preemption among them
        self.retries: Counter[str] = Counter()  # by the code of what was lost
        self.ends_missed = 0  # halves that did not say their end in time
        self.last_first_token = 0.0

    @property
    def open(self) -> int:
        return len(self._runs)

    def counts(self) -> dict[str, float]:
        """Figures for /metrics."""
        return {
            "requests_open": len(self._runs),
            "attempts_open": len(self._attempts),
            "reruns": self.reruns,
            "ends_missed": self.ends_missed,
            **{f"retries_{code}": float(self.retries[code]) for code in sorted(RERUN)},
        }

    # ------------------------------------------------------------------ begin and end

    def begin(self, request: Generate) -> Run:
        """Take a request that was admitted. Raises Refused when there is no place or no pair for it."""
        if len(self._runs) >= self.options.max_open:
            text = f"{self.options.max_open} requests are being served or waiting"
            raise Refused("overloaded", text, 429, retry_after=2)
        self._ages += 1
        given = request.params.seed
        seed = int.from_bytes(self._entropy(8)) >> 2 if given is None else given
        all_ = range(request.n)
        run = Run(
            self,
            request,
            self._entropy(16),
            seed,
            self._ages,
            "",
            {i: [] for i in all_},
            set(all_),
            set(all_),
        )
        self._attempt(run, request.n, 0, ())
        self._runs[run.ticket] = run
        text = f"the request did not end within {self.options.deadline:.0f} s"
        self._later(run, self.options.deadline, run.fail, Failed("deadline_exceeded", text, 504))
        return run

    def close(self, run: Run, code: str, reason: str, drain: bool = False) -> None:
        """Everything about a run ends here, once; its halves are told."""
        self._settle(run)
        for attempt in list(run.live.values()):
            self._drop(attempt, code, reason, drain)

    def stop_choice(self, run: Run, index: int) -> None:
        """A stop string was met: nothing more of this choice is wanted."""
        for attempt in list(run.live.values()):
            if index in attempt.choices:
                attempt.choices.discard(index)
                if attempt.choices:
                    attempt.halves[0].send(attempt.key, m.Cancel("stopped", "a stop string was met", index))
                else:
                    self._drop(attempt, "stopped", "a stop string was met")
        self._choice_over(run, index)

    def close_all(self, error: Failed) -> None:
        for run in list(self._runs.values()):
            run.fail(error)

    def _settle(self, run: Run) -> None:
        """Nothing more is to come; what is left of its attempts ends by itself, or by the bound."""
        run.over = True
        run.wanted.clear()
        for timer in run.timers:
            timer.cancel()
        run.timers.clear()
        self._runs.pop(run.ticket, None)
        for attempt in run.live.values():
            self._expire(attempt)

    def _choice_over(self, run: Run, choice: int) -> None:
        run.wanted.discard(choice)
        if not run.wanted and not run.over:
            self._settle(run)

    def _later(
        self, run: Run, seconds: float, what: Callable[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """A timer that ends with the run."""

        def fire() -> None:
            run.timers.discard(handle)
            what(*args, **kwargs)

        handle = asyncio.get_running_loop().call_later(seconds, fire)
        run.timers.add(handle)

    # ------------------------------------------------------------------------ attempts

    def _attempt(
        self, run: Run, n: int, choice: int, outputs: Collection[int], former: Halves | None = None
    ) -> None:
        """Give both halves the next attempt of `n` choices from `choice` on. Raises Refused when there is no pair.

        `former` is where the last one failed: it is taken if there is no other, also if it takes nothing new."""
        request = run.request
        need = Need(len(request.tokens) + request.params.max_tokens, n)
        avoid = run.failed if former is None else run.failed | {former}
        halves = choose(self._remotes.values(), need, avoid)
        if halves is None and former is not None and stands(former):
            halves = former
        if halves is None:
            raise Refused("no_workers", "no worker can serve this request now", 503, retry_after=5)
        run.attempts += 1
        key = Key(run.ticket, run.attempts)
        length = len(request.tokens) + len(outputs)
        attempt = Attempt(
            run, key, halves, set(range(choice, choice + n)), length, len(outputs), dict.fromkeys(halves)
        )
        self._attempts[key] = run.live[key] = attempt
        tokens = np.array([*request.tokens, *outputs], "<i4").tobytes()
        names = [half.info.worker for half in halves]
        for remote in halves:
            remote.attempts[attempt] = None
            peer = next((name for name in names if name != remote.info.worker), "")
            submit = m.Submit(
                tokens, len(request.tokens), request.params, n, choice, run.seed, request.scope, run.salt, run.age, peer
            )  # fmt: skip
            remote.send(key, submit)

    def _drop(self, attempt: Attempt, code: str, reason: str, drain: bool = False) -> None:
        """Cancel the halves that have not ended. They stay accounted for until they say so."""
        if attempt.dropped:
            return
        attempt.dropped = True
        attempt.choices.clear()
        for remote in attempt.holding:
            remote.send(
                attempt.key, m.Cancel(code, reason, drain=drain)
            )  # a frozen one reads it when it goes on
        self._expire(attempt)
        self._forget_if_ended(attempt)

    def _expire(self, attempt: Attempt) -> None:
        if attempt.expiry is None:
            loop = asyncio.get_running_loop()
            attempt.expiry = loop.call_later(END_SECONDS, self._give_up, attempt)

    def _give_up(self, attempt: Attempt) -> None:
        self.ends_missed += len(attempt.holding)
        for remote in attempt.holding:
            remote.attempts.pop(attempt, None)
            log.warning(
                "%s did not say the end of %s within %.0f s", remote.info.worker, attempt.key, END_SECONDS
            )
        attempt.holding.clear()
        self._forget_if_ended(attempt)

    def _forget_if_ended(self, attempt: Attempt) -> None:
        if attempt.holding:
            return
        self._attempts.pop(attempt.key, None)
        attempt.run.live.pop(attempt.key, None)
        if attempt.expiry is not None:
            attempt.expiry.cancel()

    # ------------------------------------------------------------------------ run again

    def lost(self, remote: Remote, why: str, forgotten: bool) -> None:
        """A worker serves no more. What ran on it runs again elsewhere; `forgotten`: it does nothing for it any more."""
        cause = Failed(
            "worker_lost",
            f"worker {remote.info.worker} {why} while it served this request",
            503,
            retry_after=5,
        )
        for attempt in list(remote.attempts):
            if forgotten:
                attempt.holding.pop(remote, None)
                remote.attempts.pop(attempt, None)
            if attempt.dropped or not self._needs(attempt, remote):
                self._forget_if_ended(attempt)
            else:
                self._again(attempt, cause)

    def _needs(self, attempt: Attempt, remote: Remote) -> bool:
        """Whether this half still has something to do for the attempt's answer."""
        return bool(attempt.choices) and (remote is attempt.halves[0] or not attempt.producing)

    def _again(self, attempt: Attempt, cause: Refused | Failed) -> None:
        """Drop this attempt and run its choices again, on another pair if there is one, or fail."""
        run, halves = attempt.run, attempt.halves
        choices = sorted(attempt.choices & run.wanted)
        self._drop(attempt, cause.code, cause.message)
        for choice in list(choices):
            if (finish := _complete_already(attempt, choice)) is not None:
                choices.remove(choice)
                run.queue.put_nowait(finish)
                self._choice_over(run, choice)
        if not choices or run.over:
            return
        tries = 1 + max(run.reruns[choice] for choice in choices)
        if tries > self.options.max_reruns:
            run.fail(_after(cause, f"it was run again {self.options.max_reruns} times"))
            return
        for choice in choices:
            run.reruns[choice] += 1
        self.retries[cause.code] += 1
        # Pairs that just failed get a moment; one that did not fail does not need it. All of them are kept in mind: a
        # worker that comes back may refuse with both of its peers, faster than it pairs with either.
        run.failed.add(halves)
        there = standing(self._remotes.values())
        if there and run.failed.issuperset(there):
            self._later(run, RERUN_WAIT * 2 ** (tries - 1), self._rerun, run, choices, cause, halves)
        else:
            self._rerun(run, choices, cause, halves)

    def _rerun(
        self, run: Run, choices: list[int], cause: Refused | Failed, former: Halves, waited: float = 0.0
    ) -> None:
        choices = [choice for choice in choices if choice in run.wanted]
        whole = len(choices) == run.request.n and not any(run.outputs[choice] for choice in choices)
        parts = [(0, len(choices))] if whole and choices else [(choice, 1) for choice in choices]
        for at, (choice, n) in enumerate(parts):
            try:
                self._attempt(run, n, choice, run.outputs[choice], former)
            except Refused:
                left = choices if whole else choices[at:]
                if waited < PAIR_WAIT and may_stand(self._remotes.values()):
                    self._later(run, RERUN_WAIT, self._rerun, run, left, cause, former, waited + RERUN_WAIT)
                else:
                    lost = Failed("worker_lost", cause.message, 503, retry_after=5)
                    run.fail(_after(lost, "no other worker can go on with it"))
                return
            self.reruns += 1

    # ------------------------------------------------------------------------ messages

    def handle(self, remote: Remote, key: Key | None, body: m.Body) -> None:
        """What a member says about requests."""
        match body:
            case m.Tokens(tokens=tokens):
                for item in tokens:
                    self._token(remote, item)
            case m.ChoiceDone() | m.Preempted() | m.Ended() if key is not None:
                attempt = self._attempts.get(key)
                if attempt is None or remote not in attempt.holding:
                    self.stale += 1
                elif isinstance(body, m.Ended):
                    self._ended(attempt, remote, body.outcome)
                elif attempt.dropped or remote is not attempt.halves[0] or body.choice not in attempt.choices:
                    self.stale += 1
                elif isinstance(body, m.ChoiceDone):
                    attempt.choices.discard(body.choice)
                    attempt.run.queue.put_nowait(Finish(body.choice, body.reason, body.stop_token))
                    self._choice_over(attempt.run, body.choice)
                else:
                    self._preempted(attempt, body.choice)
            case _:
                self.stale += 1

    def _token(self, remote: Remote, item: m.TokenOut) -> None:
        attempt = self._attempts.get(item.key)
        if attempt is None or attempt.halves[0] is not remote or item.choice not in attempt.choices:
            self.stale += 1
            return
        attempt.producing = True
        outputs = attempt.run.outputs[item.choice]
        if not outputs:
            self.last_first_token = self._clock()  # all of the way, prefill included, was gone
        outputs.append(item.token)
        attempt.run.queue.put_nowait(Token(item.choice, item.token, item.logprob, item.top))

    def _preempted(self, attempt: Attempt, choice: int) -> None:
        attempt.choices.discard(choice)
        run = attempt.run
        text = f"{attempt.halves[0].info.worker} had no pages left for this request"
        self._rerun(run, [choice], Failed("worker_lost", text, 503, retry_after=5), attempt.halves)

    def _ended(self, attempt: Attempt, remote: Remote, outcome: ended.Outcome) -> None:
        """One half has said its end."""
        run = attempt.run
        attempt.holding.pop(remote, None)
        remote.attempts.pop(attempt, None)
        if isinstance(outcome, ended.Failed) and outcome.code == INTEGRITY and not run.integrity:
            run.integrity = True
            self._on_integrity()
        if attempt.choices and not isinstance(outcome, ended.Completed):
            error = _error(outcome)
            if error.code not in RERUN:
                run.fail(error)
            elif self._needs(attempt, remote):
                self._again(attempt, error)
        elif attempt.choices and remote is attempt.halves[0]:
            run.fail(Failed("internal_error", f"{remote.info.worker} ended a request without its answer"))
        elif remote is attempt.halves[0]:
            self._expire(attempt)  # the other half has nothing to do any more
        self._forget_if_ended(attempt)


def _error(outcome: ended.Refused | ended.Failed | ended.Aborted) -> Refused | Failed:
    code = "worker_lost" if outcome.code in _FORGOTTEN else outcome.code
    status = _STATUS.get(code, 500)
    retry = 5.0 if status == 503 else None
    if isinstance(outcome, ended.Refused):
        return Refused(code, outcome.reason, status, retry_after=retry)
    return Failed(code, outcome.reason, status, retry_after=retry)


def _after(cause: Refused | Failed, what: str) -> Refused | Failed:
    """The same cause, with what was done about it."""
    text = f"{cause.message}; {what}"
    if isinstance(cause, Refused):
        return Refused(cause.code, text, cause.status, cause.param, cause.retry_after)
    return Failed(cause.code, text, cause.status, cause.retry_after)


def _complete_already(attempt: Attempt, choice: int) -> Finish | None:
    """The end of a choice whose last token came and whose end did not: nothing may be made after it."""
    outputs, params = attempt.run.outputs[choice], attempt.run.request.params
    if not outputs:
        return None
    eos = () if params.ignore_eos else attempt.halves[0].info.eos
    if outputs[-1] in params.stop_token_ids or outputs[-1] in eos:
        return Finish(choice, "stop", outputs[-1])
    return Finish(choice, "length", None) if len(outputs) >= params.max_tokens else None
