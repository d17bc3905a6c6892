"""The wire: bodies as the engines want them; answers as the engines write them, and whatever else may come."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermetic.audit.exchange import Ask
from hermetic.audit.wire import MAX_BYTES, Dialect, EventParser, Reading, body

# ------------------------------------------------------------------------------------ bodies


def fields(ask: Ask, dialect: Dialect | None = None, more: dict[str, Any] | None = None) -> dict[str, Any]:
    value = json.loads(body(ask, "m", dialect, more))
    assert isinstance(value, dict)
    return value


def test_completions_take_token_ids_and_a_system_text_in_front():
    asked = fields(Ask(tenant="t", prompt=(1, 2), endpoint="completions", stream=False, logprobs=True))
    assert asked == {
        "model": "m", "prompt": [1, 2], "max_tokens": 32, "temperature": 0.0, "stream": False, "logprobs": 1,
    }  # fmt: skip
    assert fields(Ask(tenant="t", prompt="b", system="a", endpoint="completions"))["prompt"] == "a\n\nb"


def test_generate_has_sglangs_own_names_and_extra_sampling_params_are_merged():
    ask = Ask(
        tenant="t", prompt=(1, 2), endpoint="generate", max_tokens=4, logprobs=True, request_id="r",
        extra={"sampling_params": {"regex": "("}, "lora_path": None},
    )  # fmt: skip
    assert fields(ask) == {
        "input_ids": [1, 2], "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "regex": "("}, "stream": True,
        "return_logprob": True, "return_text_in_logprobs": True, "rid": "r", "lora_path": None,
    }  # fmt: skip


def test_a_dialect_names_the_limit_otherwise_and_leaves_usage_out():
    asked = fields(
        Ask(tenant="t", prompt="p", request_id="r"),
        Dialect(False, "max_completion_tokens", True),
        {"room": 1},
    )
    assert "max_tokens" not in asked
    assert "stream_options" not in asked
    assert (asked["max_completion_tokens"], asked["rid"], asked["room"]) == (32, "r", 1)


def test_what_is_no_json_can_be_sent_on_purpose():
    sent = body(Ask(tenant="t", prompt="\ud800", extra={"top_p": math.nan}), "m")
    assert b"NaN" in sent
    assert b"\\ud800" in sent
    with pytest.raises(ValueError, match="chat takes text"):
        body(Ask(tenant="t", prompt=(1,)), "m")


# ------------------------------------------------------------------------------------ events


def whole(data: bytes) -> list[bytes]:
    parser = EventParser()
    return [*parser.feed(data), *parser.close()]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({min(place, len(data)) for place in places})
    return [data[a:b] for a, b in zip([0, *edges], [*edges, len(data)], strict=True)]


def plain_reference(data: bytes) -> list[bytes]:
    """Events by the standard's text, from the whole bytes at once."""
    text = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    events, current = [], []
    for line in [*text.split(b"\n"), b""]:
        if line == b"":
            if current:
                events.append(b"\n".join(current))
            current = []
        elif line.split(b":", 1)[0] == b"data":
            value = line.split(b":", 1)[1] if b":" in line else b""
            current.append(value[1:] if value[:1] == b" " else value)
    return events


pieces = st.sampled_from([b"data", b":", b" ", b"\n", b"\r", b"\r\n", b"\n\n", b"x", b"{}", b"id: 7", b"\xef\xbb\xbf", b": hello", b"data: [DONE]\n\n", b"\xff"])  # fmt: skip


@given(st.lists(pieces, max_size=40).map(b"".join), st.lists(st.integers(0, 200), max_size=12))
def test_events_are_the_same_however_the_bytes_are_cut(data: bytes, places: list[int]):
    parser = EventParser()
    found = [event for part in cut(data, places) for event in parser.feed(part)] + parser.close()
    assert found == plain_reference(data)


# ------------------------------------------------------------------------------------ answers


def read(data: bytes, places: list[int] | None = None, status: int = 200, kind: str = "text/event-stream", endpoint: Any = "chat") -> Reading:  # fmt: skip
    reading = Reading(endpoint, status, kind)
    for part in cut(data, places or []):
        reading.feed(part, 1.0)
    reading.end(2.0)
    return reading


