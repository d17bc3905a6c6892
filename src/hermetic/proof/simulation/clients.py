"""The clients of a simulated deployment: each asks once, reads its stream, and knows what the answer must be.

The one thing to know: every token is compared as it comes, so a wrong one ends the run at once; a request that ends otherwise
than with its whole answer must end with a code that something which really happened explains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from hermetic.gateway.backend import Failed, Finish, Generate, Refused, Token
from hermetic.gateway.cluster import Cluster
from hermetic.gateway.runs import Run
from hermetic.model.params import SamplingParams
from hermetic.proof.simulation.checks import Checks
from hermetic.proof.simulation.events import Events
from hermetic.proof.simulation.model import answer
from hermetic.proof.simulation.plan import Ask

# What a fault may make of a request. Everything else is the server's own mistake.
EXCUSED = frozenset(
    {"worker_lost", "transport_error", "no_pair", "no_workers", "not_ready", "model_disabled", "overloaded"}
)
LATER = frozenset({"no_workers", "not_ready", "overloaded"})  # what a client asks again after
TRIES, AGAIN = 6, 0.5  # times that it asks, and seconds between two


class Client:
    """One request. `server` is whoever is the gateway when it asks; `troubled`: whether anything has gone wrong so far."""

    def __init__(
        self,
        ask: Ask,
        boast: int,
        server: Callable[[], Cluster | None],
        checks: Checks,
        events: Events,
        troubled: Callable[[], bool],
    ) -> None:
        self.ask, self._server, self._checks, self._events = ask, server, checks, events
        self._troubled = troubled
        self.outcome = ""
        # Prefill announces more than it holds: then its own refusal is the right answer, and the only one.
        self._unserved = bool(boast) and len(ask.tokens) + ask.max_tokens > boast
        self._expected = answer(ask.tokens, ask.max_tokens)
        self._got: dict[int, int] = {i: 0 for i in range(ask.n)}
        self._open = set(range(ask.n))
        self._stopped: set[int] = set()
        self._run: Run | None = None
        self._cluster: Cluster | None = None
        self._lost_gateway = False

    @property
    def keys(self) -> list[str]:
        """Every attempt that was made."""
        run = self._run
        return [] if run is None else [f"{run.ticket.hex()[:12]}/{i}" for i in range(1, run.attempts + 1)]

    async def go(self) -> None:
        """From the question to the end. Sets `outcome`."""
        ask, run = self.ask, await self._asked()
        if run is None:
            return
        self._events.name(run.ticket, ask.number)
        self._checks.tenants[run.ticket.hex()[:12]] = ask.tenant
        if ask.too_long:
            self._checks.found("I4", f"request {ask.number} can never fit and was taken", *self.keys)
        leaving = None
        if ask.abort is not None and ask.abort[0] == "after":
            loop = asyncio.get_running_loop()
            leaving = loop.call_later(ask.abort[1], self._leave_soon, asyncio.current_task())
        try:
            await self._read(run)
        except (Refused, Failed) as error:
            self._failed(error)
        except asyncio.CancelledError:
            self._ended("client left" if leaving is not None and not self._lost_gateway else "gateway lost")
        finally:
            if leaving is not None:
                leaving.cancel()
            if not self._lost_gateway:
                await run.aclose()

    async def _asked(self) -> Run | None:
        """The stream, once somebody takes the request; None if nobody does (`outcome` says why)."""
        ask = self.ask
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0)
        request = Generate(ask.tokens, params, ask.tenant, ask.tenant, ask.n)
        for again in reversed(range(TRIES)):
            self._cluster = self._server()
            try:
                if self._cluster is not None:
                    self._run = await self._cluster.generate(request)
                    return self._run
                if not again:
                    self._ended("no gateway")
            except Refused as refused:
                if not again or refused.code not in LATER:
                    self._refused(refused)
                    return None
            await asyncio.sleep(AGAIN)
        return None

    def gateway_died(self, task: asyncio.Task[None]) -> None:
        """The connection broke, if this client's was to that gateway."""
        self._lost_gateway = True
        task.cancel()

    def uses(self, cluster: Cluster) -> bool:
        return self._run is not None and self._cluster is cluster

    def _leave_soon(self, task: asyncio.Task[None] | None) -> None:
        assert task is not None
        self._events.noted("gateway", "the client leaves", f"request {self.ask.number}", tuple(self.keys))
        task.cancel()

    async def _read(self, run: Run) -> None:
        ask = self.ask
        async for event in run:
            match event:
                case Token(index=index, token=token):
                    self._token(index, token)
                    if (
                        ask.abort is not None
                        and ask.abort[0] == "tokens"
                        and self._got[index] >= ask.abort[1]
                    ):
                        self._events.noted("gateway", "the client leaves", "", tuple(self.keys))
                        self._ended("client left")
                        return
                    if ask.stop is not None and ask.stop == (index, self._got[index]):
                        self._stopped.add(index)
                        self._open.discard(index)
                        await run.cancel(index)
                case Finish(index=index, reason=reason):
                    self._finish(index, reason)
        if self._unserved:
            self._checks.found("I4", f"request {ask.number} does not fit prefill and was served", *self.keys)
        if self._open:
            self._checks.found("I4", f"request {ask.number}: the stream ended without its end", *self.keys)
        self._ended("completed")

    def _token(self, index: int, token: int) -> None:
        expected, at = self._expected[0], self._got[index]
        self._got[index] += 1
        if index in self._stopped:
            return  # it was on its way
        if index not in self._open:
            self._checks.found("I4", f"request {self.ask.number}: a token after the end", *self.keys)
        elif at >= len(expected) or expected[at] != token:
            want = expected[at] if at < len(expected) else "none"
            text = f"request {self.ask.number}: output token {at} is {token}, and must be {want}"
            self._checks.found("I1", text, *self.keys)

    def _finish(self, index: int, reason: str) -> None:
        expected, ended = self._expected
        if index in self._stopped:
            return
        if index not in self._open or self._got[index] != len(expected) or reason != ended:
            text = (
                f"request {self.ask.number}: choice {index} ended by {reason} after {self._got[index]} tokens; "
                f"{ended} after {len(expected)} is right"
            )
            self._checks.found("I4", text, *self.keys)
        self._open.discard(index)

    def _refused(self, refused: Refused) -> None:
        number = self.ask.number
        if self.ask.too_long != (refused.code == "context_length_exceeded") and refused.code not in EXCUSED:
            self._checks.found("I4", f"request {number} was refused with {refused.code}: {refused.message}")
        elif not self.ask.too_long and not self._troubled():
            self._checks.found("L1", f"request {number} was refused with {refused.code}, and all is well")
        self._ended("refused " + refused.code)

    def _failed(self, error: Refused | Failed) -> None:
        text = f"request {self.ask.number} ended with {error.code}: {error.message}"
        if error.code == "kv_integrity":
            self._checks.integrity(self.keys, error.message)
        elif error.code == "deadline_exceeded":
            self._checks.found("L1", text, *self.keys)
        elif error.code == "context_length_exceeded" and self._unserved:
            pass
        elif error.code not in EXCUSED:
            self._checks.found("I4", text, *self.keys)
        elif not self._troubled():
            self._checks.found("L1", text + ", and all is well", *self.keys)
        self._ended("failed " + error.code)

    def _ended(self, how: str) -> None:
        if self.outcome:
            self._checks.found(
                "I4", f"request {self.ask.number} ended twice: {self.outcome}, {how}", *self.keys
            )
        self.outcome = how
        self._events.counted(f"outcome {how}")
        self._events.noted("gateway", f"request {self.ask.number} ends", how, tuple(self.keys))


__all__ = ["EXCUSED", "Client"]
