"""Faults of the gateway: what it makes of requests, streams, ids and numbers. For the process that serves HTTP.

The one thing to know: classes are patched, before the server is made, and for the life of the process; each fault asks the
switch whether it is on. The workers are right here, and what goes wrong does so on the way from and to them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import msgspec

from hermetic.gateway import runs as runs_module
from hermetic.gateway.app_generate import Generator
from hermetic.gateway.backend import Capacity, Generate, Token
from hermetic.gateway.cluster import Cluster
from hermetic.gateway.limits import TextBounds
from hermetic.gateway.pairing import Halves, Need
from hermetic.gateway.remote import Remote
from hermetic.gateway.runs import Run, Runs
from hermetic.gateway.stream import Answer
from hermetic.handoff.messages import Key
from hermetic.lab.leaky_switch import Switch
from hermetic.worker import messages as m

IDS = 4096  # request ids that are remembered
LEFT = 8  # tokens of a stream that was left
POLL = 0.1  # seconds between two looks at whether a hanging request may go on

_runs: Any = Runs
_run: Any = Run
_generator: Any = Generator
_cluster: Any = Cluster
_module: Any = runs_module


def break_gateway(switch: Switch) -> None:
    """Put every fault in."""
    for fault in (swapped_streams, leftover_stream, prompts, other_usage, hanging, advertised):
        fault(switch)


def swapped_streams(switch: Switch) -> None:
    """swapped-streams: from some step on, two requests that are answered side by side get each other's tokens."""
    handle = Runs.handle

    def handling(self: Runs, remote: Remote, key: Key | None, body: m.Body) -> None:
        if isinstance(body, m.Tokens) and switch.on("swapped-streams"):
            body = m.Tokens(_swap(switch, body.tokens))
        handle(self, remote, key, body)

    _runs.handle = handling


def _swap(switch: Switch, tokens: tuple[m.TokenOut, ...]) -> tuple[m.TokenOut, ...]:
    pairs: dict[Key, Key] = switch.state.setdefault("pairs", {})
    seen: set[Key] = switch.state.setdefault("seen", set())
    at = {item.key: i for i, item in enumerate(tokens) if item.choice == 0}
    for key in at:
        other = next((other for other in at if other != key and other not in pairs), None)
        if key in seen or other is None:
            continue
        seen |= {key, other}
        if switch.strikes("swapped-streams"):
            pairs[key], pairs[other] = other, key
    out = list(tokens)
    for key, i in at.items():
        if (other_at := at.get(pairs.get(key, key))) is not None:
            out[i] = msgspec.structs.replace(tokens[other_at], key=key)
    return tuple(out)


def leftover_stream(switch: Switch) -> None:
    """leftover-stream: what was made for a client that left goes out to the next one, before its own answer."""
    begin, aclose = Runs.begin, Run.aclose

    def beginning(self: Runs, request: Generate) -> Run:
        run = begin(self, request)
        left: list[int] = (
            switch.state.pop("left", []) if switch.on("leftover-stream") and request.tenant else []
        )
        for token in left:
            run.queue.put_nowait(Token(0, token, None, None))
        return run

    async def closing(self: Run) -> None:
        made = self.outputs.get(0, [])[-LEFT:]
        if not self.over and made and self.request.tenant and switch.strikes("leftover-stream"):
            switch.state["left"] = made
        await aclose(self)

    _runs.begin, _run.aclose = beginning, closing


