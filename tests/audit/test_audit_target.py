"""The target: whatever a server does becomes one Answer in time; what cannot be audited is an error that says what to change."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import re
import socket
import ssl
import subprocess
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from scripted_endpoint import (
    Request,
    ScriptedEndpoint,
    SmallEngine,
    Wire,
    chat_event,
    say,
    serving,
    usage_event,
)

from hermetic.audit.address import read_address, shown
from hermetic.audit.engines import recognise
from hermetic.audit.exchange import Ask
from hermetic.audit.target import (
    AFTER_DONE,
    FIRST_WAIT,
    TargetError,
    TargetOptions,
    open_target,
)


def ask(**more: Any) -> Ask:
    return Ask(**{"tenant": "t", "prompt": "hello there", "within": 5.0, **more})


async def silence(request: Request, wire: Wire) -> None:
    await asyncio.Event().wait()


async def hello(request: Request, wire: Wire) -> None:
    await say(wire, "Hel", "lo")


# ------------------------------------------------------------------------------------ addresses


def test_a_plain_url_is_one_server_with_or_without_the_path_of_an_endpoint():
    for url in ("http://h:1", "http://h:1/", "http://h:1/chat/completions"):
        assert read_address([url]).servers == ("http://h:1",)
    assert read_address(["https://h/api/v1/chat/completions"]).servers == ("https://h/api/v1",)


def test_a_pair_is_read_with_its_bootstrap_port():
    address = read_address(["sglang-pd://10.0.0.1:31100,http://h:31200?bootstrap_port=9001"])
    assert address.servers == ("http://10.0.0.1:31100", "http://h:31200")
    assert (address.bootstrap_host, address.bootstrap_port) == ("10.0.0.1", 9001)
    assert read_address(["sglang-pd://a:1,b:2"]).bootstrap_port == 8998


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        ([], "name a server"),
        (["127.0.0.1:8000"], "write http://"),
        (["localhost:8000"], "write http://"),
        (["not a url"], "not a URL"),
        (["http://"], "names no host"),
        (["http://h:99999"], "not a URL"),
        (["ftp://h/x"], "no such kind of target as 'ftp'"),
        (["http://u:secret-word@h/"], "--api-key"),
        (["http://h/?key=secret-word"], "--api-key"),
        (["u:secret-word@h:8000"], "write http://"),
        (["http://u:secret-word@[::1"], "not a URL"),
        (["gopher://h/?key=secret-word"], "no such kind of target"),
        (["sglang-pd://a:1,b:2?api_key=secret-word"], "leave it out"),
        (["sglang-pd://a:1,b:2?bootstrap_port=0&x=secret-word"], "leave it out"),
        (["http://h/\x01"], "not a URL"),
        (["http://\u202eh"], "not a URL"),
        (["sglang-pd://a:1"], "two different servers"),
        (["sglang-pd://a:1,a:1"], "two different servers"),
        (["sglang-pd://a:1,b:2?bootstrap_port=x"], "from 1 to 65535"),
        ([f"sglang-pd://a:1,b:2?bootstrap_port={'9' * 5000}"], "from 1 to 65535"),
        (["sglang-pd://a:1,b:2?port=8"], "leave it out"),
        (["vllm-pd://a:1,b:2?bootstrap_port=8998"], "leave it out"),
        (["vllm-pd://a:1,b:2", "http://h"], "one URL"),
    ],
)
def test_a_url_that_cannot_be_used_says_what_to_change(urls: list[str], said: str):
    with pytest.raises(TargetError, match=said) as caught:
        read_address(urls)
    assert "secret-word" not in str(caught.value)


def test_a_url_is_shown_without_what_could_be_secret():
    assert shown("http://u:secret-word@h:1/v1?key=secret-word#x") == "http://h:1/v1"
    assert (
        shown("sglang-pd://u:secret-word@a:1,u:secret-word@b:2?bootstrap_port=9&key=secret-word")
        == "sglang-pd://a:1,b:2?bootstrap_port=9"
    )


# ------------------------------------------------------------------------------------ opening


async def test_no_server_there_is_said_with_its_address():
    async with serving(hello) as endpoint:
        pass  # it is gone again, and its port is free
    with pytest.raises(TargetError, match=r"no connection to .*is the server running"):
        async with open_target([endpoint.url]):
            pass


async def test_what_the_system_says_of_a_connection_is_said_in_its_own_words():
    with pytest.raises(TargetError, match=r"no connection to .* \(Connection refused\)"):
        async with open_target(["http://127.0.0.1:9"]):
            pass


async def test_of_a_pair_the_half_that_is_down_is_named():
    async with serving(hello) as endpoint:
        up, down = endpoint.url, "http://127.0.0.1:9"
        for kind in ("sglang-pd", "vllm-pd"):
            for halves, name in (((down, up), "prefill"), ((up, down), "decode")):
                with pytest.raises(TargetError, match=f"the pair's {name} half: no connection to {down}"):
                    async with open_target([f"{kind}://{','.join(halves)}"]):
                        pass


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "foo://u:secret-word@h", "::::"])
async def test_a_proxy_that_cannot_be_used_is_said_and_never_used_for_this_host(
    monkeypatch: pytest.MonkeyPatch, proxy: str
):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(TargetError, match=r"names a proxy that .*correct ALL_PROXY") as caught:
        async with open_target(["http://elsewhere.invalid"]):
            pass
    assert "secret-word" not in str(caught.value)
    async with serving(hello) as endpoint, open_target([endpoint.url]) as target:
        assert (await target.send(ask())).text == "Hello"


async def test_a_proxy_that_may_be_the_cause_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch):
    async def gateway(request: Request, wire: Wire) -> None:
        await wire.text("Bad Gateway", 502)

    async with serving(ScriptedEndpoint(gateway, models=None)) as endpoint:
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        for proxy in ("http://u:secret-word@127.0.0.1:9", endpoint.url):
            monkeypatch.setenv("HTTP_PROXY", proxy)
            monkeypatch.setenv("http_proxy", proxy)
            with pytest.raises(TargetError, match=r"HTTP_PROXY, http_proxy names a proxy") as caught:
                async with open_target(["http://elsewhere.invalid"]):
                    pass
            assert "secret-word" not in str(caught.value)


async def test_certificates_that_the_environment_names_and_nobody_can_read_are_said(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere/certificates.pem")
    with pytest.raises(TargetError, match="SSL_CERT_FILE"):
        async with open_target(["https://127.0.0.1:9"]):
            pass


async def test_no_connection_within_the_time_is_not_called_a_connection(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        with (
            contextlib.ExitStack() as stack
        ):  # who connects now fills the queue, and the next one waits for ever
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(address)
            with pytest.raises(TargetError, match="no connection to"):
                async with open_target([f"http://127.0.0.1:{address[1]}"], TargetOptions(connect=0.5)):
                    pass


def packed(value: object, how: str) -> bytes:
    """A whole response, packed with gzip as often as `how` says."""
    data = json.dumps(value).encode()
    for _ in how.split(","):
        data = gzip.compress(data)
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: {how}\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def test_what_is_packed_once_is_read_and_what_could_unpack_without_end_is_not():
    listing = {"data": [{"id": "m"}]}
    answers = [
        packed(listing, "gzip"),
        packed({"choices": [{"text": "x", "finish_reason": "stop"}]}, "gzip"),
        packed({"choices": [{"text": "x", "finish_reason": "stop"}]}, "gzip, gzip"),
        packed(listing, "gzip, gzip"),
    ]

    async def script(request: Request, wire: Wire) -> None:
        await wire.raw(answers.pop(0))

    async with serving(ScriptedEndpoint(script, models=None)) as endpoint:
        async with open_target([endpoint.url]) as target:
            assert (await target.send(ask())).text == "x"
            answer = await target.send(ask())
            assert (answer.how, answer.error) == ("garbled", "the server packs what it sends (gzip, gzip)")
        with pytest.raises(TargetError, match=r"packs what it sends \(gzip, gzip\): switch that off"):
            async with open_target([endpoint.url]):
                pass


async def test_a_page_that_is_no_api_is_shown():
    async def page(request: Request, wire: Wire) -> None:
        await wire.text("<html>Welcome to nginx</html>")

    async with serving(ScriptedEndpoint(page, models=None)) as endpoint:
        with pytest.raises(TargetError, match=r"not as an OpenAI-compatible server.*Welcome to nginx"):
            async with open_target([endpoint.url]):
                pass


async def test_a_port_that_speaks_no_http_is_said():
    async def banner(request: Request, wire: Wire) -> None:
        await wire.raw(b"SSH-2.0-OpenSSH_9.2\r\n")
        wire.cut()

    async with serving(ScriptedEndpoint(banner, models=None)) as endpoint:
        with pytest.raises(TargetError, match="does not answer in HTTP"):
            async with open_target([endpoint.url]):
                pass


async def test_a_server_that_takes_the_connection_and_is_silent_does_not_hold_the_audit():
    async with serving(ScriptedEndpoint(silence, models=None)) as endpoint:
        with pytest.raises(TargetError, match=r"did not answer within 0.2 s"):
            async with open_target([endpoint.url], TargetOptions(connect=0.2)):
                pass


async def test_a_redirect_names_where_to():
    async def moved(request: Request, wire: Wire) -> None:
        await wire.text("", 307, location="https://elsewhere/v1/models")

    async with serving(ScriptedEndpoint(moved, models=None)) as endpoint:
        with pytest.raises(TargetError, match="https://elsewhere/v1/models"):
            async with open_target([endpoint.url]):
                pass
    async with serving(ScriptedEndpoint(moved)) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask())
        assert (answer.how, answer.error) == (
            "garbled",
            "the server sends to https://elsewhere/v1/models: give that URL instead",
        )


async def test_a_server_that_hangs_up_in_the_middle_of_its_model_list_is_not_said_to_speak_no_http():
    async def script(request: Request, wire: Wire) -> None:
        await wire.raw(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{}")
        wire.cut()

    async with serving(ScriptedEndpoint(script, models=None)) as endpoint:
        with pytest.raises(TargetError, match="closes the connection before its answer is over"):
            async with open_target([endpoint.url]):
                pass


@pytest.mark.parametrize("claim", [10**400, 10**30, "9" * 5000, "9" * 20, -5, 0, 1e300, True, [1], None])
async def test_a_length_that_no_server_can_mean_is_no_claim(claim: object):
    endpoint = ScriptedEndpoint(hello, entry={"max_model_len": claim, "context_length": 4096})
    async with serving(endpoint), open_target([endpoint.url]) as target:
        said = await recognise(target)
    assert said.claimed == 4096


async def test_a_model_that_is_not_there_is_said_with_those_that_are():
    async with serving(ScriptedEndpoint(hello, models=("alpha", "beta"))) as endpoint:
        with pytest.raises(TargetError, match="no model 'gamma'; it has: alpha, beta"):
            async with open_target([endpoint.url], TargetOptions(model="gamma")):
                pass
        async with open_target([endpoint.url], TargetOptions(model="beta")) as target:
            assert target.model == "beta"
        async with open_target([endpoint.url]) as target:
            assert (target.model, target.models) == ("alpha", ("alpha", "beta"))


async def test_a_server_without_a_model_list_needs_the_models_name():
    async with serving(ScriptedEndpoint(SmallEngine(), models=None)) as endpoint:
        with pytest.raises(TargetError, match="--model"):
            async with open_target([endpoint.url]):
                pass
        async with open_target([endpoint.url], TargetOptions(model="x")) as target:
            assert (await target.send(ask())).how == "answered"


async def test_a_base_url_whose_paths_are_not_below_v1_is_found():
    async def models(request: Request, wire: Wire) -> None:
        if request.path == "/api/openai/models":
            await wire.json({"data": [{"id": "m"}]})
        else:
            await wire.json({"detail": "Not Found"}, 404) if request.method == "GET" else await say(wire, "x")

    async with serving(ScriptedEndpoint(models, models=None)) as endpoint:
        async with open_target([f"{endpoint.url}/api/openai"]) as target:
            assert (await target.send(ask())).text == "x"
        assert endpoint.requests[-1].path == "/api/openai/chat/completions"


@pytest.mark.parametrize(
    ("key", "said"),
    [(None, "give one with --api-key"), ("wrong-key-1", "does not take the key of --api-key")],
)
async def test_a_missing_or_wrong_key_names_the_option_and_not_the_key(key: str | None, said: str):
    async with serving(ScriptedEndpoint(SmallEngine(key="right-key"), models=None)) as endpoint:
        with pytest.raises(TargetError, match=said) as caught:
            async with open_target([endpoint.url], TargetOptions(model="m", api_key=key)):
                pass
    assert "wrong-key-1" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (TargetOptions(second_key="b"), "give both"),
        (TargetOptions(api_key="a", second_key="a"), "another tenant's"),
        (TargetOptions(api_key="with\nnewline"), "--api-key is empty or has a character"),
        (TargetOptions(api_key="clé"), "--api-key is empty or has a character"),
        (TargetOptions(ca="/nowhere/ca.pem"), "no such file"),
        (TargetOptions(ca=__file__), "no certificate in PEM form"),
    ],
)
async def test_options_that_cannot_be_used_say_so_before_anything_is_sent(options: TargetOptions, said: str):
    with pytest.raises(TargetError, match=said):
        async with open_target(["http://127.0.0.1:9"], options):
            pass


def test_options_count_their_keys_and_never_show_them():
    options = TargetOptions(api_key="given-1", second_key="given-2")
    assert (options.keys, TargetOptions(api_key="a").keys, TargetOptions().keys) == (2, 1, 0)
    assert "given" not in repr(options)


# ------------------------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    made, key, both = folder / "cert.pem", folder / "key.pem", folder / "both.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=audit test", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)],
        check=True, capture_output=True,
    )  # fmt: skip
    both.write_text(key.read_text() + made.read_text())
    return both


async def test_a_certificate_of_ones_own_is_refused_until_it_is_given_with_ca(certificate: Path):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    async with serving(hello, tls) as endpoint:
        with pytest.raises(TargetError, match=r"does not verify.*--ca FILE"):
            async with open_target([endpoint.url]):
                pass
        assert not endpoint.requests
        async with open_target([endpoint.url], TargetOptions(ca=str(certificate))) as target:
            assert (await target.send(ask())).text == "Hello"
        named = endpoint.url.replace("127.0.0.1", "localhost")
        with pytest.raises(TargetError, match="for another name"):
            async with open_target([named], TargetOptions(ca=str(certificate))):
                pass


async def test_https_to_a_plain_server_says_to_write_http():
    async with serving(hello) as endpoint:
        with pytest.raises(TargetError, match=r"does not speak TLS.*http://"):
            async with open_target([endpoint.url.replace("http:", "https:")]):
                pass


# ------------------------------------------------------------------------------------ one request


async def test_a_stream_is_read_with_pieces_times_usage_and_its_end():
    async def script(request: Request, wire: Wire) -> None:
        await wire.stream()
        await wire.event(chat_event(""))
        await asyncio.sleep(0.15)
        await wire.event(chat_event("Hel"))
        await asyncio.sleep(0.15)
        await wire.event(chat_event("lo"))
        await wire.event(chat_event(finish="stop"))
        await wire.event(usage_event(7, 2))
        await wire.done()

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask(max_tokens=9))
    assert (answer.how, answer.status, answer.text, answer.finish, answer.number) == (
        "answered",
        200,
        "Hello",
        "stop",
        1,
    )
    assert [token.text for token in answer.tokens] == ["Hel", "lo"]
    assert (answer.usage.prompt, answer.usage.completion) == (7, 2)
    assert answer.first is not None
    assert 0.15 <= answer.first <= answer.tokens[1].at <= answer.seconds
    assert answer.tokens[1].at >= 0.3
    assert endpoint.posts[0].json == {
        "model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 9, "temperature": 0.0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (400, "refused"),
        (404, "refused"),
        (422, "refused"),
        (500, "failed"),
        (503, "failed"),
        (302, "garbled"),
    ],
)
async def test_a_status_says_what_became_of_a_request(status: int, how: str):
    async def script(request: Request, wire: Wire) -> None:
        await wire.json({"error": {"message": "because"}}, status)

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask())
    assert (answer.how, answer.status, answer.error) == (how, status, "because")


async def test_an_error_event_before_any_token_is_a_refusal_and_after_one_a_failure():
    async def script(request: Request, wire: Wire) -> None:
        await wire.stream()
        if request.json["messages"][0]["content"] == "later":
            await wire.event(chat_event("begun"))
        await wire.event({"error": {"message": "too long", "code": 400}})
        await wire.done()

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        early, late = await target.send(ask()), await target.send(ask(prompt="later"))
    assert (early.how, early.error) == ("refused", "too long")
    assert (late.how, late.text) == ("failed", "begun")


async def test_a_stream_that_is_cut_keeps_what_had_come():
    async def script(request: Request, wire: Wire) -> None:
        await wire.stream()
        await wire.event(chat_event("half"))
        await asyncio.sleep(0.1)
        wire.cut()

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask())
    assert (answer.how, answer.text, answer.finish) == ("cut", "half", None)
    assert answer.error


async def test_a_stream_that_ends_well_but_never_said_why_is_cut():
    async def script(request: Request, wire: Wire) -> None:
        await wire.stream()
        await wire.event(chat_event("half"))
        await wire.end()

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        assert (await target.send(ask())).how == "cut"


@pytest.mark.parametrize("garbage", ["not json", '{"half": ', "[1, 2]", "\x00\x01"])
async def test_a_stream_of_garbage_is_garbled_and_its_beginning_is_kept(garbage: str):
    async def script(request: Request, wire: Wire) -> None:
        await wire.stream()
        for _ in range(10_000):
            await wire.event(garbage)

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask())
    assert answer.how == "garbled"
    assert garbage in answer.excerpt


async def test_an_answer_in_html_or_in_no_http_at_all_is_garbled():
    async def script(request: Request, wire: Wire) -> None:
        if request.json["messages"][0]["content"] == "html":
            await wire.text("<h1>Welcome</h1>")
        else:
            await wire.raw(b"what is this\r\n\r\n")
            wire.cut()

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        html, noise = await target.send(ask(prompt="html")), await target.send(ask(prompt="raw"))
    assert (html.how, noise.how) == ("garbled", "garbled")


async def test_silence_ends_at_the_bound_and_closes_the_connection():
    async with serving(silence) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask(within=0.3))
        assert answer.how == "silent"
        assert answer.seconds >= 0.3
        await _until(lambda: endpoint.left == ["/v1/chat/completions"])


async def test_an_answer_that_never_ends_is_silent_at_the_bound_with_what_had_come():
    async def script(request: Request, wire: Wire) -> None:
        await wire.stream()
        while True:
            await wire.event(chat_event("on and "))
            await asyncio.sleep(0.02)

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask(within=0.4))
        await _until(lambda: len(endpoint.left) == 1)
    assert answer.how == "silent"
    assert answer.text.startswith("on and on")


async def test_an_answer_that_goes_on_far_beyond_what_was_asked_for_is_not_waited_for():
    async def script(request: Request, wire: Wire) -> None:
        await wire.stream()
        for _ in itertools.repeat(None):
            await wire.raw(chunk)

    line = f"data: {json.dumps(chat_event('la '))}\n\n".encode() * 100
    chunk = f"{len(line):x}\r\n".encode() + line + b"\r\n"
    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask(within=300.0, max_tokens=4))
    assert answer.how == "garbled"
    assert re.fullmatch(r"the answer did not end after 16\d{3} tokens, where 4 were asked for", answer.error)


async def test_an_answer_is_over_at_done_even_if_the_connection_stays_open():
    async def script(request: Request, wire: Wire) -> None:
        await wire.stream()
        await wire.event(chat_event("x", finish="stop"))
        await wire.event("[DONE]")
        await asyncio.Event().wait()

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        began = time.monotonic()
        answer = await target.send(ask(within=600.0))
        waited = time.monotonic() - began
    assert (answer.how, answer.text) == ("answered", "x")
    assert waited >= answer.seconds + 0.9 * AFTER_DONE  # which is not the answer's time


async def test_leaving_after_tokens_or_seconds_hangs_up_for_real():
    async def script(request: Request, wire: Wire) -> None:
        await wire.stream()
        if request.json["messages"][0]["content"] == "slow":
            await asyncio.Event().wait()
        for _ in range(500):
            await wire.event(chat_event("word "))
            await asyncio.sleep(0.02)

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        at_token = await target.send(ask(leave_tokens=3))
        await _until(lambda: len(endpoint.left) == 1)
        mid_prefill = await target.send(ask(prompt="slow", leave_seconds=0.2))
        await _until(lambda: len(endpoint.left) == 2)
    assert at_token.how == mid_prefill.how == "left"
    assert 3 <= len(at_token.tokens) < 10
    assert (mid_prefill.tokens, mid_prefill.seconds >= 0.2) == ([], True)


async def test_an_answer_that_comes_before_the_audit_would_have_left_is_an_answer():
    async with serving(hello) as endpoint, open_target([endpoint.url]) as target:
        assert (await target.send(ask(leave_seconds=3.0))).how == "answered"
        assert (await target.send(ask(leave_tokens=50))).how == "answered"


async def test_cancelling_a_request_closes_its_connection():
    async with serving(silence) as endpoint, open_target([endpoint.url]) as target:
        task = asyncio.create_task(target.send(ask()))
        await _until(lambda: bool(endpoint.posts))
        task.cancel()
        await _until(lambda: len(endpoint.left) == 1)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_64_requests_beside_each_other_have_64_connections():
    async def script(request: Request, wire: Wire) -> None:
        await _until(lambda: endpoint.most_open == 64)
        await say(wire, "x")

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answers = await asyncio.gather(*(target.send(ask(within=30.0)) for _ in range(64)))
    assert {answer.how for answer in answers} == {"answered"}
    assert sorted(answer.number for answer in answers) == list(range(1, 65))
    assert endpoint.most_open == 64
    assert len({request.connection for request in endpoint.posts}) == 64


async def test_requests_one_after_the_other_share_a_connection_and_a_closed_one_is_no_fault():
    async def script(request: Request, wire: Wire) -> None:
        if request.connection == 1 and len(endpoint.posts) == 2:
            return wire.cut()  # as if it had been idle for too long
        await say(wire, "x")

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        first, second = await target.send(ask()), await target.send(ask())
    assert (first.how, second.how, second.retries) == ("answered", "answered", 1)
    assert [request.connection for request in endpoint.posts] == [1, 1, 2]


async def test_a_new_connection_that_is_closed_without_a_word_is_cut():
    async def script(request: Request, wire: Wire) -> None:
        wire.cut()

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask())
    assert (answer.how, answer.status) == ("cut", None)


async def test_a_server_that_goes_away_is_unreachable():
    async with contextlib.AsyncExitStack() as stack:
        async with serving(hello) as endpoint:
            target = await stack.enter_async_context(open_target([endpoint.url]))
        answer = await target.send(ask())
    assert (answer.how, answer.status) == ("unreachable", None)
    assert answer.error


# ------------------------------------------------------------------------------------ rate limits


def limited(times: int, status: int = 429, **headers: str) -> Any:
    count = 0

    async def script(request: Request, wire: Wire) -> None:
        nonlocal count
        count += 1
        if count <= times:
            return await wire.json({"error": {"message": "slow down"}}, status, **headers)
        await say(wire, "x")

    return script


async def test_told_to_slow_down_it_waits_at_least_as_long_as_it_was_told():
    for status in (429, 503):
        async with (
            serving(limited(1, status, retry_after="1")) as endpoint,
            open_target([endpoint.url]) as target,
        ):
            began = time.monotonic()
            answer = await target.send(ask())
            waited = time.monotonic() - began
        assert (answer.how, answer.retries) == ("answered", 1)
        assert waited >= 1.0 + answer.seconds  # its seconds are those of the last try


async def test_whoever_waits_is_told_so():
    script, waits = limited(2), list[float]()
    async with serving(script) as endpoint, open_target([endpoint.url], None, waits.append) as target:
        assert (await target.send(ask())).how == "answered"
    assert len(waits) == 2
    assert min(waits) >= FIRST_WAIT


async def test_a_date_in_retry_after_is_understood():
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=2), usegmt=True)
    async with serving(limited(1, retry_after=when)) as endpoint, open_target([endpoint.url]) as target:
        began = time.monotonic()
        assert (await target.send(ask())).how == "answered"
        assert time.monotonic() - began >= 0.9  # dates have whole seconds


@pytest.mark.parametrize("wait", ["600", "9" * 5000], ids=["600", "5,000 digits"])  # int() refuses so many
async def test_a_wait_beyond_the_bound_is_not_begun(wait: str):
    async with (
        serving(limited(99, retry_after=wait)) as endpoint,
        open_target([endpoint.url]) as target,
    ):
        answer = await target.send(ask(within=599.0))
    assert (answer.how, answer.retries, answer.error, len(endpoint.posts)) == ("limited", 0, "slow down", 1)


async def test_without_retry_after_it_waits_longer_each_time_and_then_gives_up():
    times: list[float] = []

    async def script(request: Request, wire: Wire) -> None:
        times.append(time.monotonic())
        await wire.json({"error": "slow down"}, 429)

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask(within=4.0))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert (answer.how, answer.retries) == ("limited", len(gaps))
    assert all(gap >= FIRST_WAIT * 2**number for number, gap in enumerate(gaps))
    assert len(gaps) <= 3  # 0.5 + 1 + 2 s are the least; 4 s more are beyond the bound


@pytest.mark.parametrize(("held", "how"), [(1.1, "limited"), (0.0, "silent")])
async def test_who_ran_out_of_time_with_waiting_is_limited_and_a_hang_behind_a_refusal_is_silent(
    held: float, how: str
):
    """What went by at the server's own wish is no finding; but one "slow down" must not hide a hang."""

    async def script(request: Request, wire: Wire) -> None:
        if len(endpoint.posts) == 1:
            await asyncio.sleep(held)
            await wire.json({"error": "slow down"}, 429, retry_after="0")
        else:
            await asyncio.sleep(60)

    async with serving(script) as endpoint, open_target([endpoint.url]) as target:
        answer = await target.send(ask(within=2.5))
    assert (answer.how, answer.retries, len(endpoint.posts)) == (how, 1, 2)


