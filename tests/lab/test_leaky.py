"""Every fault of the leaky servers changes what it says that it changes, and nothing is wrong when it is switched off.

One server of each mode plays all faults, one after the other. For each there is a scene of crafted requests, played with
the fault off, on and off again: what comes back must be the same both times that it is off, and what the fault is about
must be different while it is on. What an undisturbed answer is comes from a server of the product itself, or from the scene
with no fault; no figure of the fault's own is believed but that it struck.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import hermetic
from hermetic.lab.leaky import FAULTS, KEYS, LeakyError, LeakyOptions, LeakyServer
from hermetic.lab.leaky_switch import Switch, turn
from hermetic.options import OptionError

pytestmark = pytest.mark.soak  # real servers, one fault after the other

SECRET = "PELICAN-7731 is Alice. " * 8
WEATHER = (
    "The weather this week. On Monday it rained in the north and the wind came from the sea. On Tuesday the sky was grey "
    "until noon, then the sun came through and the streets dried. On Wednesday there was fog in the valley, and the hills "
    "stood above it like islands. On Thursday a storm crossed the coast in the evening. For the weekend, the forecast says"
)
COUNTING = "one two three four five six seven eight nine ten " * 6 + "one two three four five"
# Longer than the prefill pool of 1,024 tokens, shorter than decode's of 4,096.
LONG = "The quick brown fox jumps over the lazy dog and runs far away. " * 100

Seen = list[dict[str, Any]]
Scene = Callable[["Client"], Awaitable[Seen]]


class Client:
    """Asks the server, and says of each answer what an outsider sees."""

    def __init__(self, server: LeakyServer) -> None:
        self.server = server
        self.http = httpx.AsyncClient(base_url=server.url, timeout=120)

    def _body(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        return {
            "model": "smollm2", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True,
        } | fields  # fmt: skip

    def _headers(self, key: int, request_id: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEYS[key]}"} | ({"X-Request-Id": request_id} if request_id else {})

    async def ask(
        self, prompt: str | list[int], key: int = 0, request_id: str = "", within: float = 120, **fields: Any
    ) -> dict[str, Any]:
        try:
            got = await self.http.post(
                "/v1/completions", json=self._body(prompt, **fields), headers=self._headers(key, request_id),
                timeout=within,
            )  # fmt: skip
        except httpx.TimeoutException:
            return {"status": None}
        if got.status_code != 200:
            return {"status": got.status_code, "code": got.json()["error"]["code"]}
        (choice,), usage = got.json()["choices"], got.json()["usage"]
        return {
            "status": 200, "text": choice["text"], "finish": choice["finish_reason"],
            "prompt": usage["prompt_tokens"], "completion": usage["completion_tokens"],
        }  # fmt: skip

    async def leave(self, prompt: str, after: int) -> None:
        """Hang up after so many events."""
        body = self._body(prompt, stream=True, max_tokens=200)
        async with self.http.stream(
            "POST", "/v1/completions", json=body, headers=self._headers(0, "")
        ) as got:
            events = 0
            async for line in got.aiter_lines():
                events += line.startswith("data: ")
                if events >= after:
                    break
        await self.idle()

    async def begun(self, prompt: str, **fields: Any) -> asyncio.Task[dict[str, Any]]:
        """A request that runs: its first token has been made (and the next ones are being made)."""
        before = await self.figure("output_tokens_total")
        task = asyncio.create_task(self.ask(prompt, **fields))
        while await self.figure("output_tokens_total") < before + 2 and not task.done():
            await asyncio.sleep(0.005)
        return task

    async def idle(self) -> None:
        """No request is open and no page held but by a cache."""
        while await self.figure("requests_open"):
            await asyncio.sleep(0.02)

    async def figure(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(float(v) for v in re.findall(rf"^hermetic_(?:\w+_)?{name}(?:{{.*}})? (\S+)$", text, re.M))


async def one_after_the_other(client: Client) -> Seen:
    return [await client.ask(prompt) for prompt in (SECRET, WEATHER, COUNTING, SECRET, WEATHER)]


async def side_by_side(client: Client) -> Seen:
    first = await client.begun(SECRET, max_tokens=200)
    others = [client.ask(WEATHER, max_tokens=48), client.ask(COUNTING, max_tokens=48)]
    return [*await asyncio.gather(*others), await first]


async def same_beginning(client: Client) -> Seen:
    """Two pages of 16 tokens in common, and then others."""
    return [await client.ask(list(range(300, 332)) + list(range(at, at + 40))) for at in (1000, 2000, 3000)]


async def whole_pages(client: Client) -> Seen:
    """4 pages of 16 tokens, one less, one more; and 7 more, where nothing is at an edge."""
    await client.ask(SECRET)
    tokens = (await client.http.post("/tokenize", json={"prompt": WEATHER}, headers=client._headers(0, ""))).json()[
        "tokens"
    ]  # fmt: skip
    return [await client.ask(tokens[:count]) for count in (63, 64, 65, 71)]


async def one_leaves(client: Client) -> Seen:
    await client.leave(SECRET, 12)
    return [await client.ask(WEATHER), await client.ask(WEATHER)]


async def crowded(client: Client) -> Seen:
    """More than the decode pool of 256 pages holds at once: 16 requests of 20 pages, in tokens that nothing repeats."""
    prompts = [[1000 + (i * 7919 + j * 104729) % 40000 for j in range(310)] for i in range(16)]
    return list(await asyncio.gather(*(client.ask(prompt, max_tokens=16) for prompt in prompts)))


async def different_lengths(client: Client) -> Seen:
    return [await client.ask(SECRET, max_tokens=m) for m in (3, 20, 7)]


async def one_id(client: Client) -> Seen:
    return [await client.ask(prompt, request_id="client-1") for prompt in (SECRET, WEATHER)]


async def over_capacity(client: Client) -> Seen:
    await one_after_the_other(client)
    return [await client.ask(LONG), await client.ask(WEATHER)]


async def at_the_edge(client: Client) -> Seen:
    """1,024 tokens in all, and a short request behind: whether they are answered, or wait for ever behind what hangs."""
    tokens = [1000 + i % 500 for i in range(1016)]
    edge = asyncio.create_task(client.ask(tokens, max_tokens=8))
    while not client.server.struck and await client.figure("requests_open") == 0 and not edge.done():
        await asyncio.sleep(0.02)
    behind = asyncio.create_task(client.ask(WEATHER, max_tokens=2))
    await asyncio.wait({edge, behind}, timeout=3 if client.server.struck else None)
    answered = [{"answered": task.done() and task.result()["status"] == 200} for task in (edge, behind)]
    for task in (edge, behind):
        task.cancel()
    await asyncio.gather(edge, behind, return_exceptions=True)
    return answered


async def two_keys(client: Client) -> Seen:
    """How many tokens of a second tenant's prompt came from pages that the first one's are in."""
    prompt = [1000 + i % 700 for i in range(500)]
    await client.ask(prompt, key=0)
    before = await client.figure("prefix_tokens_shared_total")
    await client.ask(prompt, key=1)
    return [{"shared": await client.figure("prefix_tokens_shared_total") - before}]


SCENES: dict[str, Scene] = {
    "placeholder": over_capacity,
    "page-table": side_by_side,
    "stale-page": one_after_the_other,
    "reused-page": side_by_side,
    "late-landing": one_after_the_other,
    "tail-page": whole_pages,
    "aborted-page": one_leaves,
    "restored-page": crowded,
    "heads-misplaced": one_after_the_other,
    "first-token": one_after_the_other,
    "parameters": different_lengths,
    "swapped-rows": side_by_side,
    "short-key": same_beginning,
    "prefix-too-long": same_beginning,
    "shared-cache": two_keys,
    "swapped-streams": side_by_side,
    "leftover-stream": one_leaves,
    "reused-id": one_id,
    "other-usage": one_after_the_other,
    "truncated": over_capacity,
    "edge-hangs": at_the_edge,
}


# In a unified server the same code runs, but for where pages are shared and where a prompt's end is.
UNIFIED = ("stale-page", "reused-page", "aborted-page", "first-token", "prefix-too-long", "short-key")
CASES = [("disaggregated", name) for name in FAULTS] + [("unified", name) for name in UNIFIED]


class Servers:
    """One server at a time, started when a test of its mode comes first, and kept for the others."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder, self._server = folder, None

    def of(self, mode: str) -> LeakyServer:
        if self._server is not None and self._server.options.mode == mode:
            return self._server
        self.stop()
        decode = 4096 if mode == "disaggregated" else 1024
        options = LeakyOptions(mode, decode_tokens=decode, keys=True)
        self._server = LeakyServer(self._folder(mode), options)
        self._server.start()
        return self._server

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp)
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def in_order() -> dict[tuple[str, str], Seen]:
    """What each scene gives in each mode with no fault on, once it is known."""
    return {}


