"""Models, tokens, health and figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
from driving import chat, client_of, completion
from prometheus_client.parser import text_string_to_metric_families
from scripted import ScriptedBackend

import hermetic
from hermetic.gateway.app import create_app
from hermetic.gateway.backend import Failed, Token
from hermetic.gateway.errors import CODES
from hermetic.gateway.tenants import Tenant, Tenants, hash_key, local_tenants
from hermetic.model.tokenizer import Tokenizer
from hermetic.telemetry.metrics import Account, Metrics


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(text: str, name: str, **labels: str) -> float | None:
    return samples(text).get((name, frozenset(labels.items())))


async def test_models_show_the_context_length_and_the_pools_it_comes_from(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("smollm2", "model", 256)
    assert model["hermetic"]["pool_tokens"] == {"prefill-0": 256, "decode-0": 512}
    assert model["hermetic"]["verify"] == "landing"
    assert (await client.get("/v1/models/smollm2")).json() == model


async def test_models_say_who_can_connect_and_what_they_are_asked_for(
    backend: ScriptedBackend, tokenizer: Tokenizer
) -> None:
    """What `hermetic check` asks of every deployment: this one too."""
    here = create_app(backend, tokenizer, local_tenants(), listens="127.0.0.1")
    (model,) = (await client_of(here).get("/v1/models")).json()["data"]
    said = {name: model["hermetic"].get(name) for name in ("listens", "api_keys", "metrics")}
    assert said == {"listens": "127.0.0.1", "api_keys": False, "metrics": "everybody"}
    keyed = Tenants({hash_key("k"): Tenant("alice", "tenant:alice")})
    open_to_all = client_of(create_app(backend, tokenizer, keyed, listens="0.0.0.0"))
    answer = await open_to_all.get("/v1/models", headers={"authorization": "Bearer k"})
    own = answer.json()["data"][0]["hermetic"]
    assert (own["listens"], own["api_keys"], own["metrics"]) == ("0.0.0.0", True, "this host")


async def test_tokenize_and_detokenize_are_inverse_in_vllms_shape(client: httpx.AsyncClient) -> None:
    # The captured vLLM answer to "Hello world": count 2, tokens [19556, 905].
    answer = (await client.post("/tokenize", json={"model": "smollm2", "prompt": "Hello world"})).json()
    assert answer == {"count": 2, "max_model_len": 256, "tokens": [19556, 905], "token_strs": None}
    strs = (await client.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True})).json()[
        "token_strs"
    ]
    assert strs == ["Hello", " world"]
    assert (await client.post("/detokenize", json={"tokens": [19556, 905]})).json() == {
        "prompt": "Hello world"
    }


async def test_tokenize_of_messages_gives_what_chat_sends_to_the_model(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    messages = chat("Hi")["messages"]
    tokens = (await client.post("/tokenize", json={"messages": messages})).json()["tokens"]
    await client.post("/v1/chat/completions", json=chat("Hi"))
    assert tuple(tokens) == backend.requests[0].tokens
    text = (await client.post("/detokenize", json={"tokens": tokens})).json()["prompt"]
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


async def test_health_says_that_the_process_lives_and_ready_that_work_moves(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    assert (await client.get("/ready")).status_code == 200
    backend.unready = "decode-0 has not answered for 7 s"
    response = await client.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert "decode-0" in response.json()["error"]["message"]
    assert "retry-after" in response.headers
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/version")).json() == {"version": hermetic.__version__}


async def test_metrics_count_each_tenants_requests_tokens_and_refusals(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    path = "/v1/completions"
    await client.post(path, json=completion(prompt=[5] * 20, max_tokens=3))
    await client.post(path, json=completion(stream=True, prompt=[5] * 20, max_tokens=3))
    await client.post(path, json=completion(max_tokens=0))
    await client.post("/v1/chat/completions", json=chat(max_tokens=1000))
    backend.scripts += [[Failed("worker_lost", "gone", 503)], [Token(0, 504), Failed("kv_integrity", "bad")]]
    await client.post(path, json=completion(prompt=[5]))
    await client.post(path, json=completion(prompt=[5], stream=True))
    text = (await client.get("/metrics")).text
    assert value(text, "hermetic_requests_total", tenant="local", endpoint=path, outcome="completed") == 2
    assert value(text, "hermetic_requests_total", tenant="local", endpoint=path, outcome="refused") == 1
    assert value(text, "hermetic_requests_total", tenant="local", endpoint=path, outcome="failed") == 2
    assert value(text, "hermetic_refusals_total", tenant="local", code="invalid_request") == 1
    assert value(text, "hermetic_refusals_total", tenant="local", code="context_length_exceeded") == 1
    assert value(text, "hermetic_failures_total", tenant="local", code="worker_lost") == 1
    assert value(text, "hermetic_failures_total", tenant="local", code="kv_integrity") == 1
    assert value(text, "hermetic_prompt_tokens_total", tenant="local") == 20 + 20 + 1 + 1
    assert value(text, "hermetic_completion_tokens_total", tenant="local") == 3 + 3 + 1
    assert value(text, "hermetic_time_to_first_token_seconds_count") == 3
    assert value(text, "hermetic_inter_token_latency_seconds_count") == 4
    assert value(text, "hermetic_requests_running", tenant="local") == 0
    assert value(text, "hermetic_tenant_pages_held", tenant="local") == 0


async def test_metrics_show_the_workers_figures_by_state_and_level(
    client: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.figures = {
        "decode-0": {
            "pages_free": 12, "pages_leased": 3, "slots_quarantined": 1, "tiles_verified_landing": 90,
            "requests_verified_landing": 2, "lease_double_closes": 0, "messages_stale": 4, "pages_total": 15, "pages_sending": 2,
            "pages_quarantined_ever": 6, "bytes_landed_total": 7, "odd name": 1,
        },
        "prefill-0": {"pages_free": 5},
    }  # fmt: skip
    text = (await client.get("/metrics")).text
    assert value(text, "hermetic_pages", worker="decode-0", state="free") == 12
    assert value(text, "hermetic_pages", worker="decode-0", state="leased") == 3
    assert value(text, "hermetic_pages", worker="prefill-0", state="free") == 5
    assert value(text, "hermetic_slots", worker="decode-0", state="quarantined") == 1
    assert value(text, "hermetic_tiles_verified_total", worker="decode-0", level="landing") == 90
    assert value(text, "hermetic_requests_verified_total", worker="decode-0", level="landing") == 2
    assert value(text, "hermetic_worker_lease_double_closes_total", worker="decode-0") == 0
    assert value(text, "hermetic_worker_messages_stale_total", worker="decode-0") == 4
    assert value(text, "hermetic_pages_capacity", worker="decode-0") == 15
    assert value(text, "hermetic_worker_pages_sending", worker="decode-0") == 2
    assert value(text, "hermetic_worker_pages_quarantined_ever_total", worker="decode-0") == 6
    assert value(text, "hermetic_worker_bytes_landed_total", worker="decode-0") == 7
    assert value(text, "hermetic_worker_odd_name", worker="decode-0") == 1


def test_metrics_show_deferred_releases_and_what_the_gateway_did_about_lost_workers() -> None:
    decode = {
        "releases_deferred": 2, "releases_drained_total": 5, "releases_fenced_total": 1, "releases_quarantined_total": 1,
        "release_seconds_sum": 12.5, "release_seconds_count": 6, "release_seconds_bucket_0.01": 1,
        "release_seconds_bucket_0.1": 2, "release_seconds_bucket_1": 4, "release_seconds_bucket_10": 5,
        "release_seconds_bucket_60": 6, "release_seconds_bucket_inf": 6, "drains_outstanding": 3, "peers_lost": 1,
        "messages_resent": 7, "resends": 8, "pages_refused_landing": 9, "slots_fenced": 10, "fences_total": 11,
    }  # fmt: skip
    gateway = {
        "retries_worker_lost": 4, "retries_no_pair": 0, "workers_ready": 2, "workers_unreachable": 1, "workers_alive": 2,
        "registrations_rejected": 3, "messages_stale": 5, "disabled": 1, "integrity_failures_total": 3,
        "disabled_trips_total": 1, "context_advertised": 256, "reruns": 6,
    }  # fmt: skip
    text = Metrics().scrape({"decode-0": decode, "prefill-0": decode, "gateway": gateway}).decode()
    for worker in ("decode-0", "prefill-0"):
        assert value(text, "hermetic_releases_deferred", worker=worker) == 2
        assert value(text, "hermetic_releases_total", worker=worker, outcome="drained") == 5
        assert value(text, "hermetic_releases_total", worker=worker, outcome="fenced") == 1
        assert value(text, "hermetic_releases_total", worker=worker, outcome="quarantined") == 1
        assert value(text, "hermetic_release_seconds_bucket", worker=worker, le="0.1") == 2
        assert value(text, "hermetic_release_seconds_bucket", worker=worker, le="+Inf") == 6
        assert value(text, "hermetic_release_seconds_count", worker=worker) == 6
        assert value(text, "hermetic_release_seconds_sum", worker=worker) == 12.5
        assert value(text, "hermetic_drains_outstanding", worker=worker) == 3
        for name, count in (("peers_lost", 1), ("messages_resent", 7), ("resends", 8), ("pages_refused_landing", 9),
                            ("slots_fenced", 10), ("fences", 11)):  # fmt: skip
            assert value(text, f"hermetic_worker_{name}_total", worker=worker) == count
    assert value(text, "hermetic_retries_total", reason="worker_lost") == 4
    assert value(text, "hermetic_workers", state="ready") == 2
    assert value(text, "hermetic_workers", state="unreachable") == 1
    assert value(text, "hermetic_workers_alive") == 2
    assert value(text, "hermetic_registrations_rejected_total") == 3
    assert value(text, "hermetic_gateway_messages_stale_total") == 5
    assert value(text, "hermetic_disabled") == 1
    assert value(text, "hermetic_integrity_failures_total") == 3
    assert value(text, "hermetic_disabled_trips_total") == 1
    assert value(text, "hermetic_context_advertised_tokens") == 256
    names = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(names) == len(set(names))


async def test_pages_held_count_shared_prompt_pages_once_and_whole_pages(
    make_app: Any, backend: ScriptedBackend
) -> None:
    # 40 prompt tokens are 2 full pages of 16 and 8 tokens on a third; with 9 more a choice needs a fourth.
    held: list[float] = []

    class Watching(Metrics):
        def read(self) -> None:
            text = self.scrape({}).decode()
            held.append(value(text, "hermetic_tenant_pages_held", tenant="local") or 0)

    import asyncio

    from driving import client_of

    from hermetic.gateway.app import create_app
    from hermetic.gateway.backend import Finish
    from hermetic.gateway.tenants import local_tenants

    class Peek(asyncio.Event):
        async def wait(self) -> bool:
            metrics.read()
            return True

    metrics = Watching()
    steps: list[Any] = [
        Token(0, 504),
        Peek(),
        *[Token(0, 504)] * 8,
        Peek(),
        Finish(0, "length"),
        Peek(),
        Token(1, 504),
        Finish(1, "length"),
    ]
    backend.scripts.append(steps)
    client = client_of(create_app(backend, backend.tokenizer, local_tenants(), metrics=metrics))  # type: ignore[arg-type]
    assert (await client.post("/v1/completions", json=completion(prompt=[5] * 40, n=2))).status_code == 200
    metrics.read()
    assert held == [2 + 1 + 1, 2 + 2 + 1, 2 + 1, 0]


def test_times_are_taken_per_choice() -> None:
    now = iter([0.0, 1.0, 1.5, 3.0, 3.5, 4.0])
    metrics = Metrics()
    account = Account(metrics, "/v1/completions", clock=lambda: next(now))
    account.begin("alice")
    for choice in (0, 1, 0, 1):  # at 1.0, 1.5, 3.0 and 3.5
        account.token(choice)
    account.end("completed")
    account.end("failed", "internal_error")
    text = metrics.scrape({}).decode()
    assert value(text, "hermetic_time_to_first_token_seconds_sum") == 1.0
    assert value(text, "hermetic_inter_token_latency_seconds_sum") == 2.0 + 2.0
    assert value(text, "hermetic_request_duration_seconds_sum") == 4.0
    assert (
        value(text, "hermetic_requests_total", tenant="alice", endpoint="/v1/completions", outcome="failed")
        is None
    )


def test_the_documentation_lists_every_code_with_its_status_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    assert {name: (int(status), meaning, remedy) for name, status, meaning, remedy in rows} == {
        name: (code.status, code.meaning, code.remedy) for name, code in CODES.items()
    }