async def test_waits_are_spread_and_never_shorter_than_told():
    async with serving(hello) as endpoint, open_target([endpoint.url]) as target:
        waits = [target._wait(2.0, 0) for _ in range(50)]
    assert len(set(waits)) == 50
    assert all(2.0 <= wait <= 3.0 for wait in waits)


async def test_503_without_retry_after_is_a_failure_and_not_asked_again():
    async with serving(limited(99, 503)) as endpoint, open_target([endpoint.url]) as target:
        assert (await target.send(ask())).how == "failed"
    assert len(endpoint.posts) == 1


# ------------------------------------------------------------------------------------ keys


async def test_a_key_that_the_server_repeats_is_in_no_answer():
    key = "sk-very-secret-0001"

    async def script(request: Request, wire: Wire) -> None:
        said = request.headers["authorization"]
        if request.json["messages"][0]["content"] == "echo":
            return await say(wire, "you sent " + said[:15], said[15:] + " to me")
        await wire.json({"error": {"message": f"I know {said}", "code": 400}}, 400, x_request_id=said[7:])

    async with (
        serving(script) as endpoint,
        open_target([endpoint.url], TargetOptions(api_key=key, second_key="other-key-0002")) as target,
    ):
        answers = [
            await target.send(ask()),
            await target.send(ask(prompt="echo")),
            await target.send(ask(key=1)),
        ]
    for answer in answers:
        assert key not in repr(answer)
        assert "other-key-0002" not in repr(answer)
    assert answers[0].error == "I know Bearer [key]"
    assert answers[1].text == "you sent Bearer [key] to me"
    assert [request.headers["authorization"] for request in endpoint.posts] == [f"Bearer {key}"] * 2 + [
        "Bearer other-key-0002"
    ]