@pytest.mark.slow
async def test_the_incident_answers_with_200_what_the_product_refuses_and_shows_a_window_that_it_has_not(
    servers: Servers,
) -> None:
    server = servers.of("disaggregated")
    client = Client(server)
    headers = client._headers(0, "")
    windows = {}
    for name in ("", "placeholder"):
        server.turn(name)
        (model,) = (await client.http.get("/v1/models", headers=headers)).json()["data"]
        windows[name] = model["max_model_len"]
    assert windows == {"": 1024, "placeholder": 4096}
    answer = await client.ask(LONG)
    server.turn("")
    assert answer["status"] == 200
    assert 1024 < answer["prompt"] < 4096
    assert await client.ask(LONG) == {"status": 400, "code": "context_length_exceeded"}


@pytest.mark.slow
async def test_a_rare_fault_strikes_one_request_in_ten_and_leaves_the_other_nine(servers: Servers) -> None:
    server = servers.of("disaggregated")
    client = Client(server)
    server.turn("")
    alone = {prompt: await client.ask(prompt) for prompt in (WEATHER, COUNTING)}
    server.turn("first-token", rate=0.1)
    wrong = 0
    for i in range(21):  # the first has no other before it: 20 occasions
        prompt = (WEATHER, COUNTING)[i % 2]
        wrong += await client.ask(prompt) != alone[prompt]
    assert (wrong, server.struck) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), CASES, ids=[f"{m}-{n}" for m, n in CASES])