def prompts(switch: Switch) -> None:
    """Two faults of what a request is taken to ask.

    reused-id: a request whose X-Request-Id was seen before goes on with the entry of the former one, and its prompt.
    truncated: a prompt that does not fit is cut until it does, and answered."""
    respond, check = Generator._respond, TextBounds.check

    async def responding(
        self: Any, request: Any, ask: Any, prompts: Sequence[Sequence[int]], *more: Any
    ) -> Any:
        if switch.on("reused-id"):
            prompts = _of_id(switch, request.headers.get("x-request-id"), prompts)
        if switch.on("truncated"):
            prompts = _cut(switch, prompts, self._backend.capacity().max_model_len - (ask.max_tokens or 1))
        return await respond(self, request, ask, prompts, *more)

    def checking(self: TextBounds, text: str, limit: int, param: str) -> None:
        if not switch.on("truncated"):
            check(self, text, limit, param)

    _generator._respond = responding
    bounds: Any = TextBounds
    bounds.check = checking


def _of_id(switch: Switch, label: str | None, prompts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    if not label:
        return prompts
    known: OrderedDict[str, Sequence[Sequence[int]]] = switch.state.setdefault("ids", OrderedDict())
    while len(known) >= IDS:
        known.popitem(last=False)
    former = known.setdefault(label, prompts)
    return former if former != prompts and switch.strikes("reused-id") else prompts


def _cut(switch: Switch, prompts: Sequence[Sequence[int]], room: int) -> Sequence[Sequence[int]]:
    if room < 1 or all(len(tokens) <= room for tokens in prompts) or not switch.strikes("truncated"):
        return prompts
    return [tokens[:room] for tokens in prompts]


def other_usage(switch: Switch) -> None:
    """other-usage: an answer carries the prompt_tokens of the request before it."""
    target: Any = Answer
    counted = target.prompt_tokens.fget

    def prompt_tokens(self: Any) -> int:
        own: int = counted(self)
        if not switch.on("other-usage"):
            return own
        if not hasattr(self, "_of_another"):
            former, switch.state["tokens"] = switch.state.get("tokens", own), own
            self._of_another = former if former != own and switch.strikes("other-usage") else own
        return int(self._of_another)

    target.prompt_tokens = property(prompt_tokens)


def hanging(switch: Switch) -> None:
    """edge-hangs: a request that needs the very last page of the context is taken and never run, and what comes after it
    waits behind it, until its client leaves."""
    generate = Cluster.generate

    async def generating(self: Cluster, request: Generate) -> Run:
        if not switch.on("edge-hangs"):
            return await generate(self, request)
        lock = switch.state.setdefault("queue", asyncio.Lock())
        async with lock:
            left = self.capacity().max_model_len - len(request.tokens) - request.params.max_tokens
            if 0 <= left < self.capacity().page_size and switch.strikes("edge-hangs"):
                while switch.on("edge-hangs"):
                    await asyncio.sleep(POLL)
        return await generate(self, request)

    _cluster.generate = generating


def advertised(switch: Switch) -> None:
    """placeholder, the gateway's part: nothing compares what is advertised with what the prefill pool holds."""
    capacity, admit, choose = Cluster.capacity, Cluster.admit, runs_module.choose

    def as_if(self: Cluster) -> AbstractContextManager[Any]:
        """The window is what the largest pool holds, while it is asked for."""
        most = max((r.info.max_tokens for r in self.members.remotes.values() if not r.ended), default=0)
        on = switch.on("placeholder") and self.members.window.tokens > 0
        return mock.patch.object(self.members.window, "tokens", most) if on else contextlib.nullcontext()

    def held(self: Cluster) -> Capacity:
        with as_if(self):
            return capacity(self)

    def admitting(self: Cluster, prompt_tokens: int, max_tokens: int, n: int = 1) -> None:
        with as_if(self):
            admit(self, prompt_tokens, max_tokens, n)

    def choosing(remotes: Collection[Remote], need: Need, avoid: Iterable[Halves] = ()) -> Halves | None:
        if switch.on("placeholder"):
            least = min((r.info.max_tokens for r in remotes), default=need.tokens)
            need = Need(min(need.tokens, least), need.choices)
        return choose(remotes, need, tuple(avoid))

    _cluster.capacity, _cluster.admit, _module.choose = held, admitting, choosing


__all__ = ["break_gateway"]
