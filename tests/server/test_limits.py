"""What cannot fit is refused at every door, with the numbers, and moves nothing."""

from __future__ import annotations

import httpx
import pytest
from serving import Server, events


def steps(server: Server) -> dict[str, float]:
    """Counters that move when a worker is given anything: requests, steps, landed pages."""
    names = ("hermetic_worker_requests_total", "hermetic_worker_steps_total", "pages_landed")
    return {k: v for k, v in server.metrics().items() if any(n in k for n in names)}


def body(tokens: int, max_tokens: int, stream: bool) -> dict:
    return {
        "model": "smollm2",
        "prompt": [1000 + i % 7 for i in range(tokens)],
        "max_tokens": max_tokens,
        "stream": stream,
        "temperature": 0,
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("over", "max_tokens"), [(0, 1), (1, 1), (500, 16), (6000, 16), (-15, 16), (-1, 2)])
def test_completions_over_the_pool_are_refused_with_both_numbers(
    server: Server, limit: int, stream: bool, over: int, max_tokens: int
) -> None:
    server.wait_idle()
    before, pages = steps(server), server.pages()
    prompt = limit + over
    response = httpx.post(f"{server.url}/v1/completions", json=body(prompt, max_tokens, stream), timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(limit) in error["message"]
    assert str(prompt) in error["message"]
    assert steps(server) == before
    assert server.pages() == pages


@pytest.mark.parametrize("stream", [False, True])
def test_chat_over_the_pool_is_refused_and_the_next_request_works(
    server: Server, limit: int, stream: bool
) -> None:
    long = [{"role": "user", "content": "word " * 3000}]
    ask = {"model": "smollm2", "messages": long, "stream": stream, "max_tokens": 4}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert str(limit) in response.json()["error"]["message"]
    ask["messages"] = [{"role": "user", "content": "Say hello."}]
    after = httpx.post(f"{server.url}/v1/chat/completions", json=ask, timeout=60)
    assert after.status_code == 200


@pytest.mark.parametrize(("prompt", "max_tokens"), [(-1, 1), (-2, 2), (-16, 16), (-17, 16), (-32, 16)])
def test_what_fits_to_the_last_token_is_answered(
    server: Server, limit: int, prompt: int, max_tokens: int
) -> None:
    ask = body(limit + prompt, max_tokens, False) | {"ignore_eos": True}
    response = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=120)
    assert response.status_code == 200, response.text
    assert response.json()["usage"] == {
        "prompt_tokens": limit + prompt,
        "completion_tokens": max_tokens,
        "total_tokens": limit + prompt + max_tokens,
    }


def test_without_max_tokens_the_answer_may_fill_the_window(server: Server, limit: int) -> None:
    ask = body(limit - 5, 1, True) | {"ignore_eos": True, "stream_options": {"include_usage": True}}
    del ask["max_tokens"]
    response = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=120)
    chunks = events(response)
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"


def test_enormous_text_is_refused_without_tokenising_all_of_it(server: Server) -> None:
    ask = {"model": "smollm2", "prompt": "a b " * 1_500_000, "max_tokens": 4}
    response = httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