async def test_a_request_names_itself_and_may_say_more():
    async with serving(hello) as endpoint, open_target([endpoint.url]) as target:
        await target.send(
            ask(request_id="abc", extra={"user": "u", "temperature": None}, headers={"X-Tenant": "7"})
        )
        await target.send(ask(raw=b"{not json"))
    named, raw = endpoint.posts
    assert (named.headers["x-request-id"], named.headers["x-tenant"]) == ("abc", "7")
    assert (named.json["user"], named.json["temperature"]) == ("u", None)
    assert raw.body == b"{not json"


# ------------------------------------------------------------------------------------ several servers, pairs


async def test_of_several_urls_a_tenant_always_has_the_same():
    async with serving(hello) as one, serving(hello) as other, open_target([one.url, other.url]) as target:
        answers = []
        for _ in range(3):
            answers += await asyncio.gather(
                *(target.send(ask(tenant=f"t{number}", prompt=f"t{number}")) for number in range(12))
            )
    named = {(answer.server, answer.ask.tenant) for answer in answers}
    assert len(named) == 12
    assert {server for server, _ in named} == {one.url, other.url}
    seen = [
        {request.json["messages"][0]["content"] for request in endpoint.posts} for endpoint in (one, other)
    ]
    assert seen[0]
    assert seen[1]
    assert not seen[0] & seen[1]
    assert len(one.posts) + len(other.posts) == 36


