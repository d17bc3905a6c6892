"""Live nodes that are none, or that do not want to be asked: one line each, as an operator reads it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from hermetic.check import command, unanswered
from hermetic.check.command import Asked
from hermetic.check.fetch import FetchOptions, fetch
from hermetic.check.result import Unread
from hermetic.check.urls import shown_url
from hermetic.options import OptionError

PEM = Path(__file__).parent / "localhost_for_tests.pem"
HTML = "<!DOCTYPE html><html><head><title> Grafana </title></head></html>"
INFO = {
    "version": "0.5.23", "disaggregation_mode": "null", "max_total_num_tokens": 2048, "page_size": 16, "model_path": "/m",
    "internal_states": [{"memory_usage": {"token_capacity": 2048}}],
}  # fmt: skip

Answer = Callable[[str], tuple[int, str] | tuple[int, str, str]]


def with_tls() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(PEM)
    return context


@contextlib.asynccontextmanager
async def serving(answer: Answer | None = None, banner: bytes = b"", tls: bool = False) -> AsyncIterator[str]:
    """host:port of a server that gives what `answer` says for a path (status, body, header); without one it sends `banner` and closes."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            if answer is None:
                writer.write(banner)
            while answer is not None and (line := (await reader.readline()).split())[2:] == [b"HTTP/1.1"]:
                while (await reader.readline()).strip():
                    pass
                status, body, *header = answer(line[1].decode())
                head = f"HTTP/1.1 {status} X\r\n{''.join(header)}content-length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body.encode())
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=with_tls() if tls else None)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def told(url: str, **options: object) -> str:
    """The one line about a node of which nothing was read."""
    ((reading),) = await fetch([url], FetchOptions(**options))  # type: ignore[arg-type]
    assert reading.sheets == []
    (unread,) = reading.unread
    assert isinstance(unread, Unread)
    assert not unread.part
    return unread.why


def everywhere(status: int, body: str = "{}", header: str = "") -> Answer:
    return lambda _: (status, body, header)


def only(path: str, body: str) -> Answer:
    return lambda asked: (200, body) if asked == path else (404, "{}")


# ------------------------------------------------------------------------------------ the wrong port


async def test_http_where_tls_is_spoken_is_told_the_other_url() -> None:
    async with serving(everywhere(200, json.dumps(INFO)), tls=True) as place:
        assert await told(f"http://{place}") == f"speaks TLS, not plain HTTP: use https://{place}"


async def test_https_where_plain_http_is_spoken_is_told_the_other_url() -> None:
    async with serving(only("/server_info", json.dumps(INFO))) as place:
        assert await told(f"https://{place}") == f"speaks plain HTTP, not TLS: use http://{place}"


async def test_a_server_that_answers_400_to_everything_is_not_said_to_speak_tls() -> None:
    async with serving(everywhere(400)) as place:
        assert "TLS" not in await told(f"http://{place}")


async def test_a_port_that_wants_tls_and_says_so_in_http_is_not_said_to_speak_plain_http() -> None:
    """As nginx does where the handshake fails for another reason: what is no TLS is answered with 400."""
    async with serving(banner=b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n") as place:
        assert "http://" not in await told(f"https://{place}")


@pytest.mark.parametrize("banner", [b"", b"SSH-2.0-OpenSSH_9.2\r\n"])
async def test_what_is_neither_is_said_to_be_no_http(banner: bytes) -> None:
    async with serving(banner=banner) as place:
        assert "without an answer in HTTP" in await told(f"http://{place}")
        assert "http://" not in await told(f"https://{place}")


async def test_where_nothing_listens_and_where_there_is_no_such_host_are_told_apart() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, and not listened on
        assert "nothing listens there" in await told(f"http://127.0.0.1:{free.getsockname()[1]}")
    assert await told("http://no-such-host.invalid:1") == "the host no-such-host.invalid is not known here"


async def test_a_node_that_answers_nothing_in_its_time_is_told() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        why = await told(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
    assert why == "did not answer anything within 0.3 s (--timeout)"


# ------------------------------------------------------------------------------------ certificates and keys


async def test_a_certificate_that_nobody_vouches_for_is_told_the_option() -> None:
    async with serving(everywhere(200), tls=True) as place:
        why = await told(f"https://{place}")
    assert why == "its certificate is not trusted here (self-signed certificate): --ca FILE names the one that vouches for it"  # fmt: skip


async def test_a_certificate_of_another_host_is_told_the_name() -> None:
    """It is for localhost, and was asked for as 127.0.0.1."""
    async with serving(everywhere(200), tls=True) as place:
        why = await told(f"https://{place}", ca=str(PEM))
    assert why.startswith("its certificate is of another host (IP address mismatch")
    assert "--ca" not in why


def test_a_certificate_that_has_ended_is_not_helped_by_another_authority() -> None:
    expired = ssl.SSLCertVerificationError(1, "certificate verify failed")
    expired.verify_code, expired.verify_message = 10, "certificate has expired"  # X509_V_ERR_CERT_HAS_EXPIRED
    failed = httpx.ConnectError("certificate verify failed")
    failed.__cause__ = expired
    assert "(certificate has expired): renew it" in unanswered.error("https://h", failed)


async def test_a_certificate_that_is_trusted_lets_the_node_be_read() -> None:
    async with serving(only("/server_info", json.dumps(INFO)), tls=True) as place:
        url = f"https://localhost:{place.rpartition(':')[2]}"
        (reading,) = await fetch([url], FetchOptions(ca=str(PEM)))
    assert not reading.unread
    assert reading.sheets


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_that_is_missing_and_one_that_is_wrong_are_told_apart(status: int) -> None:
    async with serving(everywhere(status)) as place:
        missing, wrong = await told(f"http://{place}"), await told(f"http://{place}", api_key="sk-1")
    assert missing == f"wants an API key (status {status}): give it in HERMETIC_CHECK_KEY, or with --api-key"
    assert wrong == f"does not take this API key (status {status}): --api-key, or HERMETIC_CHECK_KEY"


# ------------------------------------------------------------------------------------ something else answers


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (everywhere(200, HTML), "answers with HTML ('Grafana'), not with what an engine says: is this the node's port?"),
        (everywhere(502, "<html>"), "answers 502 Bad Gateway to everything"),
        (everywhere(404, "404 page not found"), "has none of the paths of an engine (404 to all of /get_model_info, /get_server_info, /metrics, "),
        (only("/v1/models", '{"object":"list","data":[{"id":"m","owned_by":"llamacpp"}]}'), "/v1/models is a list of models of llamacpp, not of SGLang"),
        (only("/server_info", json.dumps(INFO)[:-20]), "/server_info is JSON of an engine, cut or damaged"),
        (only("/metrics", "# TYPE node_cpu counter\nnode_cpu 1\n"), "/metrics is Prometheus text, with no metric of SGLang"),
        (only("/version", '["1"]'), "says nothing that this check knows how to read"),
    ],
)  # fmt: skip
async def test_a_server_of_something_else_is_told_in_one_line(answer: Answer, said: str) -> None:
    async with serving(answer) as place:
        assert (await told(f"http://{place}")).startswith(said)


