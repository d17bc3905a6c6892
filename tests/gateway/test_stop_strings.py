"""Stop strings: never a part of one in the text, the same however tokens cut it, and the choice is cancelled at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from driving import chat, completion
from hypothesis import given
from hypothesis import strategies as st
from scripted import ScriptedBackend

from hermetic.gateway.backend import Finish, Token
from hermetic.gateway.detok import StopMatcher

small = st.text("ab", max_size=12)


def by_the_character(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What must be shown: read character by character, stop at the first that completes a stop string."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(st.lists(small, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_however_text_is_cut_the_same_text_is_shown_and_never_taken_back(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown, stop = "", None
    for piece in pieces:
        released = matcher.push(piece)
        shown, stop = shown + released.text, released.stop
        if stop is not None:
            break
    else:
        shown += matcher.finish()
    assert (shown, stop) == by_the_character("".join(pieces), stops)


@given(small, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    released = matcher.push(text)
    held = "" if released.stop else matcher.finish()
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("stop", "text"), [
    (" is", "The capital of France"), ("ital o", "The cap"), ([" Par", "France is"], "The capital of "), ("The", ""),
    ("Paris.", "The capital of France is "), ("nothing like it", "The capital of France is Paris."),
])  # fmt: skip
async def test_text_ends_before_the_stop_string(
    client: httpx.AsyncClient, backend: ScriptedBackend, stop: Any, text: str, streamed: bool
) -> None:
    response = await client.post("/v1/completions", json=completion(stop=stop, stream=streamed, logprobs=1))
    if streamed:
        chunks = [
            json.loads(line[6:]) for line in response.text.split("\n\n") if line and "[DONE]" not in line
        ]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
    else:
        choices = response.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1]["finish_reason"] == "stop"
    tables = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert all(offset < len(text) for table in tables for offset in table["text_offset"])
    assert backend.streams[0].closed


async def test_usage_counts_the_tokens_up_to_the_stop_string_and_no_later_ones(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    answer = (await client.post("/v1/chat/completions", json=chat(stop=" of"))).json()
    assert answer["choices"][0]["message"]["content"] == "The capital"
    assert answer["choices"][0]["stop_reason"] == " of"
    assert answer["usage"]["completion_tokens"] == 3
    assert backend.streams[0].sent == 3  # nothing more was asked of the backend


async def test_of_several_choices_only_the_one_that_met_its_stop_string_is_cancelled(
    client: httpx.AsyncClient, backend: ScriptedBackend, tokenizer: Any
) -> None:
    stops, goes_on = (
        tokenizer.encode("one STOP", add_special=False),
        tokenizer.encode("two three four five"),
    )
    steps = [Token(0, token) for token in stops] + [Token(1, token) for token in goes_on]
    backend.scripts.append([*steps, Finish(1, "length")])
    answer = (await client.post("/v1/completions", json=completion(n=2, stop=" STOP"))).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "two three four five"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length"]
    assert backend.streams[0].cancelled == [0]
    assert answer["usage"]["completion_tokens"] == len(stops) + len(goes_on)


async def test_before_min_tokens_a_stop_string_is_text(client: httpx.AsyncClient) -> None:
    answer = (
        await client.post("/v1/completions", json=completion(stop=[" of", " Paris"], min_tokens=4))
    ).json()
    assert answer["choices"][0]["text"] == "The capital of France is"


async def test_of_several_prompts_the_one_that_met_its_stop_string_ends_while_the_others_go_on(
    client: httpx.AsyncClient, backend: ScriptedBackend, tokenizer: Any
) -> None:
    class EndOfFirst(asyncio.Event):
        async def wait(self) -> bool:
            while not backend.streams[0].closed:
                await asyncio.sleep(0)
            return True

    stops = tokenizer.encode("one STOP" + " two" * 50, add_special=False)
    backend.scripts += [
        [Token(0, token) for token in stops],
        [EndOfFirst(), Token(0, stops[0]), Finish(0, "length")],
    ]
    answer = (await client.post("/v1/completions", json=completion(prompt=["a", "b"], stop=" STOP"))).json()
    assert [choice["text"] for choice in answer["choices"]] == ["one", "one"]
    assert backend.streams[0].sent < len(stops)
