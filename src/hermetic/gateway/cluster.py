"""The real backend: what the HTTP side asks for, answered by the members, the runs and the switch.

    members.py   workers: registration, sessions, signs of life, loss
    runs.py      requests: attempts on pairs of workers, run again when a worker is lost
    pairing.py   who fits beside whom, and which pair gets the next attempt
    window.py    the advertised context
    switch.py    disabled or not

The one thing to know: nothing here waits for a worker to begin. A gateway without workers runs, says so, and serves as
soon as a pair stands.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping

import hermetic
from hermetic.gateway.backend import Capacity, Failed, Generate, Refused
from hermetic.gateway.errors import refuse
from hermetic.gateway.members import Members
from hermetic.gateway.options import ClusterOptions
from hermetic.gateway.pairing import standing
from hermetic.gateway.remote import Remote
from hermetic.gateway.runs import Run, Runs
from hermetic.gateway.switch import Switch
from hermetic.gateway.wire import Entropy, GatewayWire
from hermetic.gateway.zmq_wire import ZmqWire
from hermetic.handoff.messages import Key
from hermetic.model.params import SamplingParams
from hermetic.worker import messages as m
from hermetic.worker.wire import CurveKeys

PROBE_SECONDS = 10.0  # within which /ready wants one token
STATS_SECONDS = 2.0
_FRESH = 2.0  # seconds for which a first token that came is proof enough that work moves
_POLL = 0.02
GOODBYE_SECONDS = (
    0.05  # for cancellations to leave before the sockets close; workers that miss them notice the silence
)


class Cluster:
    """All workers and all requests. Implements `backend.Backend`. Raises OptionError for a state file that is damaged.

    `wire` carries bytes (ZeroMQ with `keys`, if none is given), `clock` is monotonic, in seconds, and should be the event
    loop's; `entropy` gives incarnation, tickets and seeds. The last three are for the simulator: from them, the event loop
    and what is asked follows everything that this object does."""

    def __init__(
        self,
        model: str,
        keys: CurveKeys,
        options: ClusterOptions | None = None,
        wire: GatewayWire | None = None,
        clock: Callable[[], float] = time.monotonic,
        entropy: Entropy = os.urandom,
    ) -> None:
        self.model, self.options, self._clock = model, options or ClusterOptions(), clock
        self.switch = Switch(self.options, clock)
        self.members = Members(wire or ZmqWire(keys), self.options, clock, entropy, self._handle, self._lost)
        self.runs = Runs(self.options, self.members.remotes, self.switch.integrity_failure, clock, entropy)
        self._stats: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._stats_number = 0
        self._probing: asyncio.Task[str | None] | None = None

    # ---------------------------------------------------------------------- life

    async def listen(self, host: str, port: int = 0) -> str:
        """Open the control port at which workers register; returns its address, tcp://HOST:PORT. Raises zmq.ZMQError."""
        return await self.members.listen(host, port)

    async def wait_ready(self, timeout: float, workers: int = 1) -> None:
        """Return when so many workers are ready and work can go somewhere; each prefill worker with each decode worker.

        Raises Failed when one of them may not join, or `timeout` seconds have passed; the message says what is missing."""
        deadline = self._clock() + timeout
        while not self._all_stand(workers):
            if self.members.refused:
                refused = next(iter(self.members.refused.values()))
                raise Failed("no_pair", f"worker {refused.info.worker} may not join: {refused.reason}")
            if self._clock() > deadline:
                ready = [r.info.worker for r in self.members.remotes.values() if r.usable]
                why = self.members.why_none() or "not every prefill worker reaches every decode worker"
                text = f"{len(ready)} of {workers} workers were ready within {timeout:.0f} s: {why}"
                raise Failed("no_pair", text)
            await asyncio.sleep(_POLL)

    def _all_stand(self, workers: int) -> bool:
        usable = [r for r in self.members.remotes.values() if r.usable]
        decodes = [r for r in usable if r.info.role == "decode"]
        prefills = [r for r in usable if r.info.role == "prefill"]
        return (
            len(usable) >= workers
            and bool(standing(usable))
            and all(p.paired_with(d) for p in prefills for d in decodes)
        )

    def lost(self, worker: str, incarnation: bytes) -> None:
        """The process of this incarnation has ended, says its supervisor: out for good."""
        remote = self.members.remotes.get(worker)
        if remote is not None and remote.info.incarnation == incarnation:
            self.members.end(remote, "has ended")

    async def shut_down(self) -> None:
        """End every request and close every socket."""
        if self.runs.open:
            self.runs.close_all(Failed("shutting_down", "the server is shutting down", 503, retry_after=5))
            await asyncio.sleep(GOODBYE_SECONDS)
        await self.members.close()

    def _handle(self, remote: Remote, key: Key | None, body: m.Body) -> None:
        match body:
            case m.Stats(number=number, values=values):
                future = self._stats.get(number)
                if future is not None and not future.done():
                    future.set_result(values)
            case _:
                self.runs.handle(remote, key, body)

    def _lost(self, remote: Remote, why: str, forgotten: bool) -> None:
        self.runs.lost(remote, why, forgotten)

    # ------------------------------------------------------------------- Backend

    def capacity(self) -> Capacity:
        info, window = self.members.last, self.members.window
        if info is None:
            return Capacity(self.model, 0, 0, 1)
        here = [r.info for r in self.members.remotes.values() if not r.ended]
        return Capacity(
            model=self.model,
            max_model_len=window.tokens,
            window=info.window,
            page_size=info.page_size,
            pools={i.worker: i.pages * i.page_size for i in here},
            details={
                "mode": "unified" if info.role == "unified" else "disaggregated",
                "fingerprint": info.model,
                "numeric": info.numeric,
                "verify": info.verify,
                "page_bytes": info.geometry.stride,
                "kv_bytes_per_token": info.geometry.token_bytes,
            },
        )

    def accepting(self) -> None:
        self.switch.check()
        if not self.members.window.tokens:
            why = self.members.why_none() or "no pair of workers has stood yet"
            raise Refused("no_workers", f"no request can be served yet: {why}", 503, retry_after=5)

    def disabled(self) -> str | None:
        return None if self.switch.disabled is None else self.switch.disabled.reason

    def admit(self, prompt_tokens: int, max_tokens: int, n: int = 1) -> None:
        advertised = self.members.window.tokens
        if not advertised:
            self.accepting()
        if prompt_tokens + max_tokens > advertised:
            raise Refused(
                "context_length_exceeded",
                f"this server's context is {advertised} tokens; the prompt has {prompt_tokens} tokens and up to "
                f"{max_tokens} are asked for the answer, {prompt_tokens + max_tokens} together. Shorten the prompt or lower max_tokens.",
                param="messages",
            )
        batch = min((r.info.max_batch for r in self.members.remotes.values() if not r.ended), default=n)
        if n > batch:
            raise Refused(
                "invalid_request",
                f"n is {n}; this server runs at most {batch} choices of one request",
                param="n",
            )

    async def generate(self, request: Generate) -> Run:
        self.accepting()
        self.admit(len(request.tokens), request.params.max_tokens, request.n)
        return self.runs.begin(request)

    async def ready(self) -> str | None:
        if (reason := self.members.why_none()) is not None:
            return reason
        if self._clock() - self.runs.last_first_token < _FRESH:
            return None
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> str | None:
        """One token, also while the model is disabled: the question is whether the workers work."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        run: Run | None = None
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                run = self.runs.begin(Generate((0,), params, tenant="", scope="hermetic:probe"))
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
        found: dict[str, Mapping[str, float]] = dict(await self._worker_stats())
        mine = self.members.counts() | self.runs.counts() | self.switch.counts()
        mine["messages_stale"] += self.runs.stale
        found["gateway"] = mine
        return found

    async def _worker_stats(self) -> dict[str, dict[str, float]]:
        """Of every worker that answers in time."""
        there = [r for r in self.members.remotes.values() if r.reachable and r.welcomed and not r.ended]
        answers = await asyncio.gather(*(self._ask(r) for r in there))
        return {r.info.worker: a for r, a in zip(there, answers, strict=True) if a is not None}

    async def _ask(self, remote: Remote) -> dict[str, float] | None:
        self._stats_number += 1
        number = self._stats_number
        future: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        self._stats[number] = future
        remote.send(None, m.AskStats(number))
        try:
            return await asyncio.wait_for(future, STATS_SECONDS)
        except TimeoutError:
            return None
        finally:
            del self._stats[number]

    # ---------------------------------------------------------------- operations

    async def status(self) -> dict[str, object]:
        """Everything an operator asks for, as JSON can hold it."""
        figures = await self._worker_stats()
        now = self._clock()
        workers = [
            _shown(
                r.info, r.state, r.reason or ("an operator drained it" if r.draining and not r.ended else "")
            )
            | {
                "pages": _states(
                    figures.get(name, {}), "pages_", ("free", "leased", "sending", "quarantined")
                ),
                "slots": _states(figures.get(name, {}), "slots_", ("free", "granted", "quarantined")),
                "open": len(r.attempts),
                "heard_seconds_ago": round(now - r.heard, 1),
                "paired": sorted(self._paired(r)),
            }
            for name, r in sorted(self.members.remotes.items())
        ]
        workers += [
            _shown(r.info, "refused", r.reason)
            | {"pages": {}, "slots": {}, "open": 0, "heard_seconds_ago": round(now - r.seen, 1), "paired": []}
            for _, r in sorted(self.members.refused.items())
        ]
        disabled, window = self.switch.disabled, self.members.window
        return {
            "gateway": {
                "model": self.model,
                "version": hermetic.__version__,
                "incarnation": self.members.incarnation.hex(),
                "context_advertised": window.tokens,
                "context_cap": window.cap,
                "disabled": None
                if disabled is None
                else {"reason": disabled.reason, "by": disabled.by, "at": disabled.at},
                "requests_open": self.runs.open,
            },
            "workers": workers,
        }

    def _paired(self, remote: Remote) -> list[str]:
        others = [r for r in self.members.remotes.values() if not r.ended]
        if remote.ended:
            return []
        if remote.info.role == "prefill":
            return [r.info.worker for r in others if r.info.role == "decode" and remote.paired_with(r)]
        return [r.info.worker for r in others if r.info.role == "prefill" and r.paired_with(remote)]

    def drain(self, worker: str) -> str:
        """Give this worker nothing new; returns its state. Raises Refused(worker_not_found)."""
        remote = self._member(worker)
        remote.draining = True
        return remote.state

    def undrain(self, worker: str) -> str:
        """Give it work again. Raises Refused(worker_not_found)."""
        remote = self._member(worker)
        remote.draining = False
        return remote.state

    def _member(self, worker: str) -> Remote:
        remote = self.members.remotes.get(worker)
        if remote is None or remote.ended:
            known = sorted(name for name, r in self.members.remotes.items() if not r.ended)
            text = f"there is no worker {worker[:64]!r}; there are: {', '.join(known) or 'none'}"
            raise refuse("worker_not_found", text, "worker")
        return remote

    def disable(self, reason: str, by: str) -> str | None:
        """Refuse every new request with this reason. Returns a warning, or None."""
        return self.switch.disable(reason, by)

    def enable(self, by: str) -> None:
        """Take requests again. Raises Failed(state_not_saved)."""
        self.switch.enable(by)

    def set_context(self, tokens: int | None) -> int:
        """Advertise at most so many tokens (None: what the pools hold); returns what is advertised now."""
        self.members.window.set_cap(tokens)
        return self.members.window.tokens


def _shown(info: m.WorkerInfo, state: str, reason: str) -> dict[str, object]:
    return {
        "id": info.worker,
        "role": info.role,
        "state": state,
        "reason": reason,
        "pid": info.pid,
        "host": info.host,
        "address": info.address,
        "incarnation": info.incarnation.hex(),
        "transport": info.transport,
        "capacities": {
            "pages": info.pages,
            "page_size": info.page_size,
            "max_tokens": info.max_tokens,
            "max_batch": info.max_batch,
            "slots": info.slots,
        },
    }


def _states(figures: Mapping[str, float], prefix: str, states: tuple[str, ...]) -> dict[str, int]:
    return {state: int(figures[prefix + state]) for state in states if prefix + state in figures}


__all__ = ["Cluster", "ClusterOptions"]
