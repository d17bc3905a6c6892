"""What a client sees when the backend says no, breaks, or the client itself goes away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from driving import chat, client_of, completion
from scripted import ScriptedBackend

from hermetic.gateway.backend import Failed, Finish, Refused, Token

PATHS = [("/v1/chat/completions", chat), ("/v1/completions", completion)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "make"), PATHS)
@pytest.mark.parametrize(("error", "status", "retry"), [
    (Refused("overloaded", "the queue is full", 429, retry_after=1.2), 429, "2"),
    (Refused("not_ready", "no decode worker", 503, retry_after=5), 503, "5"),
    (Failed("worker_lost", "decode-0 died", 503, retry_after=0.1), 503, "1"),
    (Failed("kv_integrity", "page 7 does not verify"), 500, None),
])  # fmt: skip
async def test_before_the_first_token_every_error_has_its_own_status(
    client: httpx.AsyncClient,
    backend: ScriptedBackend,
    path: str,
    make: Any,
    stream: bool,
    error: Any,
    status: int,
    retry: str | None,
) -> None:
    for script in (error, [error]):  # refused when asked, and when iterated
        backend.scripts.append(script)
        response = await client.post(path, json=make(stream=stream))
        assert (response.status_code, response.json()["error"]["code"]) == (status, error.code)
        assert response.json()["error"]["message"] == error.message
        assert response.headers.get("retry-after") == retry
        assert all(stream.closed for stream in backend.streams)


async def test_an_error_in_mid_stream_is_an_error_event_without_done(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.scripts.append([Token(0, 504), Failed("kv_integrity", "page 7 does not verify")])
    response = await client.post("/v1/completions", json=completion(stream=True))
    assert response.status_code == 200
    lines = [line for line in response.text.split("\n\n") if line]
    assert json.loads(lines[-1][6:])["error"]["code"] == "kv_integrity"
    assert "[DONE]" not in response.text
    assert backend.streams[0].closed


async def test_an_error_after_the_first_token_of_a_whole_answer_gives_no_part_of_it(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.scripts.append([Token(0, 504), Failed("kv_integrity", "page 7 does not verify")])
    response = await client.post("/v1/completions", json=completion())
    assert response.status_code == 500
    assert set(response.json()) == {"error"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "steps",
    [
        [Token(0, 504), RuntimeError("secret detail")],
        [RuntimeError("secret detail")],
        [Token(0, 504)],
        [Token(5, 504)],
    ],
)
async def test_what_nobody_expected_is_an_internal_error_without_internals(
    client: httpx.AsyncClient,
    backend: ScriptedBackend,
    steps: Any,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    backend.scripts.append(steps)
    response = await client.post("/v1/completions", json=completion(stream=stream))
    assert response.status_code == (200 if stream and steps[0] == Token(0, 504) else 500)
    assert "internal_error" in response.text
    assert "secret" not in response.text
    assert "[DONE]" not in response.text
    if isinstance(steps[-1], RuntimeError):
        assert "secret detail" in caplog.text
        assert response.headers["x-hermetic-request-id"] in response.text
    assert backend.streams[0].closed


async def test_if_one_prompt_of_a_batch_is_refused_the_others_are_cancelled(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.scripts += [[asyncio.Event()], Refused("overloaded", "full", 429)]
    response = await client.post("/v1/completions", json=completion(prompt=["a", "b"]))
    assert response.status_code == 429
    assert backend.streams[0].closed
    backend.scripts += [[asyncio.Event()], [Failed("worker_lost", "gone", 503)]]
    assert (await client.post("/v1/completions", json=completion(prompt=["a", "b"]))).status_code == 503
    assert all(stream.closed for stream in backend.streams)


@pytest.mark.parametrize("begun", [False, True], ids=["before the first token", "after it"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_away_cancels_its_request(
    url: str, backend: ScriptedBackend, stream: bool, begun: bool
) -> None:
    async def scene() -> None:
        reached = asyncio.Event()
        backend.scripts.append([*([Token(0, 504)] if begun else []), asyncio.Event(), Finish(0, "length")])
        async with httpx.AsyncClient(base_url=url) as client:

            async def ask() -> None:
                async with client.stream(
                    "POST", "/v1/completions", json=completion(stream=stream)
                ) as response:
                    async for _ in response.aiter_bytes():
                        reached.set()

            asking = asyncio.create_task(ask())
            while not backend.streams or (begun and not backend.streams[0].sent):
                await asyncio.sleep(0.005)
            if begun and stream:
                await reached.wait()
            assert not backend.streams[0].closed
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            while not backend.streams[0].closed:  # the test's own limit ends this if it never happens
                await asyncio.sleep(0.005)
            for _ in range(1000):
                text = (await client.get("/metrics")).text
                if 'outcome="aborted"' in text:
                    break
            assert (
                'hermetic_requests_total{endpoint="/v1/completions",outcome="aborted",tenant="local"} 1.0'
                in text
            )
            assert 'hermetic_requests_running{tenant="local"} 0.0' in text
            assert 'hermetic_tenant_pages_held{tenant="local"} 0.0' in text or not begun

    asyncio.run(scene())


async def test_ids_come_from_the_server_and_a_clients_id_is_only_a_label(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    first = await client.post("/v1/completions", json=completion())
    assert first.headers["x-request-id"] == first.headers["x-hermetic-request-id"]
    assert first.json()["id"] == "cmpl-" + first.headers["x-hermetic-request-id"]
    second = await client.post(
        "/v1/completions", json=completion(), headers={"x-request-id": "my id\t<1>" + "x" * 500}
    )
    assert second.headers["x-request-id"] == ("myid1" + "x" * 500)[:128]
    assert second.headers["x-hermetic-request-id"] not in (
        first.headers["x-hermetic-request-id"],
        second.headers["x-request-id"],
    )
    assert backend.requests[0] == backend.requests[1]


async def test_a_body_that_never_comes_ends_with_a_timeout(make_app: Any) -> None:
    from hermetic.gateway.limits import Settings

    async def never() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    response = await client_of(make_app(settings=Settings(body_timeout=0.01))).post(
        "/v1/completions", content=never()
    )
    assert (response.status_code, response.json()["error"]["code"]) == (408, "body_timeout")
