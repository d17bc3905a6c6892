"""Starting, refusing to start, stopping, and what happens when a worker is killed."""

from __future__ import annotations

import functools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from serving import START_SECONDS, Server, stop

LONG = 400  # tokens: some seconds of work
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


TOO_LONG_FOR_PREFILL = ("--prefill-kv", "24MiB", "--context-length", "4096")
TOO_LONG_FOR_DECODE = ("--decode-kv", "24MiB", "--context-length", "2000")
TOO_LONG_FOR_THE_MODEL = ("--context-length", "9000")
LESS_THAN_A_PAGE = ("--prefill-kv", "300KiB")
IMPOSSIBLE = {
    ("--mode", "sideways"): "disaggregated",
    ("--verify", "never"): "landing",
    ("--dtype", "int3"): "float32",
    ("--prefill-kv", "lots"): "256MiB",
    ("--model", "/no/such/place"): "/no/such/place",
    ("--host", "0.0.0.0"): "--api-keys",
    ("--api-keys", "/no/such/keys.toml"): "/no/such/keys.toml",
    ("--page-size", "0"): "page-size",
    ("--decode-kv", "999999GiB"): "--decode-kv",
    ("--transport", "pigeon"): "shm, mooncake, nixl",
    ("--on-disconnect", "hope"): "drain, cancel",
    ("--decode-workers", "0"): "decode-workers",
    ("--transfer-floor", "100KB"): "--drain-deadline",
    ("--silent-after", "0"): "--silent-after",
    ("--silent-after", "1"): "at least 2",
}


def run(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hermetic", "serve", "--port", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@functools.cache
def all_refusals() -> dict[tuple[str, ...], subprocess.CompletedProcess[str]]:
    """Of every case here, two at a time: most of each is reading the model's own numbers."""
    cases = [TOO_LONG_FOR_PREFILL, TOO_LONG_FOR_DECODE, TOO_LONG_FOR_THE_MODEL, LESS_THAN_A_PAGE, *IMPOSSIBLE]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(cases, pool.map(run, cases), strict=True))


def refused(*arguments: str) -> str:
    """What `hermetic serve` says when it does not start; it must say so with exit code 2 and without a traceback."""
    done = all_refusals().get(arguments) or run(arguments)
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert "Traceback" not in said
    return said


def test_a_context_that_the_prefill_pool_cannot_hold_does_not_start() -> None:
    said = refused(*TOO_LONG_FOR_PREFILL)
    # 24 MiB / 372,736 bytes a page = 67 pages = 1,072 tokens; 4,096 tokens take 256 pages = 95,420,416 bytes.
    assert "4096" in said
    assert "1072" in said
    assert "95420416" in said


def test_a_context_that_the_decode_pool_cannot_hold_does_not_start() -> None:
    said = refused(*TOO_LONG_FOR_DECODE)
    assert "2000" in said
    assert "1072" in said


def test_a_context_beyond_the_models_window_does_not_start() -> None:
    assert "8192" in refused(*TOO_LONG_FOR_THE_MODEL)


def test_memory_for_less_than_one_page_does_not_start() -> None:
    said = refused(*LESS_THAN_A_PAGE)
    assert "364.0 KiB" in said  # 91 * 4 KiB
    assert "--page-size" in said


@pytest.mark.parametrize(("arguments", "said"), IMPOSSIBLE.items())
def test_an_impossible_option_is_named_with_what_would_do(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused(*arguments)


def test_a_port_in_use_is_said_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "hermetic", "serve", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert port in done.stderr
    assert "reading" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_truncated_model_file_is_named(tmp_path: Path) -> None:
    from hermetic.model.source import locate

    whole = locate("smollm2").file.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole[: len(whole) // 2])
    assert "broken.gguf" in refused("--model", str(broken))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_signal_ends_every_process_within_five_seconds(
    make_server: Callable[..., Server], number: signal.Signals
) -> None:
    server = make_server("--mode", "unified", "--decode-kv", "32MiB")
    processes = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    assert len(processes) >= 2
    endless = {"model": "smollm2", "prompt": "Once", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=endless, timeout=60) as response:
        next(response.iter_lines())
        server.process.send_signal(number)
        _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
    assert "Traceback" not in "\n".join(server.log)


def test_the_parents_death_ends_the_workers(make_server: Callable[..., Server]) -> None:
    server = make_server("--mode", "unified", "--decode-kv", "32MiB")
    workers = server.workers()
    assert workers
    server.process.kill()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive


@pytest.mark.soak  # make test has tests/server/test_kills.py
@pytest.mark.parametrize("role", ["prefill-0", "decode-0"])
def test_requests_on_a_killed_worker_end_with_503_none_hangs_and_the_worker_comes_back(
    make_server: Callable[..., Server], role: str
) -> None:
    server = make_server("--prefill-kv", "64MiB", "--decode-kv", "64MiB")
    ask = {"model": "smollm2", "prompt": [1000] * 300, "max_tokens": LONG, "ignore_eos": True}
    answers: list[httpx.Response] = []

    def request(stream: bool) -> None:
        answers.append(httpx.post(f"{server.url}/v1/completions", json=ask | {"stream": stream}, timeout=120))

    threads = [threading.Thread(target=request, args=(i % 2 == 1,)) for i in range(6)]
    for thread in threads:
        thread.start()
    while server.metrics()['hermetic_worker_output_tokens_total{worker="decode-0"}'] < 20:
        time.sleep(0.05)
    workers = {w["id"]: w for w in httpx.get(f"{server.url}/admin/status", timeout=30).json()["workers"]}
    psutil.Process(workers[role]["pid"]).kill()
    # It takes a second and the loading of a model until there is a pair again.
    late = wait_for_status(server, ask | {"max_tokens": 1}, 503)
    assert "retry-after" in late.headers
    assert httpx.get(f"{server.url}/ready", timeout=30).status_code == 503
    assert httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    for answer in answers:
        if role == "prefill-0" and whole(answer):
            continue  # its prompt had been handed over already
        if answer.headers["content-type"].startswith("text/event-stream"):
            assert '"worker_lost"' in answer.text
            assert "[DONE]" not in answer.text
        else:
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "worker_lost"
    assert wait_for_status(server, ask | {"max_tokens": 5}, 200).json()["usage"]["completion_tokens"] == 5
    server.wait_idle()
    assert stop(server) == 0


def wait_for_status(server: Server, ask: dict[str, object], status: int) -> httpx.Response:
    deadline = time.monotonic() + START_SECONDS
    while (answer := httpx.post(f"{server.url}/v1/completions", json=ask, timeout=60)).status_code != status:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.02)
    return answer


def whole(answer: httpx.Response) -> bool:
    """Whether this request got all that it asked for."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        return "[DONE]" in answer.text and '"error"' not in answer.text
    return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == LONG
