"""gateway, prefill, decode and serve as real processes: they find each other, serve, leave, die and come back."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from running import Command, ask, free_port, until

from hermetic import keys
from hermetic.proof.conform import conform

pytestmark = pytest.mark.slow
GATEWAY, HTTP, PREFILL, DECODE = "127.0.0.2", "127.0.0.1", "127.0.0.3", "127.0.0.4"
Start = Callable[..., Command]


@pytest.fixture(scope="module")
def cluster(folder: Path) -> str:
    """A cluster file whose parts have an address each."""
    keys.write(folder / "cluster.keys", keys.ClusterKeys.make())
    (folder / "cluster.toml").write_text(f"""
model = "./tiny"
keys = "cluster.keys"
[gateway]
control = "{GATEWAY}:{free_port(GATEWAY)}"
http = "{HTTP}:0"
[workers.p]
role = "prefill"
listen = "{PREFILL}:{free_port(PREFILL)}"
kv = "4MiB"
threads = 1
[workers.d]
role = "decode"
listen = "{DECODE}:0"
kv = "4MiB"
threads = 1
slots = 8
[timing]
silent_seconds = 5
""")
    return "cluster.toml"


def url_of(gateway: Command) -> str:
    return gateway.wait_for(r"ready (http://\S+)")[1]


def serves(url: str) -> bool:
    return ask(url).status_code == 200


def test_a_cluster_of_three_commands_serves_leaves_and_comes_back(
    command: Start, cluster: str, folder: Path
) -> None:
    gateway = command("gateway", "--cluster", cluster)
    url = url_of(gateway)
    early = ask(url)
    assert early.status_code == 503, early.text
    assert httpx.get(f"{url}/ready", timeout=30).status_code == 503
    prefill = command("prefill", "--cluster", cluster, "--name", "p", "--trace", "trace")
    decode = command("decode", "--cluster", cluster, "--trace", "trace")
    decode.wait_for("ready d ")
    until(lambda: serves(url), log=gateway.log)
    answer = ask(url).json()["choices"][0]["text"]

    # Every port binds to the address it is given and to no other; nothing else is listened on.
    for running, host in ((prefill, PREFILL), (decode, DECODE)):
        assert {ip for ip, _ in running.listening()} == {host}
        assert len(running.listening()) == 1
    assert {ip for ip, _ in gateway.listening()} == {GATEWAY, HTTP}
    assert len(gateway.listening()) == 2

    # A signal to a worker that has work: what it has ends well, then it leaves with 0.
    got: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: got.append(ask(url, max_tokens=900)))
    asking.start()
    text = 'hermetic_worker_output_tokens_total{worker="d"}'
    before = metric(url, text)
    until(lambda: metric(url, text) > before + 3)
    assert decode.end() == 0
    asking.join(60)
    assert got[0].status_code == 200
    assert got[0].json()["usage"]["completion_tokens"] == 900
    assert ask(url).status_code == 503

    # It comes back under its name, as another incarnation.
    again = command("decode", "--cluster", cluster, "--trace", "trace")
    until(lambda: serves(url), 240, again.log)
    assert ask(url).json()["choices"][0]["text"] == answer

    # The gateway dies and another takes its place: the same workers serve.
    gateway.end(signal.SIGKILL)
    gateway = command("gateway", "--cluster", cluster)
    url = url_of(gateway)
    until(lambda: serves(url), log=gateway.log)
    assert ask(url).json()["choices"][0]["text"] == answer

    # No secret stands where others can read it.
    secrets = [
        line.split('"')[1]
        for line in (folder / "cluster.keys").read_text().splitlines()
        if line.partition(" ")[0].endswith("secret")
    ]
    for running in (gateway, prefill, again):
        process = psutil.Process(running.process.pid)
        seen = " ".join([*process.cmdline(), *process.environ().values(), *running.log])
        assert not any(secret in seen for secret in secrets)

    # A second signal ends a worker that still has work; its request cannot go on anywhere.
    body = {"model": "tiny", "prompt": [5] * 40, "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        for number in (
            signal.SIGSTOP,
            signal.SIGTERM,
            signal.SIGCONT,
        ):  # stopped, so that it cannot finish in between
            again.process.send_signal(number)
        again.wait_for("leaving")
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(20) == 0
        rest = "".join(lines)
    assert '"worker_lost"' in rest
    assert "Traceback" not in "\n".join(gateway.log + prefill.log + decode.log + again.log)
    assert prefill.end() == 0
    assert gateway.end() == 0

    # What the workers recorded into one file, through all of this, is a behaviour of the protocol.
    found = conform(folder / "trace")
    assert found.conforms, found.lines()
    assert sorted(found.processes) == ["d", "d", "p"]
    assert not found.killed
    assert found.actions["enter"] >= 5


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)), 0.0)


@pytest.mark.soak  # test_kills.py kills every kind of worker, of the same command
def test_a_killed_worker_of_serve_comes_back_and_the_stream_goes_on(command: Start) -> None:
    serve = command(
        "serve", "--port", "0", "--model", "./tiny", "--prefill-kv", "4MiB", "--decode-kv", "4MiB", "--threads", "1",
        "--decode-workers", "2", "--landing-slots", "8", "--dtype", "float32",  # in bf16 a re-run may round otherwise
    )  # fmt: skip
    url = url_of(serve)
    undisturbed = ask(url, max_tokens=900).json()["choices"][0]["text"]
    got: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: got.append(ask(url, max_tokens=900)))
    before = {
        d: metric(url, f'hermetic_worker_output_tokens_total{{worker="{d}"}}')
        for d in ("decode-0", "decode-1")
    }
    asking.start()
    busy: list[str] = []

    def works() -> bool:
        name = 'hermetic_worker_output_tokens_total{{worker="{}"}}'
        busy[:] = [d for d, count in before.items() if metric(url, name.format(d)) > count + 3]
        return bool(busy)

    until(works)
    status = httpx.get(f"{url}/admin/status", timeout=30).json()
    workers = {w["id"]: w for w in status["workers"]}
    victim = workers[busy[0]]
    assert victim["pid"] in {child.pid for child in serve.children}
    psutil.Process(victim["pid"]).kill()
    asking.join(60)
    assert got[0].status_code == 200, got[0].text
    assert got[0].json()["choices"][0]["text"] == undisturbed
    serve.wait_for(f"worker {busy[0]} ended with status -9; it is started again in 1 s")
    serve.wait_for(f"worker {busy[0]} is ready again")

    def both() -> bool:
        now = httpx.get(f"{url}/admin/status", timeout=30).json()["workers"]
        return sum(w["state"] == "ready" for w in now) == 3

    until(both)
    new = {w["id"]: w for w in httpx.get(f"{url}/admin/status", timeout=30).json()["workers"]}[busy[0]]
    assert new["pid"] != victim["pid"]
    assert new["incarnation"] != victim["incarnation"]
    assert serves(url)
    children, began = serve.children, time.monotonic()
    assert len(children) == 3
    assert serve.end() == 0
    assert time.monotonic() - began < 10
    assert not psutil.wait_procs(children, timeout=1)[1]
