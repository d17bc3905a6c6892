"""The real backend: tickets, attempts, both halves of every request, over the workers' control channels.

The gateway mints the ticket, gives both halves the same tokens, scope and parameters, and holds the prompt and every
token streamed, so a choice that gave its pages back runs again as the next attempt without its client noticing.
A request ends once: by its choices' ends, or by the first failure that either half reports, which then cancels the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field

import numpy as np
import zmq
import zmq.asyncio

from hermetic.gateway.backend import Capacity, Failed, Finish, Generate, Refused, Token
from hermetic.handoff import outcome as ended
from hermetic.handoff.messages import Key
from hermetic.model.params import SamplingParams
from hermetic.worker import messages as m
from hermetic.worker import wire

log = logging.getLogger("hermetic.gateway")

MAX_OPEN = 512  # requests being served or waiting at once; one more gets 429
DEADLINE = 1800.0  # seconds from taking a request to its end
PROBE_SECONDS = 10.0  # within which /ready wants one token
STATS_SECONDS = 2.0
BEAT_SECONDS = 5.0  # between two questions to every worker whether it is there
SILENT_SECONDS = (
    30.0  # without an answer after which a worker is taken for frozen: the longest step fits several times
)
_FRESH = 2.0  # seconds for which a first token that came is proof enough that work moves

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


@dataclass(eq=False)
class Remote:
    """One worker as the gateway sees it."""

    info: m.WorkerInfo
    address: str
    socket: zmq.asyncio.Socket
    outgoing: wire.Outgoing
    incoming: wire.Incoming = field(default_factory=wire.Incoming)
    alive: bool = True  # its process runs and it answers; a frozen one that answers again is alive again
    ended: bool = False  # its process is gone for good
    paired: set[str] = field(default_factory=set)  # prefill: decode workers it can send to
    open: int = 0  # attempts on it

    def send(self, key: Key | None, body: m.Body) -> None:
        """Queue a message; order is kept. A full queue of a worker that reads nothing loses it, as its death would."""
        try:
            self.socket.send(self.outgoing.wrap(key, body), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("cannot send to %s: %s", self.info.worker, error)


@dataclass(eq=False)
class Attempt:
    """One attempt of some choices of a run, on one pair (or one unified worker)."""

    run: Run
    key: Key
    halves: tuple[Remote, ...]  # decode (or unified) first
    choices: set[int]


@dataclass(eq=False)
class Run:
    """One request from its first attempt to its end, and the stream that its client reads."""

    cluster: Cluster
    request: Generate
    ticket: bytes
    seed: int
    age: int
    salt: str
    attempts: int = 0
    outputs: dict[int, list[int]] = field(default_factory=dict)  # tokens of each choice, over all attempts
    open: set[int] = field(default_factory=set)  # choices that have not ended
    live: dict[Key, Attempt] = field(default_factory=dict)
    queue: asyncio.Queue[Token | Finish | Refused | Failed] = field(default_factory=asyncio.Queue)
    over: bool = False
    timer: asyncio.TimerHandle | None = None

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
        for attempt in list(self.live.values()):
            if index in attempt.choices:
                attempt.choices.discard(index)
                if attempt.choices:
                    attempt.halves[0].send(attempt.key, m.Cancel("stopped", "a stop string was met", index))
                else:
                    self.cluster.drop(attempt, "stopped", "a stop string was met")
        if not self.open:
            self.cluster.served(self)

    async def aclose(self) -> None:
        self.cluster.close(self, "client_gone", "the client left")

    def fail(self, error: Refused | Failed) -> None:
        """End the run with its first cause; later ones say nothing new."""
        if not self.over:
            self.queue.put_nowait(error)
            self.cluster.close(self, error.code, error.message)


class Cluster:
    """All workers and all runs. Implements `backend.Backend`."""

    def __init__(self, model: str, keys: wire.CurveKeys) -> None:
        self.model, self._keys = model, keys
        self._context = zmq.asyncio.Context()
        self._incarnation = wire.new_incarnation()
        self._remotes: dict[str, Remote] = {}
        self._runs: dict[bytes, Run] = {}
        self._attempts: dict[Key, Attempt] = {}
        self._ages = 0
        self._stats: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._stats_number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._paired = asyncio.Event()
        self._last_first_token = 0.0
        self._probing: asyncio.Task[str | None] | None = None
        self.stale = 0
        self.reruns = 0
        self._max_len = 0

    # -------------------------------------------------------------------- workers

    async def join(self, info: m.WorkerInfo, address: str) -> Remote:
        """Connect to a worker that is ready."""
        socket = self._context.socket(zmq.DEALER)
        wire.dial(socket, self._keys, address)
        remote = Remote(info, address, socket, wire.Outgoing(self._incarnation))
        self._remotes[info.worker] = remote
        self._spawn(self._read(remote))
        remote.send(None, m.Hello("gateway", None))
        self._spawn(self._listen_for_life(remote))
        return remote

    async def pair(self, timeout: float = 30.0) -> None:
        """Have every prefill worker pair with every decode worker; derive the advertised context.

        Raises Failed when a pair does not stand within `timeout` seconds."""
        decodes = [r for r in self._remotes.values() if r.info.role == "decode"]
        prefills = [r for r in self._remotes.values() if r.info.role == "prefill"]
        for prefill in prefills:
            for decode in decodes:
                prefill.send(None, m.Connect(decode.address, decode.info.worker))
        try:
            async with asyncio.timeout(timeout):
                while any(len(p.paired) < len(decodes) for p in prefills):
                    self._paired.clear()
                    await self._paired.wait()
        except TimeoutError:
            raise Failed("no_pair", f"prefill and decode did not pair within {timeout:.0f} s") from None
        # Derived from what was measured, so that everything advertised can be placed on every pair.
        self._max_len = min(r.info.max_tokens for r in self._remotes.values())

    def lost(self, worker: str) -> None:
        """A worker's process has ended: what ran on it ends now."""
        remote = self._remotes.get(worker)
        if remote is None or remote.ended:
            return
        remote.ended = True
        self._leave_out(remote, "ended")

    def _leave_out(self, remote: Remote, why: str) -> None:
        """Nothing new goes to this worker, and what waits for it ends now."""
        if not remote.alive:
            return
        remote.alive = False
        log.error("worker %s %s", remote.info.worker, why)
        for attempt in [a for a in self._attempts.values() if remote in a.halves]:
            text = f"worker {remote.info.worker} {why} while it served this request"
            attempt.run.fail(Failed("worker_lost", text, 503, retry_after=5))

    async def _listen_for_life(self, remote: Remote) -> None:
        """Notice a worker whose process is there and does nothing (stopped, swapped out), and that it is back."""
        while not remote.ended:
            await asyncio.sleep(BEAT_SECONDS)
            if await self._ask(remote, SILENT_SECONDS) is None:
                self._leave_out(remote, f"has not answered for {SILENT_SECONDS:.0f} s")
            elif not remote.alive and not remote.ended:
                log.warning("worker %s answers again", remote.info.worker)
                remote.alive = True

    async def shut_down(self) -> None:
        """Close sockets and end tasks."""
        for run in list(self._runs.values()):
            run.fail(Failed("shutting_down", "the server is shutting down", 503, retry_after=5))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    # -------------------------------------------------------------------- Backend

    def capacity(self) -> Capacity:
        infos = [r.info for r in self._remotes.values()]
        first = infos[0]
        return Capacity(
            model=self.model,
            max_model_len=self._max_len,
            window=first.window,
            page_size=first.page_size,
            pools={i.worker: i.pages * i.page_size for i in infos},
            details={
                "mode": "unified" if first.role == "unified" else "disaggregated",
                "fingerprint": first.model,
                "numeric": first.numeric,
                "verify": first.verify,
                "page_bytes": first.geometry.stride,
                "kv_bytes_per_token": first.geometry.token_bytes,
            },
        )

    def admit(self, prompt_tokens: int, max_tokens: int, n: int = 1) -> None:
        if prompt_tokens + max_tokens > self._max_len:
            raise Refused(
                "context_length_exceeded",
                f"this server's context is {self._max_len} tokens; the prompt has {prompt_tokens} tokens and up to "
                f"{max_tokens} are asked for the answer, {prompt_tokens + max_tokens} together. Shorten the prompt or lower max_tokens.",
                param="messages",
            )
        batch = min(r.info.max_batch for r in self._remotes.values())
        if n > batch:
            raise Refused(
                "invalid_request",
                f"n is {n}; this server runs at most {batch} choices of one request",
                param="n",
            )

    async def generate(self, request: Generate) -> Run:
        self.admit(len(request.tokens), request.params.max_tokens, request.n)
        if len(self._runs) >= MAX_OPEN:
            raise Refused(
                "overloaded", f"{MAX_OPEN} requests are being served or waiting", 429, retry_after=2
            )
        self._ages += 1
        seed = request.params.seed
        run = Run(
            self, request, os.urandom(16), secrets.randbits(62) if seed is None else seed, self._ages, salt=""
        )
        run.open = set(range(request.n))
        run.outputs = {i: [] for i in run.open}
        self._attempt(run, request.n, 0, ())
        self._runs[run.ticket] = run
        late = Failed("deadline_exceeded", f"the request did not end within {DEADLINE:.0f} s", 504)
        run.timer = asyncio.get_running_loop().call_later(DEADLINE, run.fail, late)
        return run

    async def ready(self) -> str | None:
        if gone := [w for w, r in self._remotes.items() if not r.alive]:
            return f"worker {', '.join(gone)} is gone or does not answer"
        if time.monotonic() - self._last_first_token < _FRESH:
            return None
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> str | None:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        run: Run | None = None
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                run = await self.generate(Generate((0,), params, tenant="", scope="hermetic:probe"))
                async for _ in run:
                    pass
            return None
        except TimeoutError:
            return f"a probe request got no token within {PROBE_SECONDS:.0f} s"
        except (Refused, Failed) as error:
            return f"a probe request ended with {error.code}: {error.message}"
        finally:
            if run is not None:
                await run.aclose()

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        alive = [r for r in self._remotes.values() if r.alive]
        answers = await asyncio.gather(*(self._ask(r) for r in alive))
        found: dict[str, Mapping[str, float]] = {
            r.info.worker: a for r, a in zip(alive, answers, strict=True) if a is not None
        }
        found["gateway"] = {
            "requests_open": len(self._runs),
            "attempts_open": len(self._attempts),
            "reruns": self.reruns,
            "messages_stale": self.stale,
            "workers_alive": len(alive),
        }
        return found

    async def _ask(self, remote: Remote, seconds: float = STATS_SECONDS) -> dict[str, float] | None:
        self._stats_number += 1
        number = self._stats_number
        future: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        self._stats[number] = future
        remote.send(None, m.AskStats(number))
        try:
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            return None
        finally:
            del self._stats[number]

    # ------------------------------------------------------------------- attempts

    def _attempt(self, run: Run, n: int, choice: int, outputs: tuple[int, ...]) -> None:
        """Give both halves the next attempt of `n` choices from `choice` on. Raises Refused when no pair is alive."""
        halves = self._choose()
        run.attempts += 1
        key = Key(run.ticket, run.attempts)
        request = run.request
        tokens = np.array([*request.tokens, *outputs], "<i4").tobytes()
        attempt = Attempt(run, key, halves, set(range(choice, choice + n)))
        self._attempts[key] = run.live[key] = attempt
        names = [r.info.worker for r in halves]
        for remote in halves:
            remote.open += 1
            peer = next((name for name in names if name != remote.info.worker), "")
            remote.send(
                key,
                m.Submit(
                    tokens,
                    len(request.tokens),
                    request.params,
                    n,
                    choice,
                    run.seed,
                    request.scope,
                    run.salt,
                    run.age,
                    peer,
                ),
            )

    def _choose(self) -> tuple[Remote, ...]:
        alive = [r for r in self._remotes.values() if r.alive]
        unified = [(r,) for r in alive if r.info.role == "unified"]
        pairs = [
            (d, p)
            for p in alive
            for d in alive
            if p.info.role == "prefill" and d.info.role == "decode" and d.info.worker in p.paired
        ]
        if not unified and not pairs:
            raise Refused("no_workers", "no worker can serve this request now", 503, retry_after=5)
        return min([*unified, *pairs], key=lambda halves: sum(r.open for r in halves))

    def drop(self, attempt: Attempt, code: str, reason: str) -> None:
        """Cancel both halves of an attempt and forget it; what they still say about it is stale."""
        self._forget(attempt)
        for remote in attempt.halves:
            if not remote.ended:  # a frozen worker reads it when it goes on
                remote.send(attempt.key, m.Cancel(code, reason))

    def _forget(self, attempt: Attempt) -> None:
        if self._attempts.pop(attempt.key, None) is not None:
            attempt.run.live.pop(attempt.key, None)
            for remote in attempt.halves:
                remote.open -= 1

    def close(self, run: Run, code: str, reason: str) -> None:
        """Everything about a run ends here, once."""
        run.over = True
        if run.timer is not None:
            run.timer.cancel()
        self._runs.pop(run.ticket, None)
        for attempt in list(run.live.values()):
            self.drop(attempt, code, reason)

    # -------------------------------------------------------------------- reading

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, remote: Remote) -> None:
        while True:
            raw = await remote.socket.recv()
            try:
                envelope = m.decode(raw)
            except m.ProtocolError as error:
                log.warning("a message of %s was rejected: %s", remote.info.worker, error)
                continue
            if envelope.incarnation != remote.info.incarnation or not remote.incoming.accept(envelope):
                self.stale += 1
                continue
            self._handle(remote, envelope.key, envelope.body)

    def _handle(self, remote: Remote, key: Key | None, body: m.Body) -> None:
        match body:
            case m.Tokens(tokens=tokens):
                for item in tokens:
                    self._token(remote, item)
            case m.Stats(number=number, values=values):
                future = self._stats.get(number)
                if future is not None and not future.done():
                    future.set_result(values)
            case m.Paired(worker=worker, error=error):
                if error:
                    log.error("%s and %s cannot be a pair: %s", remote.info.worker, worker, error)
                else:
                    remote.paired.add(worker)
                self._paired.set()
            case m.ChoiceDone() | m.Preempted() | m.Ended() if key is not None:
                attempt = self._attempts.get(key)
                if attempt is None or remote not in attempt.halves:
                    self.stale += not (isinstance(body, m.Ended))
                    return
                self._progress(attempt, remote, body)
            case m.Welcome():
                pass
            case _:
                self.stale += 1

    def _token(self, remote: Remote, item: m.TokenOut) -> None:
        attempt = self._attempts.get(item.key)
        if attempt is None or attempt.halves[0] is not remote or item.choice not in attempt.choices:
            self.stale += 1
            return
        if not attempt.run.outputs[item.choice]:
            self._last_first_token = time.monotonic()  # all of the way, prefill included, was gone
        attempt.run.outputs[item.choice].append(item.token)
        attempt.run.queue.put_nowait(Token(item.choice, item.token, item.logprob, item.top))

    def _progress(self, attempt: Attempt, remote: Remote, body: m.ChoiceDone | m.Preempted | m.Ended) -> None:
        run = attempt.run
        match body:
            case m.ChoiceDone(choice=choice, reason=reason, stop_token=stop):
                if choice in attempt.choices:
                    attempt.choices.discard(choice)
                    run.queue.put_nowait(Finish(choice, reason, stop))
                    self._end_if_served(run)
            case m.Preempted(choice=choice):
                if choice in attempt.choices:
                    attempt.choices.discard(choice)
                    self.reruns += 1
                    try:
                        self._attempt(run, 1, choice, tuple(run.outputs[choice]))
                    except Refused as error:
                        run.fail(error)
            case m.Ended(outcome=ended.Completed()):
                if remote is attempt.halves[0]:
                    self._forget(attempt)
                    if attempt.choices:
                        run.fail(
                            Failed(
                                "internal_error", f"{remote.info.worker} ended a request without its answer"
                            )
                        )
            case m.Ended(outcome=outcome):
                run.fail(_error(outcome))

    def _end_if_served(self, run: Run) -> None:
        """Forget a run whose every choice has its end in the queue."""
        if not any(a.choices for a in run.live.values()):
            self.served(run)

    def served(self, run: Run) -> None:
        """Every choice has had its end; what is left of its attempts ends by itself."""
        run.over = True
        if run.timer is not None:
            run.timer.cancel()
        self._runs.pop(run.ticket, None)


def _error(outcome: ended.Outcome) -> Refused | Failed:
    assert not isinstance(outcome, ended.Completed)
    status = _STATUS.get(outcome.code, 500)
    retry = 5.0 if status == 503 else None
    if isinstance(outcome, ended.Refused):
        return Refused(outcome.code, outcome.reason, status, retry_after=retry)
    return Failed(outcome.code, outcome.reason, status, retry_after=retry)