def native(text: str, made: int, reason: object = None, prompt: int = 5) -> dict[str, Any]:
    return {
        "text": text,
        "output_ids": list(range(made)),
        "meta_info": {"id": "r", "prompt_tokens": prompt, "completion_tokens": made, "finish_reason": reason},
    }


async def test_an_sglang_pair_gets_the_same_body_twice_in_a_room_of_its_own():
    async def prefill(request: Request, wire: Wire) -> None:
        await wire.json(native("'t", 1, {"type": "length", "length": 0}))

    async def decode(request: Request, wire: Wire) -> None:
        await wire.json(native("'t be", 2, {"type": "length", "length": 2}))

    async with serving(prefill) as one, serving(decode) as two:
        url = f"sglang-pd://{one.url},{two.url}?bootstrap_port=7777"
        async with open_target([url]) as target:
            answers = [
                await target.send(ask(endpoint="generate", stream=False, prompt=(5, 6, 7))) for _ in range(3)
            ]
    assert {(a.how, a.text, a.finish) for a in answers} == {("answered", "'t be", "length")}
    assert answers[0].prefill is not None
    assert answers[0].prefill.text == "'t"
    for first, second in zip(one.posts, two.posts, strict=True):
        assert first.body == second.body
        assert first.path == "/generate"
        assert (first.json["bootstrap_host"], first.json["bootstrap_port"]) == ("127.0.0.1", 7777)
    rooms = {request.json["bootstrap_room"] for request in one.posts}
    assert len(rooms) == 3
    assert all(0 <= room < 2**63 for room in rooms)


