"""64 clients, requests of mixed length, some of which leave: nothing but what was asked for goes wrong."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import psutil
import pytest
from serving import Server

from hermetic.lab.load import Ask, drive, mixed


def memory(server: Server) -> dict[int, int]:
    """Resident bytes by process."""
    return {p.pid: p.memory_info().rss for p in [psutil.Process(server.process.pid), *server.workers()]}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("many", [160, pytest.param(500, marks=pytest.mark.soak)])
def test_requests_of_sixty_four_clients_lose_nothing(server: Server, many: int) -> None:
    asks = mixed(many, longest=400, most=48, leaving=0.2, seed=5)
    # Warm: allocators and pools reach the size that they need for this load.
    asyncio.run(drive(server.url, "smollm2", mixed(64, longest=400, most=48, leaving=0.2, seed=6), 64))
    before = memory(server)
    answers = asyncio.run(drive(server.url, "smollm2", asks, 64))
    assert len(answers) == many
    for answer in answers:
        assert answer.status == 200, answer.error
        assert not answer.error
        if not answer.left:
            assert answer.finish == "length"
            assert answer.usage["prompt_tokens"] == len(answer.ask.prompt)
            assert answer.usage["completion_tokens"] == answer.ask.max_tokens
    assert sum(a.left for a in answers) > many // 25
    server.wait_idle()
    pages = server.pages()
    assert pages["prefill-0", "free"] == 67
    assert pages["decode-0", "free"] == 270
    metrics = server.metrics()
    for worker in ("prefill-0", "decode-0"):
        assert metrics[f'hermetic_worker_lease_double_closes_total{{worker="{worker}"}}'] == 0
        assert metrics[f'hermetic_worker_tag_mismatches_total{{worker="{worker}"}}'] == 0
    assert metrics['hermetic_slots{state="free",worker="decode-0"}'] == 64
    # Preemption happened: 64 requests of up to 28 pages do not fit 270 pages, and nobody noticed.
    assert metrics['hermetic_worker_preemptions_total{worker="decode-0"}'] > 0
    after = memory(server)
    grown = {pid: after[pid] - before[pid] for pid in before}
    assert max(grown.values()) < 48 * 2**20, grown


def test_an_answer_does_not_depend_on_its_neighbours(server: Server) -> None:
    asks = [Ask(a.prompt[:300], 24) for a in mixed(12, longest=300, most=24, leaving=0, seed=9)]
    alone = [a.text for a in asyncio.run(drive(server.url, "smollm2", asks, 1))]
    together = [a.text for a in asyncio.run(drive(server.url, "smollm2", asks, 12))]
    assert together == alone


def test_a_client_that_leaves_gives_its_pages_back_at_once(server: Server) -> None:
    server.wait_idle()
    ask = {"model": "smollm2", "prompt": [1000] * 200, "max_tokens": 800, "ignore_eos": True}

    def impatient() -> None:
        try:
            httpx.post(f"{server.url}/v1/completions", json=ask, timeout=1.0)
        except httpx.TimeoutException:
            return
        raise AssertionError("800 tokens came within a second; ask for more")

    threads = [threading.Thread(target=impatient) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_idle(seconds=10)
    outputs = server.metrics()['hermetic_worker_output_tokens_total{worker="decode-0"}']
    time.sleep(1)
    assert server.metrics()['hermetic_worker_output_tokens_total{worker="decode-0"}'] == outputs
