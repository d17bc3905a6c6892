"""Keys, tenants and scopes: who may ask, whose KV scope a request gets, and which files are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from driving import client_of, completion
from scripted import ScriptedBackend

from hermetic.gateway.tenants import TenantError, hash_key, load_tenants, tenants_for


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


FILE = f"""
[tenants.alice]
key_hashes = ["{hashed("alice-key")}", "{hashed("alice-second-key")}"]
[tenants.bob]
key_hashes = ["{hashed("bob-key")}"]
scope = "b"
"""


@pytest.fixture
def keys(tmp_path: Path) -> str:
    (tmp_path / "keys.toml").write_text(FILE)
    return str(tmp_path / "keys.toml")


def test_a_hash_is_plain_sha256_in_hex() -> None:
    assert hash_key("alice-key") == hashed("alice-key")


async def test_each_key_gets_its_tenants_scope(make_app: Any, keys: str, backend: ScriptedBackend) -> None:
    client = client_of(make_app(load_tenants(keys)))
    for key in ("alice-key", "alice-second-key", "bob-key"):
        response = await client.post(
            "/v1/completions", json=completion(), headers={"authorization": f"Bearer {key}"}
        )
        assert response.status_code == 200
    got = [(request.tenant, request.scope) for request in backend.requests]
    assert got == [("alice", "tenant:alice"), ("alice", "tenant:alice"), ("bob", "b")]


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "alice-key", "Basic alice-key", "Bearer alice-key x"],
)
async def test_without_a_known_key_nothing_is_answered(
    make_app: Any, keys: str, backend: ScriptedBackend, header: str | None
) -> None:
    client = client_of(make_app(load_tenants(keys)))
    headers = {} if header is None else {"authorization": header}
    for method, path in (
        ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/x"),
        ("POST", "/tokenize"), ("POST", "/detokenize"),
    ):  # fmt: skip
        response = await client.request(method, path, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"].startswith("Bearer")
    for path in ("/health", "/ready", "/version"):
        assert (await client.get(path)).status_code == 200
    assert backend.requests == []


@pytest.mark.parametrize(("content", "words"), [
    ("", "names no tenant"),
    ("[tenants]", "names no tenant"),
    ("tenants = 1", "names no tenant"),
    ("[tenants.a", "not TOML"),
    ("limits = 1\n" + FILE, "unknown key 'limits'"),
    ("[tenants.a]\nkey_hashes = []", "key_hashes must be a list"),
    ("[tenants.a]\nscope = 'x'", "key_hashes must be a list"),
    ("[tenants.a]\nkey_hashes = ['my-secret-key']", "entry 1 of key_hashes"),
    (f"[tenants.a]\nkey_hashes = ['{hashed('x')}']\nkeys = 1", "unknown key 'keys'"),
    (f"[tenants.a]\nkey_hashes = ['{hashed('x')}']\nscope = ''", "scope must be"),
    (f"[tenants.a]\nkey_hashes = ['{hashed('x')}']\nshare_scope = 1", "share_scope must be"),
    (f"[tenants.'a b']\nkey_hashes = ['{hashed('x')}']", "a name has"),
    (f"[tenants.a]\nkey_hashes = ['{hashed('x')}']\n[tenants.b]\nkey_hashes = ['{hashed('x')}']", "already a key of a"),
    (f"[tenants.a]\nkey_hashes = ['{hashed('x')}']\n[tenants.b]\nkey_hashes = ['{hashed('y')}']\nscope = 'tenant:a'", "same scope"),
])  # fmt: skip
def test_a_wrong_file_is_refused_with_its_place(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(content)
    with pytest.raises(TenantError, match=words) as caught:
        load_tenants(str(path))
    assert str(path) in str(caught.value)
    assert "my-secret-key" not in str(caught.value)


def test_tenants_share_a_scope_only_if_all_of_them_say_so(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    one, two = (f"[tenants.{n}]\nkey_hashes = ['{hashed(n)}']\nscope = 's'\n" for n in "ab")
    share = "share_scope = true\n"
    for content, fine in ((one + share + two, False), (one + share + two + share, True)):
        path.write_text(content)
        if fine:
            assert {tenant.scope for tenant in load_tenants(str(path)).by_hash.values()} == {"s"}
        else:
            with pytest.raises(TenantError, match="same scope"):
                load_tenants(str(path))


def test_without_a_file_only_loopback_is_served() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert tenants_for(None, host).local is not None
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(TenantError, match="hermetic hash-key"):
            tenants_for(None, host)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TenantError, match="is not there"):
        tenants_for(str(tmp_path / "none.toml"), "127.0.0.1")


async def test_refusals_at_the_door_are_counted_under_no_tenants_name(make_app: Any, keys: str) -> None:
    client = client_of(make_app(load_tenants(keys)))
    await client.get("/v1/models")
    await client.post("/v1/completions", json=completion(), headers={"authorization": "Bearer guess"})
    text = (await client.get("/metrics")).text
    assert 'hermetic_refusals_total{code="invalid_api_key",tenant="-"} 2.0' in text
    assert "guess" not in text