async def test_a_decode_half_that_waits_for_a_refused_prefill_is_silent_and_shows_why():
    async def refuse(request: Request, wire: Wire) -> None:
        await wire.json(
            {"object": "error", "message": "Input length (3000 tokens) exceeds", "code": 400}, 400
        )

    async with (
        serving(refuse) as one,
        serving(silence) as two,
        open_target([f"sglang-pd://{one.url},{two.url}"]) as target,
    ):
        whole = await target.send(ask(within=0.6))
        settled = await target.send(ask(within=600.0), settle=0.2)
        await _until(lambda: len(two.left) == 2)
    for answer in (whole, settled):
        assert answer.how == "silent"
        assert answer.prefill is not None
        assert (answer.prefill.how, answer.prefill.error) == ("refused", "Input length (3000 tokens) exceeds")
    assert whole.seconds >= 0.3  # of 0.6, connecting included
    assert "was not waited for" in settled.error


async def test_leaving_a_pair_leaves_both_halves():
    async with (
        serving(silence) as one,
        serving(silence) as two,
        open_target([f"sglang-pd://{one.url},{two.url}"]) as target,
    ):
        assert (await target.send(ask(leave_seconds=0.1))).how == "left"
        await _until(lambda: len(one.left) == len(two.left) == 1)