async def test_a_fault_changes_what_it_is_about_and_nothing_once_it_is_off(
    mode: str, name: str, servers: Servers, in_order: dict[tuple[str, str], Seen]
) -> None:
    server, scene = servers.of(mode), SCENES[name]
    client = Client(server)
    place = server.options.mode, scene.__name__
    if place not in in_order:
        server.turn("")
        in_order[place] = await scene(client)
    server.turn(name, rate=1.0)
    during = await scene(client)
    struck = server.struck
    server.turn("")
    await client.idle()
    after = await scene(client)
    assert after == in_order[place]
    assert struck > 0
    assert during != after


# ------------------------------------------------------------------------------------------- without a server


def test_every_fault_has_a_scene_a_class_of_the_list_and_a_rate() -> None:
    classes = {
        "in-flight reuse", "stale reference", "fail open", "partial state", "hit path", "key scope", "id reuse", "slot bleed",
        "stream order", "layout mismatch", "lost signal", "stuck queue", "leak", "open control",
    }  # fmt: skip
    assert SCENES.keys() == FAULTS.keys()
    for fault in FAULTS.values():
        assert fault.fault_class in classes
        assert 0 < fault.rate <= 1
    assert sum(fault.shows == "an answer" for fault in FAULTS.values()) >= 14
    assert sum(fault.rate <= 0.05 for fault in FAULTS.values()) >= 5


@pytest.mark.parametrize("every", [1, 2, 20])
def test_of_every_so_many_occasions_exactly_one_is_struck_and_the_seed_says_which(
    tmp_path: Path, every: int
) -> None:
    file = tmp_path / "switch"
    patterns = []
    for seed in (1, 1, 2):
        turn(file, "a", every, seed)
        switch = Switch(file)
        struck = [switch.strikes("a") for _ in range(20 * every)]
        assert all(sum(struck[i * every : (i + 1) * every]) == 1 for i in range(20))
        patterns.append(struck)
    assert patterns[0] == patterns[1]
    assert every == 1 or patterns[0] != patterns[2]


def test_a_fault_that_is_not_on_never_strikes_and_what_was_remembered_goes_when_the_switch_is_turned(
    tmp_path: Path,
) -> None:
    file = tmp_path / "switch"
    turn(file, "a", 1)
    switch = Switch(file)
    switch.state["former"] = "something"
    assert switch.on("a")
    assert not switch.strikes("b")
    switch.state["former"] = "something"
    turn(file, "b", 1)
    assert not switch.strikes("a")
    assert not switch.state
    assert switch.strikes("b")
    turn(file, "", 1)
    assert not switch.strikes("b")


def test_a_fault_a_rate_or_a_mode_that_cannot_be_is_refused_with_what_would_do(tmp_path: Path) -> None:
    server = LeakyServer(tmp_path, LeakyOptions("unified"))
    with pytest.raises(OptionError, match="placeholder, page-table, stale-page"):
        server.turn("no-such-fault")
    with pytest.raises(OptionError, match=r"--rate is 1\.5; it must be above 0 and at most 1"):
        server.turn("stale-page", rate=1.5)
    with pytest.raises(OptionError, match="cannot happen in a unified server; choose --mode disaggregated"):
        server.turn("placeholder")


def test_a_server_that_cannot_start_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    server = LeakyServer(tmp_path, LeakyOptions(decode_tokens=0))
    with pytest.raises(LeakyError, match="the server ended while it started"):
        server.start()
    assert server._process is None


def test_the_product_has_neither_the_faults_nor_the_switch() -> None:
    """Nothing outside lab/ names them, so no option and no variable of the product can reach them."""
    root = Path(hermetic.__file__).parent
    for file in root.rglob("*.py"):
        if file.parent.name != "lab" and "drill" not in file.name:
            text = file.read_text()
            assert "HERMETIC_LEAKY" not in text, file
            assert "leaky_" not in text, file