def stream(*events: Any, done: bool = True) -> bytes:
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {line}\n\n" for line in [*lines, *(["[DONE]"] if done else [])]).encode()


def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish, **more}]}


@given(st.lists(st.text(min_size=1, max_size=8), max_size=6), st.lists(st.integers(0, 600), max_size=10))
def test_a_streams_text_is_the_pieces_however_it_is_cut(texts: list[str], places: list[int]):
    events = [chunk(text) for text in texts]
    reading = read(stream(*events, chunk("", "stop"), {"choices": [], "usage": {"prompt_tokens": 3}}), places)
    assert (reading.how(), reading.finish, reading.usage.prompt) == ("answered", "stop", 3)
    assert reading.text == "".join(texts)
    assert [token.text for token in reading.tokens] == texts
    assert reading.first == (1.0 if texts else None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "message", "content", "text", "error", "usage", "logprobs", "tokens",
             "token_logprobs", "meta_info", "finish_reason", "output_token_logprobs", "completion_tokens", "code",
             "prompt_tokens", "index", "id", "type", "detail", "object", "tool_calls", "function", "output_ids"]
        ),
        inner, max_size=4,
    ),
    max_leaves=14,
)  # fmt: skip


@given(
    st.lists(json_values.map(json.dumps) | st.text(max_size=10), max_size=4),
    st.lists(st.integers(0, 300), max_size=6),
    st.sampled_from(["chat", "completions", "generate"]),
    st.sampled_from([200, 201, 302, 400, 429, 500]),
    st.sampled_from(["text/event-stream", "application/json", ""]),
)
def test_whatever_comes_is_read_without_an_exception_and_the_same_however_it_is_cut(
    events: list[str], places: list[int], endpoint: Any, status: int, kind: str
):
    data = stream(*events) if kind == "text/event-stream" else "".join(events).encode("utf-8", "replace")
    parts, at_once = read(data, places, status, kind, endpoint), read(data, None, status, kind, endpoint)
    assert (parts.how(), parts.text, parts.tokens, parts.error) == (
        at_once.how(), at_once.text, at_once.tokens, at_once.error,
    )  # fmt: skip


@given(st.binary(max_size=200), st.sampled_from(["text/event-stream", "application/json"]))
def test_bytes_that_are_no_answer_are_never_an_answer(data: bytes, kind: str):
    assert read(data, kind=kind).how() == "garbled"


