"""/admin: who may ask, what they may ask, and that a web page is nobody."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from driving import chat, completion
from fastapi import FastAPI
from scripted import ScriptedBackend

from hermetic.gateway.backend import Failed
from hermetic.gateway.tenants import TenantError, Tenants, hash_key, load_tenants

POSTS: list[tuple[str, dict[str, Any]]] = [
    ("drain", {"worker": "decode-0"}),
    ("undrain", {"worker": "decode-0"}),
    ("disable", {"reason": "an incident"}),
    ("enable", {}),
    ("context", {"tokens": 128}),
]

MakeApp = Callable[..., FastAPI]


def client_at(
    app: FastAPI, base: str = "http://127.0.0.1:8000", peer: str = "127.0.0.1"
) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(peer, 4242)), base_url=base)


@pytest.fixture
def local(make_app: MakeApp) -> httpx.AsyncClient:
    return client_at(make_app())


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[tenants.alice]\nkey_hashes = ["{hash_key("tenant-key")}"]\n'
        f'[operators.carol]\nkey_hashes = ["{hash_key("operator-key")}"]\n'
    )
    return load_tenants(str(path))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_operations_reach_the_backend_and_say_what_they_did(
    local: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    answers = {what: (await local.post(f"/admin/{what}", json=body)).json() for what, body in POSTS}
    assert answers == {
        "drain": {"worker": "decode-0", "state": "draining"},
        "undrain": {"worker": "decode-0", "state": "ready"},
        "disable": {"disabled": "an incident", "warning": None},
        "enable": {"disabled": None},
        "context": {"context_cap": 128, "context_advertised": 128},
    }
    who = "an operator on this host"
    assert backend.asked == [
        ("drain", "decode-0"), ("undrain", "decode-0"), ("disable", who), ("enable", who), ("context", 128),
    ]  # fmt: skip
    assert (await local.post("/admin/context", json={"tokens": None})).json()["context_cap"] is None
    assert (await local.get("/admin/status")).json()["gateway"]["model"] == "smollm2"


async def test_while_disabled_requests_get_400_and_everything_else_answers(
    local: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    await local.post("/admin/disable", json={"reason": "an incident"})
    for path, body in (("/v1/completions", completion()), ("/v1/chat/completions", chat())):
        # Before anything else: also what would be refused for another reason, or is no JSON at all.
        for response in (
            await local.post(path, json=body),
            await local.post(path, json=body | {"stream": True}),
            await local.post(path, json=body | {"max_tokens": 10**6}),
            await local.post(path, content=b"{"),
        ):
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "model_disabled"
            assert "an incident" in response.json()["error"]["message"]
    assert not backend.requests
    for path in ("/v1/models", "/health", "/metrics", "/version"):
        assert (await local.get(path)).status_code == 200
    assert (await local.post("/tokenize", json={"prompt": "Hi"})).status_code == 200
    assert (await local.get("/ready")).json() == {"status": "disabled", "reason": "an incident"}
    await local.post("/admin/enable", json={})
    assert (await local.post("/v1/completions", json=completion())).status_code == 200
    assert (await local.get("/ready")).json() == {"status": "ready"}


def test_the_reason_reaches_a_client_that_sends_a_long_body(url: str, backend: ScriptedBackend) -> None:
    backend.taken_away = "an incident"
    with httpx.Client(base_url=url) as client:
        for _ in range(3):
            response = client.post("/v1/completions", content=b"x" * 7 * 2**20)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "model_disabled")


async def test_what_could_not_be_kept_is_told(local: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.taken_away, backend.unsaved = "an incident", Failed("state_not_saved", "no space left")
    response = await local.post("/admin/enable", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "state_not_saved")
    assert backend.taken_away == "an incident"


@pytest.mark.parametrize(
    ("what", "body", "code", "param"),
    [
        ("drain", {}, "invalid_request", "worker"),
        ("drain", {"worker": 7}, "invalid_request", "worker"),
        ("drain", {"worker": ""}, "invalid_request", "worker"),
        ("drain", {"worker": "x" * 65}, "invalid_request", "worker"),
        ("drain", {"worker": "decode-0", "force": True}, "unknown_field", "force"),
        ("drain", {"worker": "decode-7"}, "worker_not_found", "worker"),
        ("disable", {}, "invalid_request", "reason"),
        ("disable", {"reason": "  "}, "invalid_request", "reason"),
        ("disable", {"reason": "two\nlines"}, "invalid_request", "reason"),
        ("disable", {"reason": "x" * 501}, "invalid_request", "reason"),
        ("enable", {"now": True}, "unknown_field", "now"),
        ("context", {}, "invalid_request", "tokens"),
        ("context", {"tokens": "128"}, "invalid_request", "tokens"),
        ("context", {"tokens": True}, "invalid_request", "tokens"),
        ("context", {"tokens": 1}, "invalid_request", "tokens"),
        ("context", {"tokens": 2**31}, "invalid_request", "tokens"),
        ("context", {"tokens": 12.5}, "invalid_request", "tokens"),
        ("context", [], "invalid_json", None),
    ],
)
async def test_a_wrong_body_is_refused_with_what_is_wrong(
    local: httpx.AsyncClient, backend: ScriptedBackend, what: str, body: Any, code: str, param: str | None
) -> None:
    response = await local.post(f"/admin/{what}", json=body)
    assert response.status_code == (404 if code == "worker_not_found" else 400)
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (code, param)
    assert not backend.asked
    assert "hermetic_refusals_total{" not in (await local.get("/metrics")).text  # not a tenant's


async def test_a_web_page_cannot_ask_not_even_from_this_host(
    make_app: MakeApp, local: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    rebound = client_at(make_app(), "http://evil.example:8000")
    elsewhere = client_at(make_app(), peer="10.0.0.7")
    for what, body in POSTS:
        path = f"/admin/{what}"
        for response, status, code in (
            (
                await local.post(path, json=body, headers={"origin": "http://127.0.0.1:8000"}),
                403,
                "admin_local_only",
            ),
            (await local.post(path, json=body, headers={"origin": "null"}), 403, "admin_local_only"),
            (await rebound.post(path, json=body), 403, "admin_local_only"),
            (await elsewhere.post(path, json=body), 403, "admin_local_only"),
            (await local.post(path, content=b"{}"), 415, "unsupported_media_type"),
            (
                await local.post(path, content=b"{}", headers={"content-type": "text/plain"}),
                415,
                "unsupported_media_type",
            ),
            (await local.post(path, data={"worker": "decode-0"}), 415, "unsupported_media_type"),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert (await rebound.get("/admin/status")).status_code == 403
    assert (await elsewhere.get("/admin/status")).status_code == 403
    assert (await local.get("/admin/disable")).status_code == 405
    assert not backend.asked
    for base in ("http://localhost:8000", "http://[::1]:8000", "http://127.0.0.5"):
        assert (await client_at(make_app(), base, "::1").get("/admin/status")).status_code == 200


async def test_with_a_key_file_only_an_operators_key_opens_admin_and_opens_nothing_else(
    make_app: MakeApp, tenants: Tenants, backend: ScriptedBackend
) -> None:
    client = client_at(make_app(tenants), "http://gateway.example", "10.0.0.7")
    for headers, status, code in (
        ({}, 401, "invalid_api_key"),
        (bearer("wrong"), 401, "invalid_api_key"),
        ({"authorization": "Basic operator-key"}, 401, "invalid_api_key"),
        (bearer("tenant-key"), 403, "operator_key_required"),
    ):
        for what, body in POSTS:
            response = await client.post(f"/admin/{what}", json=body, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert (await client.get("/admin/status", headers=headers)).status_code == status
    assert not backend.asked
    for what, body in POSTS:
        assert (
            await client.post(f"/admin/{what}", json=body, headers=bearer("operator-key"))
        ).status_code == 200
    assert ("disable", "operator carol") in backend.asked
    for path, body in (("/v1/completions", completion()), ("/tokenize", {"prompt": "Hi"})):
        assert (await client.post(path, json=body, headers=bearer("operator-key"))).status_code == 401
        assert (await client.post(path, json=body, headers=bearer("tenant-key"))).status_code == 200


async def test_a_key_file_without_operators_closes_admin_and_says_how_to_open_it(
    make_app: MakeApp, tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[tenants.alice]\nkey_hashes = ["{hash_key("tenant-key")}"]\n')
    client = client_at(make_app(load_tenants(str(path))))
    for headers in ({}, bearer("tenant-key")):
        response = await client.get("/admin/status", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (403, "operator_key_required")
        assert "[operators.NAME]" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("operators", "says"),
    [
        (f'[operators.carol]\nkey_hashes = ["{hash_key("tenant-key")}"]', "is already a key of alice"),
        ("[operators.carol]\nkey_hashes = []", r"\[operators.carol\]: key_hashes must be a list"),
        (f'[operators.carol]\nkey_hashes = ["{hash_key("a")}"]\nscope = "x"', "unknown key 'scope'"),
        (f'[operators."b b"]\nkey_hashes = ["{hash_key("a")}"]', "a name has"),
        ('[operators.carol]\nkey_hashes = ["operator-key"]', "entry 1 of key_hashes is not sha256"),
        (
            f'[operators.carol]\nkey_hashes = ["{hash_key("a")}"]\n[operators.dave]\nkey_hashes = ["{hash_key("a")}"]',
            "is already a key of carol",
        ),
        ("[[operators]]\nname = 1", "must be tables"),
    ],
)
def test_an_operators_section_that_cannot_be_meant_is_refused(
    tmp_path: Path, operators: str, says: str
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[tenants.alice]\nkey_hashes = ["{hash_key("tenant-key")}"]\n{operators}\n')
    with pytest.raises(TenantError, match=says):
        load_tenants(str(path))
