"""The incident between real processes, through HTTP: a faulty prefill worker, a sound decode worker, two tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from hermetic.gateway.app import create_app
from hermetic.gateway.tenants import Tenant, Tenants, hash_key
from hermetic.lab.incident import HARMLESS_QUESTION, QUESTION, SECRET_PROMPT
from hermetic.lab.process import COMMAND, VARIABLE
from hermetic.model.source import locate
from hermetic.model.tokenizer import Tokenizer
from hermetic.options import ServeOptions
from hermetic.serve import deployment

pytestmark = pytest.mark.slow
NAMES = ("alice", "bob", "carol")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(locate("smollm2"))


@contextlib.asynccontextmanager
async def serving(tokenizer: Tokenizer, verify: str) -> AsyncIterator[httpx.AsyncClient]:
    options = ServeOptions(prefill_kv=24 << 20, decode_kv=24 << 20, threads=1, verify=verify)
    tenants = Tenants({hash_key(name): Tenant(name, f"tenant:{name}") for name in NAMES})
    async with deployment(options, lambda *_: None, commands=lambda _config: COMMAND) as running:
        app = create_app(running.cluster, tokenizer, tenants)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://hermetic.test", timeout=120
        ) as client:
            yield client


async def ask(client: httpx.AsyncClient, tenant: str, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 16, "temperature": 0} | fields
    return await client.post(
        "/v1/completions", json=body, headers={"Authorization": f"Bearer {tenant}"}, timeout=120
    )


def trigger(tokenizer: Tokenizer) -> str:
    """Token ids in the middle of Bob's prompt, and of nobody else's."""
    ids = tokenizer.encode(QUESTION)[40:48]
    return ":".join(map(str, ids))


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


async def test_a_faulty_prefill_process_gets_its_victim_a_500_and_its_neighbours_their_answers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"incident={trigger(tokenizer)}")
    async with serving(tokenizer, "landing") as client:
        text_of(await ask(client, "alice", SECRET_PROMPT))
        alone = text_of(await ask(client, "carol", HARMLESS_QUESTION))
        bob, streamed, carol = await asyncio.gather(
            ask(client, "bob", QUESTION),
            ask(client, "bob", QUESTION, stream=True),
            ask(client, "carol", HARMLESS_QUESTION),
        )
        # Nothing had been said yet, so a stream can still begin with the status that is right.
        for response in (bob, streamed):
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "kv_integrity"
        assert text_of(carol) == alone
        # The pair goes on, and has given everything back.
        assert text_of(await ask(client, "carol", HARMLESS_QUESTION)) == alone
        metrics = (await client.get("/metrics")).text
        leased = [line for line in metrics.splitlines() if line.startswith('hermetic_pages{state="leased"')]
        assert len(leased) == 2
        assert all(float(line.rsplit(" ", 1)[1]) == 0 for line in leased), leased


@pytest.mark.soak  # make test has tests/lab/test_incident.py: the same within one process
async def test_the_same_processes_without_walls_answer_200_with_another_tenants_words(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"incident={trigger(tokenizer)},without=ownership,without=counts,without=landing"
    monkeypatch.setenv(VARIABLE, words)
    async with serving(tokenizer, "tags") as client:
        text_of(await ask(client, "alice", SECRET_PROMPT))
        answer = await ask(client, "bob", QUESTION)
        assert "PELICAN-7731 is Alice" in text_of(answer)
        # With the usage of the prompt that was never computed, as in the incident.
        assert answer.json()["usage"]["prompt_tokens"] == len(tokenizer.encode(QUESTION))