async def test_a_redirect_is_told_with_where_it_leads_and_without_its_query() -> None:
    async with serving(everywhere(302, "", "location: /login?next=secret\r\n")) as place:
        why = await told(f"http://{place}")
    assert why.startswith(f"sends elsewhere, to http://{place}/login: ")
    assert "secret" not in why


# ------------------------------------------------------------------------------------ what is a secret


async def test_a_password_in_a_url_is_not_said_again_whatever_answers() -> None:
    async with serving(everywhere(302, "", "location: /login\r\n")) as place:
        why = await told(f"http://me:hunter2@{place}")
        assert why.startswith(f"sends elsewhere, to http://{place}/login: ")
        assert await told(f"https://me:hunter2@{place}") == f"speaks plain HTTP, not TLS: use http://{place}"
    async with serving(everywhere(200), tls=True) as place:
        assert await told(f"http://me:hunter2@{place}") == f"speaks TLS, not plain HTTP: use https://{place}"


async def test_a_key_that_is_said_again_in_escapes_is_hidden_as_well() -> None:
    again = "".join(f"\\u{ord(sign):04x}" for sign in "sk-hunter2")
    pages = {"/version": f'{{"version": "{again}"}}', "/v1/loads": f'{{"detail": "no key {again}"}}'}
    async with serving(lambda path: (200, pages.get(path, json.dumps(INFO)))) as place:
        (reading,) = await fetch([f"http://{place}"], FetchOptions(api_key="sk-hunter2"))
    assert "hunter2" not in repr(reading)
    assert "no key ***" in repr(reading)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("me:hunter2@host:30000", "'host:30000'"), ("ftp://me:hunter2@host/x", "'ftp://host/x'"), ("p=http://me:hunter2@:30000", "'p=http://:30000'"),
        ("http://me:hun/ter2@host:30000", "'http://host:30000'"), ("http://me:hun#ter2@host:30000", "'http://host:30000'"),
        ("http://me:hun?ter2@host:30000", "'http://host:30000'"), ("p=me:hunter2@host:30000", "'p=host:30000'"), ("http://me:hunter2@host:99999", "'http://host:99999'"),
        ("http://host:x/?api_key=hunter2", "'http://host:x/'"), ("a@b.log", "'a@b.log'"),
    ],
)  # fmt: skip
def test_of_what_is_no_source_a_password_is_not_said_again(word: str, shown: str) -> None:
    with pytest.raises(OptionError) as told_so:
        command.main(Asked(sources=(word,)))
    assert shown in str(told_so.value)
    assert "hun" not in str(told_so.value)
    assert "ter2" not in str(told_so.value)


@pytest.mark.parametrize("url", ["http://host:30000/a@b", "http://host:30000/v1", "https://[::1]:30000"])
def test_a_url_without_a_user_is_shown_as_it_is(url: str) -> None:
    assert shown_url(url) == url
    assert shown_url(f"{url}?key=a@b") == url


# ------------------------------------------------------------------------------------ files of something else


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("<html><title>Sign in</title></html>", "is an HTML page ('Sign in')"), ('{"a": 1}', "is JSON, and of no engine that is known here"),
        ("[1, 2]", "is JSON, and of no engine that is known here"), ("\0\1\2", "is no text"),
        ("12:00 INFO postgres is ready\n", "is not a log of SGLang, vLLM or Hermetic"), ('{"error":{"message":"no"}}', "is an answer that says only: 'no'"),
    ],
)  # fmt: skip
def test_a_file_of_something_else_is_told_what_it_is(
    tmp_path: Path, data: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "info"
    path.write_text(data)
    assert command.main(Asked(sources=(str(path),))) == 2
    out = capsys.readouterr().out
    assert f"not read  {path}: {said}" in out
    assert out.splitlines()[-1] == "Nothing was checked: 1 source not read"
