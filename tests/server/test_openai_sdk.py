"""The OpenAI SDK against a real disaggregated server. What is expected comes from the API's documentation."""

from __future__ import annotations

import math

import pytest
from openai import OpenAI
from serving import Server


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat_answers_a_question_the_model_knows(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_what_the_whole_answer_says(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=24)
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_completion_continues_text_and_token_ids_alike(client: OpenAI, server: Server) -> None:
    import httpx

    prompt = "The capital of France is"
    ids = httpx.post(f"{server.url}/tokenize", json={"model": "smollm2", "prompt": prompt}).json()["tokens"]
    by_text = client.completions.create(model="smollm2", prompt=prompt, max_tokens=8, temperature=0)
    by_ids = client.completions.create(model="smollm2", prompt=ids, max_tokens=8, temperature=0)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert "Paris" in by_text.choices[0].text


def test_logprobs_are_probabilities_and_the_greedy_token_is_the_likeliest(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=6, logprobs=True, top_logprobs=5
    )
    for item in answer.choices[0].logprobs.content:
        assert item.top_logprobs[0].token == item.token
        assert item.logprob == pytest.approx(item.top_logprobs[0].logprob, abs=1e-6)
        assert 0 < sum(math.exp(t.logprob) for t in item.top_logprobs) <= 1 + 1e-5
        assert bytes(item.bytes).decode(errors="replace") == item.token


def test_a_batch_of_prompts_gives_one_choice_each_in_order(client: OpenAI) -> None:
    prompts = ["One, two, three,", "The sun rises in the"]
    both = client.completions.create(model="smollm2", prompt=prompts, max_tokens=4, temperature=0)
    alone = [
        client.completions.create(model="smollm2", prompt=p, max_tokens=4, temperature=0).choices[0].text
        for p in prompts
    ]
    assert [c.text for c in sorted(both.choices, key=lambda c: c.index)] == alone


def test_choices_of_one_request_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    ask = {"model": "smollm2", "messages": QUESTION, "n": 4, "temperature": 1.3, "max_tokens": 16, "seed": 11}
    first = [c.message.content for c in client.chat.completions.create(**ask).choices]
    again = [c.message.content for c in client.chat.completions.create(**ask).choices]
    assert first == again
    assert len(set(first)) > 1


def test_a_stop_string_ends_the_text_before_it(client: OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="1, 2, 3, 4, 5,", max_tokens=30, temperature=0, stop=[" 8"]
    )
    assert " 8" not in answer.choices[0].text
    assert "7" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


def test_the_model_list_shows_the_derived_context_and_the_pools(client: OpenAI, limit: int) -> None:
    (model,) = client.models.list().data
    shown = model.model_dump()
    assert shown["max_model_len"] == limit
    assert shown["hermetic"]["pool_tokens"] == {
        "prefill-0": 1072,
        "decode-0": 4320,
    }  # 96 MiB / 372,736 = 270 pages
