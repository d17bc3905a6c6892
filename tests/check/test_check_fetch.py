"""Live nodes, as far as asking them goes: all at once, within their time, whatever they answer."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator

import pytest

from hermetic.check import facts
from hermetic.check.fetch import PATHS, FetchOptions, fetch
from hermetic.check.readers.reading import Reading
from hermetic.check.urls import address
from hermetic.options import OptionError

INFO = {
    "version": "0.5.23", "disaggregation_mode": "prefill", "max_total_num_tokens": 2048, "page_size": 16, "host": "127.0.0.1",
    "port": 1, "internal_states": [{"memory_usage": {"token_capacity": 2048}}], "model_path": "/m", "tokenizer_path": "/m",
    "max_req_input_len": 2042, "disaggregation_transfer_backend": "mooncake", "api_key": None, "tp_size": 1,
}  # fmt: skip


BREAK = "the connection ends here"


class Node:
    """An HTTP server of which the answers are set by path. `hang`: paths that are never answered. `packed`: the answers are, and say so."""

    def __init__(
        self,
        pages: dict[str, tuple[int, str]],
        hang: tuple[str, ...] = (),
        key: str = "",
        packed: bool = False,
    ) -> None:
        self.pages, self.hang, self.key, self.packed = pages, hang, key, packed
        self.asked: list[tuple[str, str]] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while head := (await reader.readline()).decode().split():
                key = ""
                while header := (await reader.readline()).decode().strip():
                    key = header.partition(" ")[2] if header.lower().startswith("authorization:") else key
                self.asked.append((head[1], key))
                if head[1] in self.hang:
                    await asyncio.sleep(3600)
                status, body = self.pages.get(head[1], (404, '{"detail":"Not Found"}'))
                if self.key and key != f"Bearer {self.key}":
                    status, body = 401, "{}"
                if body == BREAK:
                    break
                data = body.encode("latin-1")
                packed = "content-encoding: gzip\r\n" if self.packed else ""
                writer.write(
                    f"HTTP/1.1 {status} X\r\n{packed}content-length: {len(data)}\r\n\r\n".encode() + data
                )
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def serving(*nodes: Node) -> AsyncIterator[list[str]]:
    async with contextlib.AsyncExitStack() as stack:
        urls = []
        for node in nodes:
            server = await asyncio.start_server(node.connected, "127.0.0.1", 0)
            stack.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        yield urls


async def read(*nodes: Node, **options: object) -> list[Reading]:
    async with serving(*nodes) as urls:
        return await fetch(urls, FetchOptions(**options))  # type: ignore[arg-type]


def sglang(**more: object) -> dict[str, tuple[int, str]]:
    return {"/server_info": (200, json.dumps({**INFO, **more}))}


async def test_a_node_is_known_by_what_it_answers_and_by_the_url_that_it_was_asked_at() -> None:
    async with serving(Node(sglang())) as (url,):
        (reading,) = await fetch([f"{url}/v1/"], FetchOptions())
    (sheet,) = reading.sheets
    assert sheet[facts.POOL] == 2048
    assert sheet[facts.ENGINE] == "sglang"
    assert sheet.address == ("127.0.0.1", int(url.rpartition(":")[2]))  # not the port that it says itself
    assert not reading.unread


async def test_an_older_node_is_asked_by_the_older_name() -> None:
    node = Node({"/get_server_info": (200, json.dumps(INFO))})
    ((reading,), asked) = (await read(node), node.asked)
    assert reading.sheets[0][facts.POOL] == 2048
    assert ("/get_server_info", "") in asked


async def test_nodes_that_hang_cost_their_own_time_and_nobody_elses() -> None:
    """Twenty answer, four hang in one path or in all."""
    good = [Node(sglang()) for _ in range(20)]
    bad = [Node(sglang(), hang=("/metrics",)) for _ in range(2)]
    worse = [Node({}, hang=PATHS) for _ in range(2)]
    readings = await read(*good, *bad, *worse, timeout=4.0)
    assert [len(reading.sheets) for reading in readings] == [1] * 22 + [0] * 2
    assert all(not reading.unread for reading in readings[:20])
    assert all(reading.unread[0].part for reading in readings[20:22])
    for reading in readings[22:]:
        assert not reading.unread[0].part
        assert "within 4 s" in reading.unread[0].why


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ({}, "is this the node's port"),
        ({"/server_info": (200, "<html>hello</html>"), "/metrics": (200, "<html>")}, "answers with HTML"),
        (
            {"/server_info": (200, "{}"), "/v1/models": (200, "[]")},
            "is it a node of SGLang, vLLM or Hermetic",
        ),
        ({"/server_info": (500, "{}")}, "/server_info 500"),
    ],
)
async def test_what_is_no_engine_is_told_and_gives_nothing(
    pages: dict[str, tuple[int, str]], said: str
) -> None:
    (reading,) = await read(Node(pages))
    assert reading.sheets == []
    assert said in " ".join(one.why for one in reading.unread)


async def test_a_node_that_is_not_there_is_told() -> None:
    (reading,) = await fetch(["http://127.0.0.1:9"], FetchOptions())
    assert not reading.sheets
    assert not reading.unread[0].part


async def test_a_key_goes_where_it_is_asked_for_and_metrics_without_one_are_open() -> None:
    closed, without = Node(sglang(), key="secret-key-1"), Node(sglang(), key="secret-key-1")
    (good,) = await read(closed, api_key="secret-key-1")
    (bad,) = await read(without)
    assert good.sheets[0][facts.POOL] == 2048
    assert "secret-key-1" not in repr(good) + repr(FetchOptions(api_key="secret-key-1"))
    assert "--api-key" in bad.unread[0].why
    assert ("/metrics", "") in closed.asked  # first without


async def test_certificates_that_cannot_be_read_are_an_option_error() -> None:
    with pytest.raises(OptionError, match="--ca /nowhere"):
        await fetch(["https://127.0.0.1:9"], FetchOptions(ca="/nowhere"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/\n", "http://xn--a/", f"http://{'é' * 300}/"])
def test_what_is_no_url_is_an_option_error(url: str) -> None:
    with pytest.raises(OptionError, match="is not a URL"):
        address(url)


async def test_a_path_that_breaks_off_leaves_the_others() -> None:
    (reading,) = await read(Node({**sglang(), "/metrics": (200, BREAK)}))
    assert reading.sheets[0][facts.POOL] == 2048
    assert reading.unread[0].part
    assert reading.unread[0].why.startswith("/metrics: ")


async def test_what_a_node_refuses_is_told_where_it_answers_other_things() -> None:
    (reading,) = await read(Node({**sglang(), "/v1/models": (401, "{}"), "/v1/loads": (500, "{}")}))
    (one,) = reading.unread
    assert one.part
    assert "/v1/loads 500, /v1/models 401" in one.why
    assert "--api-key" in one.why


async def test_a_key_that_a_node_says_again_is_kept_nowhere() -> None:
    pages = {"/server_info": (200, json.dumps({**INFO, "model_path": "Bearer secret-key-1"})), "/version": (200, '{"error": "secret-key-1"}')}  # fmt: skip
    (reading,) = await read(Node(pages), api_key="secret-key-1")
    assert reading.sheets[0][facts.MODEL] == "Bearer ***"
    assert "secret-key-1" not in repr(reading)


async def test_an_answer_that_is_packed_is_not_unpacked() -> None:
    """It was not asked for: a small one, packed twice, may unpack to gigabytes."""
    packed = gzip.compress(json.dumps(INFO).encode()).decode("latin-1")
    (reading,) = await read(Node({"/server_info": (200, packed)}, packed=True))
    assert not reading.sheets
    assert "/server_info 200" in reading.unread[0].why
