"""Answers in OpenAI's shapes: whole and streamed, chat and completion, with log probabilities, n, echo and batches."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest
from driving import chat, completion
from scripted import ScriptedBackend

from hermetic.gateway.backend import Finish, Token

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
REPLY = "The capital of France is Paris."


def events(response: httpx.Response) -> list[Any]:
    """The stream's events; the last must be [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", response.text
    return [json.loads(line) for line in lines[:-1]]


async def test_a_chat_answer_has_openais_shape_and_counts_its_tokens(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    answer = (await client.post(CHAT, json=chat())).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": REPLY, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"], choice["index"]) == ("stop", None, 0)
    # The captured vLLM answer to the same words has 8 completion tokens: 7 of text and end-of-sequence.
    assert answer["usage"] == {
        "prompt_tokens": len(backend.requests[0].tokens),
        "completion_tokens": 8,
        "total_tokens": len(backend.requests[0].tokens) + 8,
    }


async def test_the_backend_gets_the_templates_tokens_the_tenants_scope_and_what_the_window_leaves(
    client: httpx.AsyncClient, backend: ScriptedBackend, tokenizer: Any
) -> None:
    await client.post(CHAT, json=chat("Hi", temperature=0.5, top_k=7, seed=11, stop_token_ids=[9]))
    request = backend.requests[0]
    assert list(request.tokens) == tokenizer.apply_chat(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert (request.tenant, request.scope, request.n) == ("local", "tenant:local", 1)
    params = request.params
    assert (params.temperature, params.top_k, params.seed, params.stop_token_ids) == (0.5, 7, 11, (9,))
    assert params.max_tokens == 256 - len(request.tokens)


async def test_text_parts_are_joined_and_developer_means_system(
    client: httpx.AsyncClient, backend: ScriptedBackend, tokenizer: Any
) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    await client.post(CHAT, json={"model": "smollm2", "messages": messages})
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is this?"}]
    assert list(backend.requests[0].tokens) == tokenizer.apply_chat(plain, add_generation_prompt=True)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_a_stream_says_the_same_as_the_whole_answer(
    client: httpx.AsyncClient, backend: ScriptedBackend, path: str
) -> None:
    backend.reply = "Grüße aus 東京 🗼! Paris, naïve."
    body = (chat if path == CHAT else completion)(
        n=2, **({"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2})
    )
    whole = (await client.post(path, json=body)).json()
    streamed = await client.post(
        path, json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert streamed.headers["content-type"].startswith("text/event-stream")
    chunks = events(streamed)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    for index, choice in enumerate(whole["choices"]):
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"] == "stop"
        if path == CHAT:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert (
                "".join(part["delta"].get("content", "") for part in parts)
                == backend.reply
                == choice["message"]["content"]
            )
            infos = [info for part in parts if part["logprobs"] for info in part["logprobs"]["content"]]
            assert infos == choice["logprobs"]["content"]
        else:
            assert "".join(part["text"] for part in parts) == backend.reply == choice["text"]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert [v for part in parts if part["logprobs"] for v in part["logprobs"][key]] == choice[
                    "logprobs"
                ][key]


async def test_without_include_usage_no_chunk_has_usage(client: httpx.AsyncClient) -> None:
    chunks = events(await client.post(CHAT, json=chat(stream=True)))
    assert all("usage" not in chunk for chunk in chunks)


async def test_chat_logprobs_name_token_bytes_and_alternatives(client: httpx.AsyncClient) -> None:
    answer = (await client.post(CHAT, json=chat(logprobs=True, top_logprobs=3, max_tokens=2))).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"]) for entry in content] == [("The", -0.25), (" capital", -0.5)]
    assert content[1]["bytes"] == list(b" capital")
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-0.25, -12.0, -9999.0]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (await client.post(CHAT, json=chat(logprobs=True))).json()["choices"][0]["logprobs"]["content"][0][
        "top_logprobs"
    ] == []


async def test_completion_logprobs_have_offsets_into_the_text(client: httpx.AsyncClient) -> None:
    choice = (await client.post(COMPLETION, json=completion(logprobs=1))).json()["choices"][0]
    table = choice["logprobs"]
    assert "".join(table["tokens"]) == choice["text"] == REPLY  # end-of-sequence is not among them
    for token, offset in zip(table["tokens"], table["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert table["top_logprobs"][0] == {"The": -0.25}


async def test_batches_of_prompts_number_their_choices_by_prompt_and_then_by_n(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    for prompts, lengths in ((["a b", "c"], [2, 1]), ([[5, 6], [7]], [2, 1])):
        backend.requests.clear()
        answer = (await client.post(COMPLETION, json=completion(prompt=prompts, n=2, max_tokens=2))).json()
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [len(request.tokens) for request in backend.requests] == lengths
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}


async def test_echo_puts_the_prompt_before_the_text(client: httpx.AsyncClient, tokenizer: Any) -> None:
    for prompt in ("Say: ", tokenizer.encode("Say: ")):
        answer = (await client.post(COMPLETION, json=completion(prompt=prompt, echo=True))).json()
        assert answer["choices"][0]["text"] == "Say: " + REPLY
        chunks = events(await client.post(COMPLETION, json=completion(prompt=prompt, echo=True, stream=True)))
        assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == "Say: " + REPLY


async def test_a_stop_token_ends_the_answer_is_left_out_of_the_text_and_counts(
    client: httpx.AsyncClient, backend: ScriptedBackend, tokenizer: Any
) -> None:
    the, capital, of = tokenizer.encode("The capital of", add_special=False)
    backend.scripts.append(
        [Token(0, the, -1.0), Token(0, capital, -1.0), Token(0, of, -1.0), Finish(0, "stop", of)]
    )
    answer = (await client.post(COMPLETION, json=completion(stop_token_ids=[of], logprobs=0))).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("The capital", "stop", of)
    assert choice["logprobs"]["tokens"] == ["The", " capital"]
    assert answer["usage"]["completion_tokens"] == 3


async def test_a_stop_token_that_did_not_end_the_answer_is_text(
    client: httpx.AsyncClient, backend: ScriptedBackend, tokenizer: Any
) -> None:
    the, capital, of = tokenizer.encode("The capital of", add_special=False)
    backend.scripts.append([Token(0, the), Token(0, capital), Token(0, of), Finish(0, "length")])
    answer = (await client.post(COMPLETION, json=completion(stop_token_ids=[capital, of]))).json()
    assert answer["choices"][0]["text"] == "The capital of"


async def test_half_a_character_is_never_sent(
    client: httpx.AsyncClient, backend: ScriptedBackend, tokenizer: Any
) -> None:
    backend.reply = "日本語 🗼"
    assert len(tokenizer.encode(backend.reply)) > len(backend.reply)  # so some characters take several tokens
    chunks = events(await client.post(COMPLETION, json=completion(stream=True)))
    texts = [c["text"] for chunk in chunks for c in chunk["choices"]]
    assert "".join(texts) == backend.reply
    assert all("\ufffd" not in text for text in texts)


async def test_an_end_token_that_only_the_worker_knew_is_no_text_and_has_no_logprob(
    client: httpx.AsyncClient, backend: ScriptedBackend, tokenizer: Any
) -> None:
    (start,) = tokenizer.encode("<|im_start|>", add_special=False)
    assert start != tokenizer.eos_token_id
    backend.scripts.append([Token(0, 504, -1.0), Token(0, start, -1.0), Finish(0, "stop", start)])
    answer = (await client.post(COMPLETION, json=completion(logprobs=0))).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"], choice["finish_reason"]) == ("The", ["The"], "stop")
    assert answer["usage"]["completion_tokens"] == 2


async def test_a_model_without_a_chat_template_and_a_template_that_refuses_say_so(
    backend: ScriptedBackend, tokenizer: Any
) -> None:
    from driving import client_of

    from hermetic.gateway.app import create_app
    from hermetic.gateway.tenants import local_tenants
    from hermetic.model.tokenizer import Tokenizer

    refusing = "{{ raise_exception('roles must alternate') }}"
    for template, code, words in (
        (None, "no_chat_template", "chat template"),
        (refusing, "invalid_request", "must alternate"),
    ):
        pretrained = copy.deepcopy(tokenizer._pretrained)
        pretrained.chat_template = template
        client = client_of(create_app(backend, Tokenizer(pretrained), local_tenants()))
        response = await client.post(CHAT, json=chat())
        assert (response.status_code, response.json()["error"]["code"]) == (400, code)
        assert words in response.json()["error"]["message"]
        assert (await client.post(COMPLETION, json=completion())).status_code == 200