async def test_leaving_at_the_first_token_is_at_the_decode_halfs_and_prefill_may_finish():
    finished = asyncio.Event()

    async def prefill(request: Request, wire: Wire) -> None:
        await wire.stream()
        await wire.event(chat_event("x"))
        await asyncio.sleep(0.3)
        await wire.event(chat_event(finish="length"))
        await wire.done()
        finished.set()

    async def decode(request: Request, wire: Wire) -> None:
        await finished.wait()
        await wire.stream()
        while True:
            await wire.event(chat_event("x"))
            await asyncio.sleep(0.02)

    async with (
        serving(prefill) as one,
        serving(decode) as two,
        open_target([f"sglang-pd://{one.url},{two.url}"]) as target,
    ):
        answer = await target.send(ask(leave_tokens=1))
        await _until(lambda: len(two.left) == 1)
    assert (answer.how, one.left) == ("left", [])


async def test_a_vllm_pair_hands_on_what_prefill_returned():
    params = {"do_remote_prefill": True, "remote_block_ids": [[3, 4]], "remote_engine_id": "e"}

    async def prefill(request: Request, wire: Wire) -> None:
        await asyncio.sleep(0.2)
        choice = {"index": 0, "message": {"content": "x"}, "finish_reason": "length"}
        await wire.json(
            {"id": "p", "choices": [choice], "usage": {"prompt_tokens": 9}, "kv_transfer_params": params}
        )

    async with (
        serving(prefill) as one,
        serving(hello) as two,
        open_target([f"vllm-pd://{one.url},{two.url}"]) as target,
    ):
        answer = await target.send(ask(max_tokens=20, extra={"max_tokens": 20}))
    assert (answer.how, answer.text) == ("answered", "Hello")
    assert answer.first is not None
    assert answer.first >= 0.2  # the client waits for both
    assert answer.prefill is not None
    assert answer.prefill.usage.prompt == 9
    first, second = one.posts[0].json, two.posts[0].json
    assert (first["max_tokens"], first["stream"], "stream_options" in first) == (1, False, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (second["max_tokens"], second["kv_transfer_params"]) == (20, params)


async def test_what_a_vllm_prefill_half_refuses_is_refused():
    async def refuse(request: Request, wire: Wire) -> None:
        await wire.json({"error": {"message": "too long", "code": 400}}, 400)

    async with (
        serving(refuse) as one,
        serving(hello) as two,
        open_target([f"vllm-pd://{one.url},{two.url}"]) as target,
    ):
        asked = ask(max_tokens=20)
        answer = await target.send(asked)
    assert (answer.how, answer.error, answer.ask == asked, two.posts) == ("refused", "too long", True, [])


async def _until(condition: Any) -> None:
    """Waits for a condition, for as long as a slow machine may need."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never became true")
