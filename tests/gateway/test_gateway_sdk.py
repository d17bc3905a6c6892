"""The OpenAI Python SDK against the app on a real socket: what a user's program sees."""

from __future__ import annotations

import openai
import pytest
from scripted import ScriptedBackend

from hermetic.gateway.backend import Failed, Refused, Token

REPLY = "The capital of France is Paris."
ASK = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def sdk(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def test_chat_completion_streaming_and_logprobs_work_as_documented(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == ["smollm2"]
    assert sdk.models.retrieve("smollm2").id == "smollm2"
    answer = sdk.chat.completions.create(model="smollm2", messages=ASK, logprobs=True, top_logprobs=2, n=2)
    assert [choice.message.content for choice in answer.choices] == [REPLY, REPLY]
    assert "".join(entry.token for entry in answer.choices[1].logprobs.content) == REPLY
    stream = sdk.chat.completions.create(
        model="smollm2", messages=ASK, stream=True, stream_options={"include_usage": True}, logprobs=True
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    assert chunks[-1].usage == answer.usage.model_copy(
        update={"completion_tokens": 8, "total_tokens": chunks[-1].usage.prompt_tokens + 8}
    )
    text = sdk.completions.create(model="smollm2", prompt=["a", "b"], logprobs=1)
    assert [choice.text for choice in text.choices] == [REPLY, REPLY]
    assert text.choices[0].logprobs.tokens[0] == "The"
    assert (
        "".join(c.choices[0].text for c in sdk.completions.create(model="smollm2", prompt="a", stream=True))
        == REPLY
    )


def test_vllms_extra_fields_go_through_extra_body(sdk: openai.OpenAI, backend: ScriptedBackend) -> None:
    sdk.chat.completions.create(
        model="smollm2", messages=ASK, extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True}
    )
    params = backend.requests[0].params
    assert (params.top_k, params.min_p, params.ignore_eos) == (5, 0.1, True)


def test_errors_arrive_as_the_sdks_own_types(sdk: openai.OpenAI, backend: ScriptedBackend) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        sdk.chat.completions.create(model="smollm2", messages=ASK, max_tokens=10_000, stream=True)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="gpt-9", prompt="a")
    assert missing.value.code == "model_not_found"
    backend.scripts.append(Refused("overloaded", "full", 429, retry_after=1))
    with pytest.raises(openai.RateLimitError):
        sdk.completions.create(model="smollm2", prompt="a")
    backend.scripts.append([Token(0, 504), Failed("kv_integrity", "page 7 does not verify")])
    with pytest.raises(openai.APIError, match="page 7 does not verify"):
        list(sdk.completions.create(model="smollm2", prompt="a", stream=True))
    assert sdk.completions.create(model="smollm2", prompt="a").choices[0].text == REPLY


def test_a_failed_request_that_may_be_repeated_is_repeated_by_the_sdk(
    url: str, backend: ScriptedBackend
) -> None:
    backend.scripts.append(Refused("not_ready", "starting", 503, retry_after=0.1))
    sdk = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=1)
    assert sdk.completions.create(model="smollm2", prompt="a").choices[0].text == REPLY