def test_logprobs_of_chat_and_of_completions_are_tokens():
    chat = read(stream(chunk("ab", logprobs={"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1}]}), chunk("", "stop")))  # fmt: skip
    assert [(t.text, t.logprob) for t in chat.tokens] == [("a", -0.5), ("b", -1.0)]
    # As captured from vLLM 0.32, shortened.
    probs = {
        "text_offset": [0, 6],
        "token_logprobs": [-0.27, -0.39],
        "tokens": [" Paris", "."],
        "top_logprobs": [{}, {}],
    }
    answer = {"id": "cmpl-9", "choices": [{"index": 0, "text": " Paris.", "logprobs": probs, "finish_reason": "length"}],
              "usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}}  # fmt: skip
    reading = read(json.dumps(answer).encode(), kind="application/json", endpoint="completions")
    assert [(t.text, t.logprob) for t in reading.tokens] == [(" Paris", -0.27), (".", -0.39)]
    assert (reading.how(), reading.text, reading.first, reading.server_id) == (
        "answered",
        " Paris.",
        None,
        "cmpl-9",
    )


@pytest.mark.parametrize(
    "count", ["1" + "0" * 400, "-" + "9" * 30, "true", "2.5", '"7"', "[1]", "9007199254740992"]
)
def test_a_count_that_nothing_can_count_is_none(count: str):
    reading = Reading("completions", 200)
    reading.feed(
        b'{"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"prompt_tokens": %s}}'
        % count.encode(),
        0.1,
    )
    reading.end(0.2)
    assert (reading.how(), reading.text, reading.usage.prompt) == ("answered", "x", None)


def test_a_logprob_that_is_no_number_is_none():
    reading = read(stream(json.dumps(chunk("a", logprobs={"content": [{"token": "a", "logprob": math.nan}]})), chunk("", "stop")))  # fmt: skip
    assert [(t.text, t.logprob) for t in reading.tokens] == [("a", None)]


def meta(made: int, probs: list[Any] | None = None, reason: Any = None) -> dict[str, Any]:
    more = {} if probs is None else {"output_token_logprobs": probs}
    return {"id": "r", "prompt_tokens": 9, "completion_tokens": made, "cached_tokens": 4, "finish_reason": reason, **more}  # fmt: skip


def test_sglangs_native_stream_grows_or_comes_in_pieces():
    end = {"type": "length", "length": 2}
    one, two = [-0.1, 5, "he"], [-0.2, 6, "y"]
    grows = read(
        stream(
            {"text": "he", "output_ids": [5], "meta_info": meta(1, [one])},
            {"text": "hey", "output_ids": [5, 6], "meta_info": meta(2, [one, two], end)},
        ),
        endpoint="generate",
    )
    apart = read(
        stream(
            {"text": "he", "output_ids": [5], "meta_info": meta(1, [one])},
            {"text": "y", "output_ids": [6], "meta_info": meta(2, [two], end)},
        ),
        endpoint="generate",
    )
    for reading in (grows, apart):
        assert (reading.how(), reading.text, reading.finish) == ("answered", "hey", "length")
        assert [(t.text, t.logprob) for t in reading.tokens] == [("he", -0.1), ("y", -0.2)]
        assert (reading.usage.prompt, reading.usage.completion, reading.usage.cached) == (9, 2, 4)


def test_the_same_piece_twice_in_pieces_is_not_taken_for_growth():
    events = [{"text": "ass", "output_ids": [520], "meta_info": meta(n + 1, None, None)} for n in range(3)]
    events[-1]["meta_info"]["finish_reason"] = {"type": "length", "length": 3}
    assert read(stream(*events), endpoint="generate").text == "assassass"


def test_sglangs_native_refusal_is_a_refusal_although_it_has_a_token_and_status_200():
    # As captured from 0.5.23: over capacity, streaming.
    reason = {"type": "abort", "message": "Input length (3000 tokens) exceeds", "status_code": 400, "err_type": "BadRequestError"}  # fmt: skip
    reading = read(stream({"text": "", "output_ids": [0], "meta_info": {"id": "d", "finish_reason": reason, "prompt_tokens": 1, "completion_tokens": 1}}), endpoint="generate")  # fmt: skip
    assert (reading.how(), reading.error, reading.tokens) == (
        "refused",
        "Input length (3000 tokens) exceeds",
        [],
    )


@pytest.mark.parametrize(
    ("error", "how", "said"),
    [
        # Captured: vLLM 0.32, SGLang 0.5.23 (chat, then an event of a stream), FastAPI, TGI, llama.cpp's form.
        ({"error": {"message": "max_tokens must be at least 1", "type": "BadRequestError", "code": 400}}, "refused", "max_tokens"),
        ({"object": "error", "message": "Input length", "type": "BadRequestError", "param": None, "code": 400}, "refused", "Input length"),
        ({"error": {"object": "error", "message": "Input length", "type": "BAD_REQUEST", "code": 400}}, "refused", "Input length"),
        ({"error": {"message": "m", "code": "context_length_exceeded", "type": "invalid_request_error"}}, "refused", "m"),
        # TGI's `ErrorResponse`: with a status of its own these are 422, 429 and 424.
        ({"error": "Input validation error", "error_type": "validation"}, "refused", "Input validation error"),
        ({"error": "Model is overloaded", "error_type": "overloaded"}, "limited", "Model is overloaded"),
        ({"error": "Request failed during generation", "error_type": "generation"}, "failed", "during generation"),
        ({"error": {"message": "boom", "code": 500, "type": "server_error"}}, "failed", "boom"),
        ({"error": {"message": "slow", "code": "429"}}, "limited", "slow"),
        ({"error": {"message": "m", "code": "4" * 5000}}, "failed", "m"),  # more digits than Python's int takes
    ],
)  # fmt: skip
def test_an_error_with_status_200_says_whose_fault_it_is(error: dict[str, Any], how: str, said: str):
    for data, kind in (
        (stream(error), "text/event-stream"),
        (json.dumps(error).encode(), "application/json"),
    ):
        reading = read(data, kind=kind)
        assert reading.how() == how
        assert said in reading.error


def test_errors_with_a_status_are_read_in_every_form_and_otherwise_shown_as_they_came():
    for said in ('{"detail":"Not Found"}', '{"message":"Not Found"}', '{"error":"Not Found"}', "Not Found\n"):
        reading = read(said.encode(), status=404, kind="application/json")
        assert (reading.how(), reading.error) == ("refused", "Not Found")
    assert read(b"", status=502, kind="").how() == "failed"


def test_an_abort_that_says_nothing_of_its_status_is_a_failure_that_keeps_its_reason():
    reading = read(stream(chunk("some text"), chunk("", "abort")))
    assert (reading.how(), reading.finish, reading.error) == ("failed", "abort", "finish_reason abort")


def test_an_answer_without_a_reason_for_its_end_is_an_answer_without_one():
    answer = {"choices": [{"index": 0, "message": {"content": "x"}}]}
    reading = read(json.dumps(answer).encode(), kind="application/json")
    assert (reading.how(), reading.text, reading.finish) == ("answered", "x", None)
    assert read(stream(chunk("x"))).how() == "answered"  # [DONE], and no reason
    assert read(stream(chunk("x"), done=False)).how() == "cut"


def test_what_comes_after_the_end_is_kept_to_be_read():
    """Whose is it? The pieces of another's stream would come so."""
    reading = read(stream(chunk("x", "stop")) + stream(chunk("somebody else's")))
    assert reading.how() == "garbled"
    assert "somebody else's" in reading.garbled


def test_a_reason_without_a_word_is_none_yet():
    """TGI's completions: each piece has a finish_reason, "" until the last."""
    piece = {"choices": [{"index": 0, "text": "x", "finish_reason": ""}]}
    last = {"choices": [{"index": 0, "text": "y", "finish_reason": "length"}]}
    begun = read(stream(piece, done=False), endpoint="completions")
    assert (begun.how(), begun.finish, begun.finished) == ("cut", None, False)
    over = read(stream(piece, last), endpoint="completions")
    assert (over.how(), over.finish, over.text) == ("answered", "length", "xy")


def test_an_error_in_a_field_of_its_own_is_one():
    """llama.cpp's server, until late in 2025: `error: {...}` where `data: {...}` stands else."""
    said = {
        "code": 400,
        "message": "the request exceeds the available context size",
        "type": "exceed_context_size_error",
    }
    reading = read(b"error: " + json.dumps(said).encode() + b"\n\n")
    assert (reading.how(), reading.error) == ("refused", "the request exceeds the available context size")


def test_everything_that_was_made_from_a_prompt_is_text():
    delta = {"reasoning_content": "r", "content": "c", "tool_calls": [{"function": {"arguments": "{1}"}}]}
    event = {"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]}
    assert read(stream(event)).text == "rc{1}"
    second = {"choices": [{"index": 1, "delta": {"content": "other"}, "finish_reason": "stop"}]}
    reading = read(stream(chunk("mine"), second, chunk("", "length")))
    assert (reading.text, reading.finish, reading.how()) == ("mine\nother", "length", "answered")


def test_a_stream_that_goes_on_after_its_end_is_garbled():
    assert read(stream(chunk("x", "stop")) + stream(chunk("y"))).how() == "garbled"


def test_a_stream_that_does_not_say_it_is_one_is_read_all_the_same():
    reading = read(stream(chunk("x", "stop")), [2, 5], kind="application/octet-stream")
    assert (reading.how(), reading.text, reading.streamed) == ("answered", "x", True)


@pytest.mark.timeout(60)  # a line that is copied anew with each piece would take hours
def test_a_long_line_costs_what_it_is_long_however_small_its_pieces_are():
    parser, piece = EventParser(), b"x" * 64
    assert parser.feed(b"data: ") == []
    for _ in range(256 * 1024):
        parser.feed(piece)
    (event,) = parser.feed(b"\n\n")
    assert len(event) == 64 * 256 * 1024


def test_more_than_an_answer_can_hold_is_garbled_and_not_kept():
    reading = Reading("chat", 200, "application/json")
    for _ in range(MAX_BYTES // 2**20 + 2):
        reading.feed(b"x" * 2**20, 0.0)
    assert (reading.how(), len(reading.excerpt) < 1000) == ("garbled", True)
