"""Every kind of bad input gets its status, its code, and a message that names what was wrong."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from driving import chat, client_of, completion

from hermetic.gateway.limits import Settings

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def say(content: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"model": "smollm2", "messages": [{"role": role, "content": content, **fields}]}


BAD: list[tuple[str, Any, int, str, str | None]] = [
    # path, body, status, code, param
    (COMPLETION, "{", 400, "invalid_json", None),
    (COMPLETION, "", 400, "invalid_json", None),
    (COMPLETION, "[1]", 400, "invalid_json", None),
    (COMPLETION, "[" * 100_000, 400, "invalid_json", None),
    (COMPLETION, b'{"prompt": "\xff"}', 400, "invalid_json", None),
    (COMPLETION, b'{"prompt": "\\ud800"}', 400, "invalid_json", None),
    (COMPLETION, '{"model":"smollm2","prompt":"a","temperature":NaN}', 400, "invalid_request", "temperature"),
    (COMPLETION, '{"model":"smollm2","prompt":"a","temperature":1e999}', 400, "invalid_request", "temperature"),
    (COMPLETION, '{"model":"smollm2","prompt":"a","max_tokens":' + "9" * 400 + "}", 400, "invalid_request", "max_tokens"),
    (COMPLETION, '{"model":"smollm2","prompt":"a","max_tokens":' + "9" * 5000 + "}", 400, "invalid_json", None),
    (COMPLETION, {"model": "smollm2"}, 400, "invalid_request", "prompt"),
    (COMPLETION, {"prompt": "a"}, 400, "invalid_request", "model"),
    (COMPLETION, completion(model=7), 400, "invalid_request", "model"),
    (COMPLETION, completion(model="gpt-9"), 404, "model_not_found", "model"),
    (COMPLETION, completion(prompt=""), 400, "empty_prompt", "prompt"),
    (COMPLETION, completion(prompt=[]), 400, "empty_prompt", "prompt"),
    (COMPLETION, completion(prompt=[[]]), 400, "empty_prompt", "prompt"),
    (COMPLETION, completion(prompt=["a", ""]), 400, "empty_prompt", "prompt"),
    (COMPLETION, completion(prompt=7), 400, "invalid_request", "prompt"),
    (COMPLETION, completion(prompt=["a", [1]]), 400, "invalid_request", "prompt"),
    (COMPLETION, completion(prompt=[1, -1]), 400, "invalid_token_id", "prompt"),
    (COMPLETION, completion(prompt=[1, 49152]), 400, "invalid_token_id", "prompt"),
    (COMPLETION, completion(prompt=[1, True]), 400, "invalid_token_id", "prompt"),
    (COMPLETION, completion(prompt=[1.0]), 400, "invalid_token_id", "prompt"),
    (COMPLETION, completion(prompt=[[1], [2**70]]), 400, "invalid_token_id", "prompt"),
    (COMPLETION, completion(stop_token_ids=[49152]), 400, "invalid_token_id", "stop_token_ids"),
    (COMPLETION, completion(logit_bias={"x": 1}), 400, "invalid_token_id", "logit_bias"),
    (COMPLETION, completion(logit_bias={"1": 101}), 400, "invalid_request", "logit_bias.1"),
    (COMPLETION, completion(max_tokens=0), 400, "invalid_request", "max_tokens"),
    (COMPLETION, completion(max_tokens=-1), 400, "invalid_request", "max_tokens"),
    (COMPLETION, completion(max_tokens="5"), 400, "invalid_request", "max_tokens"),
    (COMPLETION, completion(max_tokens=5.0), 400, "invalid_request", "max_tokens"),
    (COMPLETION, completion(max_tokens=True), 400, "invalid_request", "max_tokens"),
    (COMPLETION, completion(max_tokens=1000), 400, "context_length_exceeded", "max_tokens"),
    (COMPLETION, completion(prompt=[5] * 257), 400, "context_length_exceeded", "prompt"),
    (COMPLETION, completion(min_tokens=6, max_tokens=5), 400, "invalid_request", "min_tokens"),
    (COMPLETION, completion(temperature=-0.1), 400, "invalid_request", "temperature"),
    (COMPLETION, completion(temperature=2.1), 400, "invalid_request", "temperature"),
    (COMPLETION, completion(top_p=0), 400, "invalid_request", "top_p"),
    (COMPLETION, completion(presence_penalty=-2.5), 400, "invalid_request", "presence_penalty"),
    (COMPLETION, completion(frequency_penalty="1"), 400, "invalid_request", "frequency_penalty"),
    (COMPLETION, completion(seed=2**63), 400, "invalid_request", "seed"),
    (COMPLETION, completion(n=0), 400, "invalid_request", "n"),
    (COMPLETION, completion(n=17), 400, "invalid_request", "n"),
    (COMPLETION, completion(prompt=["a"] * 100, n=3), 400, "invalid_request", "prompt"),
    (COMPLETION, completion(logprobs=21), 400, "invalid_request", "logprobs"),
    (COMPLETION, completion(logprobs=True), 400, "invalid_request", "logprobs"),
    (COMPLETION, completion(stop=""), 400, "invalid_request", "stop"),
    (COMPLETION, completion(stop=["a"] * 17), 400, "invalid_request", "stop"),
    (COMPLETION, completion(stop=["a", 1]), 400, "invalid_request", "stop"),
    (COMPLETION, completion(stream="yes"), 400, "invalid_request", "stream"),
    (COMPLETION, completion(stream_options={"include_usage": 1}, stream=True), 400, "invalid_request", "stream_options.include_usage"),
    (COMPLETION, completion(stream_options={"x": 1}, stream=True), 400, "unknown_field", "stream_options.x"),
    (COMPLETION, completion(best_of=2), 400, "unsupported_parameter", "best_of"),
    (COMPLETION, completion(echo=True, logprobs=1), 400, "unsupported_parameter", "echo"),
    (COMPLETION, completion(suffix="x"), 400, "unsupported_parameter", "suffix"),
    (COMPLETION, completion(repetition_penalty=1.1), 400, "unsupported_parameter", "repetition_penalty"),
    (COMPLETION, completion(messages=[]), 400, "unknown_field", "messages"),
    *(
        (path, make(**{name: "x"}), 400, "unknown_field", name)
        for path, make in ((COMPLETION, completion), (CHAT, chat))
        for name in ("kv_transfer_params", "bootstrap_host", "bootstrap_room", "ticket", "room", "scope", "tenant", "request_id")
    ),
    (CHAT, {"model": "smollm2"}, 400, "invalid_request", "messages"),
    (CHAT, {"model": "smollm2", "messages": []}, 400, "empty_prompt", "messages"),
    (CHAT, {"model": "smollm2", "messages": "hi"}, 400, "invalid_request", "messages"),
    (CHAT, {"model": "smollm2", "messages": ["hi"]}, 400, "invalid_request", "messages[0]"),
    (CHAT, {"model": "smollm2", "messages": [{"role": "user"}]}, 400, "invalid_request", "messages[0].content"),
    (CHAT, say("x", role="pirate"), 400, "invalid_request", "messages[0].role"),
    (CHAT, say("x", role="tool", tool_call_id="1"), 400, "unsupported_content", "messages[0].role"),
    (CHAT, say("x", role="assistant", tool_calls=[{}]), 400, "unsupported_parameter", "messages[0].tool_calls"),
    (CHAT, say("x", ticket=1), 400, "unknown_field", "messages[0].ticket"),
    (CHAT, say([IMAGE]), 400, "unsupported_content", "messages[0].content[0]"),
    (CHAT, say([{"type": "text", "text": "a"}, {"type": "input_audio"}]), 400, "unsupported_content", "messages[0].content[1]"),
    (CHAT, say([]), 400, "invalid_request", "messages[0].content"),
    (CHAT, say([{"type": "text"}]), 400, "invalid_request", "messages[0].content[0].text"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "unsupported_parameter", "tools"),
    (CHAT, chat(tool_choice="required"), 400, "unsupported_parameter", "tool_choice"),
    (CHAT, chat(functions=[{}]), 400, "unsupported_parameter", "functions"),
    (CHAT, chat(response_format={"type": "json_object"}), 400, "unsupported_parameter", "response_format"),
    (CHAT, chat(modalities=["text", "audio"]), 400, "unsupported_parameter", "modalities"),
    (CHAT, chat(audio={"voice": "x"}), 400, "unsupported_parameter", "audio"),
    (CHAT, chat(web_search_options={}), 400, "unsupported_parameter", "web_search_options"),
    (CHAT, chat(reasoning_effort="low"), 400, "unsupported_parameter", "reasoning_effort"),
    (CHAT, chat(top_logprobs=2), 400, "invalid_request", "top_logprobs"),
    (CHAT, chat(max_tokens=1, max_completion_tokens=2), 400, "invalid_request", "max_completion_tokens"),
    (CHAT, chat(max_tokens=1000), 400, "context_length_exceeded", "max_tokens"),
    (CHAT, chat("word " * 300), 400, "context_length_exceeded", "messages"),
    ("/tokenize", {}, 400, "invalid_request", "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "invalid_request", "prompt"),
    ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model_not_found", "model"),
    ("/detokenize", {"tokens": [49152]}, 400, "invalid_token_id", "tokens"),
    ("/detokenize", {"tokens": "a"}, 400, "invalid_request", "tokens"),
]  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "body", "status", "code", "param"), BAD)
async def test_bad_input_is_refused_with_its_code_before_the_backend_hears_of_it(
    client: httpx.AsyncClient,
    backend: Any,
    path: str,
    body: Any,
    status: int,
    code: str,
    param: str | None,
    streamed: bool,
) -> None:
    if isinstance(body, dict):
        if streamed and path.startswith("/v1"):
            body = {"stream": True} | body
        body = json.dumps(body)
    response = await client.post(path, content=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error["message"]
    assert error["type"] == "invalid_request_error"
    assert response.headers["content-type"] == "application/json"
    assert backend.requests == []


async def test_stream_options_without_stream_are_refused(client: httpx.AsyncClient) -> None:
    response = await client.post(COMPLETION, json=completion(stream_options={"include_usage": True}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u"}, {"metadata": {"a": "b"}}, {"store": True}, {"service_tier": "auto"}, {"parallel_tool_calls": True},
        {"safety_identifier": "x"}, {"prompt_cache_key": "x"}, {"prediction": None}, {"tools": []}, {"tools": None},
        {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"modalities": ["text"]}, {"seed": None},
        {"temperature": 0}, {"temperature": 2}, {"top_p": 1}, {"seed": -(2**63)}, {"max_tokens": 3, "max_completion_tokens": 3},
        {"stop": None}, {"logit_bias": {"5": -100}}, {"top_k": -1}, {"reasoning_effort": None},
    ],
)  # fmt: skip
async def test_harmless_fields_and_values_at_their_edge_are_accepted(
    client: httpx.AsyncClient, field: dict[str, Any]
) -> None:
    response = await client.post(CHAT, json=chat(**field))
    assert response.status_code == 200, response.text


async def test_messages_say_the_numbers(client: httpx.AsyncClient) -> None:
    async def message(path: str, body: dict[str, Any]) -> str:
        return (await client.post(path, json=body)).json()["error"]["message"]

    assert "49152" in await message(COMPLETION, completion(prompt=[49152]))
    assert "smollm2" in await message(COMPLETION, completion(model="gpt-9"))
    assert "from 0 to 2" in await message(COMPLETION, completion(temperature=3))
    assert "1000" in await message(COMPLETION, completion(max_tokens=1000))


@pytest.mark.parametrize(("method", "path", "status", "code"), [
    ("GET", "/nothing", 404, "not_found"), ("POST", "/v1/chat/completions/", 404, "not_found"),
    ("GET", "/v1/completions", 405, "method_not_allowed"), ("DELETE", "/v1/models", 405, "method_not_allowed"),
    ("GET", "/v1/models/other", 404, "model_not_found"), ("GET", "/docs", 404, "not_found"),
])  # fmt: skip
async def test_wrong_paths_and_methods_answer_in_the_same_shape(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("declared", [True, False], ids=["content-length", "chunked"])
async def test_a_body_over_the_limit_is_refused_without_reading_all_of_it(
    make_app: Any, declared: bool
) -> None:
    read = 0

    async def body() -> Any:
        nonlocal read
        for _ in range(1000):
            read += 100
            yield b" " * 100

    headers = {"content-length": "100000"} if declared else {}
    client = client_of(make_app(settings=Settings(max_body=1000, drain=500)))
    response = await client.post(COMPLETION, content=body(), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert "1,000 bytes" in response.json()["error"]["message"]
    assert read <= (600 if declared else 1700)


async def test_an_enormous_text_is_refused_without_tokenising_all_of_it(
    make_app: Any, tokenizer: Any, backend: Any
) -> None:
    lengths: list[int] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def encode(self, text: str, add_special: bool = True) -> list[int]:
            lengths.append(len(text))
            return tokenizer.encode(text, add_special=add_special)

    from hermetic.gateway.app import create_app
    from hermetic.gateway.tenants import local_tenants

    client = client_of(create_app(backend, Counting(), local_tenants()))
    # The longest token has 81 characters, so the last two texts might by their length alone fit 256 tokens.
    for text in ("word " * 1_000_000, "x" * 5_000_000, "word " * 4_000, "Grüße, 東京! " * 1_600):
        for path, body in ((COMPLETION, completion(prompt=text)), (CHAT, chat(text))):
            for stream in (False, True):
                response = await client.post(path, json=body | {"stream": stream})
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
                assert "256" in error["message"]
                assert "at least" in error["message"]
    assert (
        sum(lengths) <= 2 * 4 * 256 * 8
    )  # two texts, asked four times each, of which a beginning was tokenised
    assert backend.requests == []


async def test_a_text_that_fits_is_served_at_the_limit_and_refused_one_over(
    client: httpx.AsyncClient, tokenizer: Any
) -> None:
    word = tokenizer.encode(" word", add_special=False)
    assert len(word) == 1
    for count, status in ((254, 200), (255, 200), (256, 400), (257, 400)):
        response = await client.post(COMPLETION, json=completion(prompt=" word" * count, max_tokens=1))
        assert response.status_code == status, count
    for max_tokens, status in ((55, 200), (56, 200), (57, 400)):
        response = await client.post(
            COMPLETION, json=completion(prompt=[word[0]] * 200, max_tokens=max_tokens)
        )
        assert response.status_code == status, max_tokens


def test_a_client_that_sends_its_whole_body_before_it_reads_still_gets_the_413(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        response = client.post(COMPLETION, content=b" " * (20 * 1024**2))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert client.post(COMPLETION, json=completion()).status_code == 200
