"""`hermetic chat` against a real socket, and against servers that are not there or say no."""

from __future__ import annotations

import io
from typing import Any

import pytest
from scripted import ScriptedBackend

from hermetic.chat import ChatError, ChatOptions, Client, _pieces, api_base, main
from hermetic.gateway.backend import Failed, Refused, Token

REPLY = "The capital of France is Paris."


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_message_is_answered_once(
    url: str, backend: ScriptedBackend, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ChatOptions(url, system="Be brief.", temperature=0.0, max_tokens=50)
    assert main(options, ["What", "is it?"]) == 0
    assert capsys.readouterr().out == REPLY + "\n"
    request = backend.requests[0]
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]
    assert list(request.tokens) == tokenizer.apply_chat(said, add_generation_prompt=True)
    assert (request.params.temperature, request.params.max_tokens) == (0.0, 50)


def test_standard_input_that_is_no_terminal_is_one_message(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(ChatOptions(url), stdin=io.StringIO("What is it?\n")) == 0
    assert capsys.readouterr().out == REPLY + "\n"
    assert main(ChatOptions(url), stdin=io.StringIO("\n")) == 1
    assert "no message" in capsys.readouterr().err


def test_at_a_prompt_the_conversation_is_kept_until_reset(
    url: str,
    backend: ScriptedBackend,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = iter(["one", "", "/what", "two", "/reset", "three", "/quit", "never"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    assert main(ChatOptions(url), stdin=Terminal()) == 0

    def conversation(*texts: str) -> list[int]:
        roles = ("user", "assistant") * len(texts)
        said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return tokenizer.apply_chat(said, add_generation_prompt=True)

    asked = [list(request.tokens) for request in backend.requests]
    assert asked == [conversation("one"), conversation("one", REPLY, "two"), conversation("three")]
    assert "/reset forgets" in capsys.readouterr().out


def test_end_of_input_ends_the_prompt(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    assert main(ChatOptions(url), stdin=Terminal()) == 0


def test_errors_are_one_clear_line(
    url: str, backend: ScriptedBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(options: ChatOptions) -> str:
        assert main(options, ["hi"]) == 1
        return capsys.readouterr().err

    assert "hermetic serve" in error(ChatOptions("http://127.0.0.1:1"))
    assert "not a URL" in error(ChatOptions("nonsense"))
    assert "model_not_found" in error(ChatOptions(url, model="gpt-9"))
    backend.scripts.append(Refused("overloaded", "the queue is full", 429))
    assert "the queue is full [overloaded]" in error(ChatOptions(url))
    backend.scripts.append([Token(0, 504), Failed("kv_integrity", "page 7 does not verify")])
    assert "page 7 does not verify" in error(ChatOptions(url))
    assert "nothing at this path" in error(ChatOptions(url + "/elsewhere"))


def test_a_failed_answer_is_not_part_of_the_conversation(
    url: str, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.scripts.append([Token(0, 504), Failed("kv_integrity", "bad page")])
    lines = iter(["one", "two", "/quit"])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    assert main(ChatOptions(url), stdin=Terminal()) == 0
    assert backend.requests[1].tokens[-8:] != backend.requests[0].tokens[-8:]
    assert len(backend.requests[1].tokens) == len(backend.requests[0].tokens)


def test_control_characters_of_an_answer_do_not_reach_the_terminal(
    url: str, backend: ScriptedBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.reply = "a\x1b[2Jb [red]c[/red]"
    assert main(ChatOptions(url), ["hi"]) == 0
    assert capsys.readouterr().out == "a[2Jb [red]c[/red]\n"


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_the_url_may_or_may_not_end_in_v1(url: str) -> None:
    assert api_base(url) == "http://h:1/v1"


def test_the_first_served_model_is_used(url: str) -> None:
    import httpx

    with httpx.Client(base_url=api_base(url)) as http:
        assert Client(ChatOptions(url), http).connect() == "smollm2"


def test_a_stream_that_ends_without_done_is_an_error() -> None:
    event = 'data: {"choices": [{"delta": {"content": "half"}}]}'
    assert list(_pieces(iter([event, "", ": comment", "data: [DONE]"]))) == [("half", None)]
    with pytest.raises(ChatError, match="broke off"):
        list(_pieces(iter([event])))
    with pytest.raises(ChatError, match="not JSON"):
        list(_pieces(iter(["data: {"])))
