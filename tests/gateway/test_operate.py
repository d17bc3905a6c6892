"""The operator's commands against a real server: what they print, and their exit codes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from driving import client_of
from scripted import ScriptedBackend
from scripted_worker import ask, world

from hermetic import operate
from hermetic.gateway.tenants import hash_key, load_tenants


async def test_status_shows_every_worker_in_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    async with world() as w:
        await w.pair(2, 2)
        await w.add("decode-with-a-name-that-is-long", "decode", model="f" * 32)
        await w.until(lambda: w.state("decode-with-a-name-that-is-long") == "refused")
        w.workers["decode-0"].stats |= {"slots_quarantined": 2, "slots_granted": 1}
        w.cluster.drain("decode-1")
        w.cluster.set_context(128)
        w.cluster.disable("an incident [ab]", "alice")
        operate._show(await w.cluster.status())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "context 128 tokens (capped at 128)" in text
    assert "DISABLED by alice: an incident [ab]" in text
    row = next(line for line in lines if line.startswith("decode-0 "))
    assert row.split()[:6] == ["decode-0", "decode", "ready", "10/16", "64/67", "0"]
    assert next(line for line in lines if line.startswith("decode-1 ")).split()[2] == "drained"
    assert "decode-0: 0 pages and 2 slots in quarantine" in text
    assert "may not" not in text
    assert "does not fit" in text


async def test_the_json_of_status_has_what_is_promised() -> None:
    async with world() as w:
        await w.pair()
        w.workers["decode-0"].limit = 1
        stream = await w.cluster.generate(ask())
        await w.until(lambda: stream.outputs[0])
        status: Any = json.loads(json.dumps(await w.cluster.status()))
        assert set(status["gateway"]) == {
            "model", "version", "incarnation", "context_advertised", "context_cap", "disabled", "requests_open",
        }  # fmt: skip
        assert status["gateway"]["requests_open"] == 1
        one = status["workers"][0]
        mine = w.workers["decode-0"].info
        assert (one["id"], one["role"], one["state"], one["pid"], one["host"]) == (
            "decode-0", "decode", "ready", 4242, "test",
        )  # fmt: skip
        assert (one["address"], one["incarnation"]) == (mine.address, mine.incarnation.hex())
        assert one["capacities"] == {
            "pages": 16,
            "page_size": 16,
            "max_tokens": 256,
            "max_batch": 8,
            "slots": 64,
        }
        assert (one["pages"], one["slots"], one["open"]) == ({"free": 10, "leased": 6}, {"free": 64}, 1)
        assert 0 <= one["heard_seconds_ago"] < 10
        assert (one["paired"], one["transport"], one["reason"]) == (["prefill-0"], "shm", "")
        await stream.aclose()


def test_each_command_says_what_it_did(
    url: str, backend: ScriptedBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert operate.drain(url, None, "decode-0", undo=False, wait=False) == 0
    assert operate.drain(url, None, "decode-0", undo=True, wait=True) == 0
    assert operate.disable(url, None, "an incident") == 0
    assert backend.taken_away == "an incident"
    assert operate.enable(url + "/v1/", None) == 0
    assert backend.taken_away is None
    assert operate.context(url.removeprefix("http://"), None, 128) == 0
    assert operate.context(url, None, None) == 0
    assert capsys.readouterr().out.splitlines() == [
        "decode-0 is draining",
        "decode-0 takes requests again",
        "disabled: every new request gets 400 with the reason: an incident",
        "enabled: requests are taken again",
        "advertised: 128 tokens (at most 128 tokens)",
        "advertised: 256 tokens (as much as the pools hold)",
    ]
    assert operate.status(url, None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["gateway"]["model"] == "smollm2"


def test_a_drain_waits_until_nothing_is_left(
    url: str, backend: ScriptedBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operate, "POLL", 0.01)
    left, states = 3, ["draining", "draining", "unreachable", "drained"]

    async def status() -> Mapping[str, object]:
        one = {"id": "decode-0", "state": states.pop(0), "reason": "silent", "open": left}
        return {"gateway": {}, "workers": [one]}

    monkeypatch.setattr(backend, "status", status)
    assert operate.drain(url, None, "decode-0", undo=False, wait=True) == 0
    assert (states, capsys.readouterr().out) == ([], "decode-0 is drained\n")
    states += ["draining", "ready"]
    assert operate.drain(url, None, "decode-0", undo=False, wait=True) == 1
    assert "took the drain back" in capsys.readouterr().err
    states += ["gone"]
    assert operate.drain(url, None, "decode-0", undo=False, wait=True) == 0
    # One that is away is not waited for once nothing of it is left: it may never be back.
    left, states = 0, ["draining", "unreachable", "and no more"]
    assert operate.drain(url, None, "decode-0", undo=False, wait=True) == 0
    assert "unreachable (silent)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "code", "says"),
    [
        (lambda url: operate.drain(url, None, "decode-7", False, False), 2, "there are: decode-0"),
        (lambda url: operate.disable(url, None, "two\nlines"), 2, "`reason` must be a text"),
        (lambda url: operate.status(url + "/elsewhere", None, False), 1, "has no /admin"),
        (lambda _: operate.status("ftp://127.0.0.1", None, False), 2, "is no URL of a gateway"),
        (lambda _: operate.enable("http://127.0.0.1:1", None), 1, "no gateway answers at http://127.0.0.1:1"),
    ],
)
def test_an_error_names_what_to_change(
    url: str, capsys: pytest.CaptureFixture[str], call: Any, code: int, says: str
) -> None:
    assert call(url) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hermetic: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err


def test_a_missing_or_wrong_key_is_told_with_where_to_give_it(
    make_app: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[tenants.alice]\nkey_hashes = ["{hash_key("tenant-key")}"]\n'
        f'[operators.carol]\nkey_hashes = ["{hash_key("operator-key")}"]\n'
    )
    app = make_app(load_tenants(str(path)))

    def request(method: str, url: str, **rest: Any) -> httpx.Response:
        rest.pop("timeout")
        return asyncio.run(client_of(app).request(method, url, **rest))

    monkeypatch.setattr(operate.httpx, "request", request)
    assert operate.disable("http://gateway", None, "an incident") == 2
    assert "HERMETIC_OPERATOR_KEY" in capsys.readouterr().err
    assert operate.disable("http://gateway", "tenant-key", "an incident") == 2
    assert "this is a tenant's key" in capsys.readouterr().err
    assert operate.disable("http://gateway", "operator-key", "an incident") == 0
