"""Servers that leak on purpose, for testing whatever is to find leaks: `hermetic audit`, first of all.

    python -m hermetic.lab leaky NAME [--rate 0.05] [--port 8000] [--seed 0] [--mode disaggregated]

A real `hermetic serve` in processes of its own, with the default model, real pages and real HTTP, in which one fault of
the field (FAULTS) is on and the walls that would catch it are down. The one thing to know: the faults wait for a switch,
so that one server plays all of them, one after the other, and none while the switch is off. The product has neither the
faults nor the switch: the lab patches its own processes from outside.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from hermetic.gateway.tenants import hash_key
from hermetic.kv.geometry import Geometry
from hermetic.lab.leaky_switch import VARIABLE, struck, turn
from hermetic.model.source import locate
from hermetic.model.weights import read_config
from hermetic.options import OptionError

START_SECONDS = 300.0  # compiling without a cache, on a busy machine
STOP_SECONDS = 15.0
PAGE = 16
KEYS = ("hk-lab-leaky-server-alice", "hk-lab-leaky-server-bob")  # of two tenants; they open nothing else


class LeakyError(RuntimeError):
    """A server did not start, or ended; the message has the end of what it said."""


@dataclass(frozen=True)
class LeakyFault:
    """`where`: the process that it happens in. `rate`: the share of the occasions on which it strikes, by itself. `shows`:
    what somebody outside can see of it. `modes`: those of `hermetic serve` in which it can happen."""

    name: str
    what: str
    fault_class: str  # in FAULTS.md
    where: str  # prefill, decode or gateway; a unified worker is both halves
    rate: float
    shows: str = "an answer"  # an answer, usage, silence, a 200 or timing
    modes: tuple[str, ...] = ("disaggregated", "unified")


_RARE = 0.05
_LIST = (
    LeakyFault(
        "placeholder",
        "The incident: a prompt that the prefill pool cannot hold becomes one placeholder token, and all of its pages are "
        "reported complete; attention reads what former requests left in them.",
        "fail open", "prefill", 1.0, modes=("disaggregated",),
    ),
    LeakyFault(
        "page-table",
        "An entry of the attention table names a page of another request that is running.",
        "stale reference", "decode", _RARE,
    ),
    LeakyFault(
        "stale-page",
        "The last full page of a prompt never comes, and what a former request left in it is read.",
        "partial state", "decode", _RARE,
    ),
    LeakyFault(
        "reused-page",
        "A page of a running request was given back too early, and the next request writes to it.",
        "in-flight reuse", "decode", _RARE,
    ),
    LeakyFault(
        "late-landing",
        "A landing slot is granted anew before its page was copied out: the copy takes another request's bytes.",
        "stream order", "decode", _RARE, modes=("disaggregated",),
    ),
    LeakyFault(
        "tail-page",
        "With k pages of prompt, or one token more or less, the last page does not come and holds another's rows.",
        "partial state", "decode", 1.0,
    ),
    LeakyFault(
        "aborted-page",
        "A page of a request whose client left is still in the table of the next one.",
        "in-flight reuse", "decode", 1.0,
    ),
    LeakyFault(
        "restored-page",
        "A request that had to wait for pages, or gave them back and comes again, gets a page of another.",
        "partial state", "decode", 0.5,
    ),
    LeakyFault(
        "heads-misplaced",
        "The right bytes of a prompt in the wrong place: the tiles of two KV heads are swapped.",
        "layout mismatch", "decode", _RARE,
    ),
    LeakyFault(
        "first-token",
        "A request gets the first token of the one before it.",
        "slot bleed", "decode", _RARE,
    ),
    LeakyFault(
        "parameters",
        "A request is sampled with the parameters of the one before it, the length of the answer among them.",
        "slot bleed", "decode", _RARE,
    ),
    LeakyFault(
        "swapped-rows",
        "For one step, two requests of a batch are sampled from each other's logits.",
        "slot bleed", "decode", _RARE,
    ),
    LeakyFault(
        "short-key",
        "Keys of cached pages are cut short, so that now and then a page of another prompt is hit.",
        "key scope", "prefill", 1 / 256,
    ),
    LeakyFault(
        "prefix-too-long",
        "A prefix hit is one page too long: the page that followed in the other prompt comes with it.",
        "hit path", "prefill", _RARE,
    ),
    LeakyFault(
        "shared-cache",
        "The key of cached pages leaves out the tenant: a prompt is faster when another tenant has sent it.",
        "key scope", "prefill", 1.0, shows="timing",
    ),
    LeakyFault(
        "swapped-streams",
        "Two requests that are answered side by side get each other's tokens from some step on.",
        "slot bleed", "gateway", _RARE,
    ),
    LeakyFault(
        "leftover-stream",
        "What was made for a client that left goes out to the next one, before its own answer.",
        "lost signal", "gateway", 1.0,
    ),
    LeakyFault(
        "reused-id",
        "A request whose X-Request-Id was seen before is answered as the former one was asked.",
        "id reuse", "gateway", 1.0,
    ),
    LeakyFault(
        "other-usage",
        "An answer carries the prompt_tokens of the request before it.",
        "slot bleed", "gateway", _RARE, shows="usage",
    ),
    LeakyFault(
        "truncated",
        "A prompt that does not fit is cut until it does, and answered with 200.",
        "fail open", "gateway", 1.0, shows="a 200",
    ),
    LeakyFault(
        "edge-hangs",
        "A request that needs the last page of the context is taken and never run, and everything waits behind it.",
        "stuck queue", "gateway", 1.0, shows="silence",
    ),
)  # fmt: skip
FAULTS: dict[str, LeakyFault] = {fault.name: fault for fault in _LIST}


def find(name: str) -> LeakyFault:
    """Raises OptionError with the names that there are."""
    if name not in FAULTS:
        raise OptionError(f"there is no leaky fault {name!r}; there are: {', '.join(FAULTS)}")
    return FAULTS[name]


@dataclass(frozen=True)
class LeakyOptions:
    """A server of `model`. Pools in tokens; decode's is larger, as in the incident. `port` 0: a free one.

    `leaky` False: the product itself, with the same options. `keys`: whether it wants one of KEYS."""

    mode: str = "disaggregated"
    prefill_tokens: int = 1024
    decode_tokens: int = 4096
    port: int = 0
    keys: bool = False
    leaky: bool = True
    threads: int | None = None
    model: str = "smollm2"


class LeakyServer:
    """A server in processes of its own; a context manager. `folder` gets its log, its switch and its key file."""

    def __init__(self, folder: Path, options: LeakyOptions | None = None) -> None:
        self.folder, self.options = folder, options or LeakyOptions()
        self.port = self.options.port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.fault: LeakyFault | None = None
        self._switch = folder / "switch.json"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LeakyServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -------------------------------------------------------------------------- the switch

    def turn(self, name: str, rate: float | None = None, seed: int = 0) -> None:
        """From the next request on this fault is the one that is on; "" for none. Requests that are open may see either.

        `rate`: the share of the occasions on which it strikes; the fault's own if None. Raises OptionError."""
        fault = find(name) if name else None
        if fault is not None and self.options.mode not in fault.modes:
            raise OptionError(
                f"{name} cannot happen in a {self.options.mode} server; choose --mode {fault.modes[0]}"
            )
        share = (fault.rate if fault is not None else 1.0) if rate is None else rate
        if not 0 < share <= 1:
            raise OptionError(f"--rate is {share:g}; it must be above 0 and at most 1, like 0.05")
        turn(self._switch, name, round(1 / share), seed)
        self.fault = fault

    @property
    def struck(self) -> int:
        """How often the fault that is on has struck since it was switched on."""
        return 0 if self.fault is None else struck(self._switch, self.fault.name)

    # ------------------------------------------------------------------------ its processes

    def start(self, said: Callable[[], None] = lambda: None) -> None:
        """Start it and return when it serves; `said` is called again and again meanwhile. Raises LeakyError."""
        self.launch()
        try:
            self.wait_ready(said)
        except BaseException:
            self.stop()
            raise

    def launch(self) -> None:
        """Start its processes, and wait for nothing."""
        if not self._switch.exists():
            turn(self._switch, "", 1)
        environment = os.environ | {VARIABLE: str(self._switch), "PYTHONUNBUFFERED": "1"}
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment,
            )  # fmt: skip

    def wait_ready(self, said: Callable[[], None] = lambda: None) -> None:
        """Raises LeakyError."""
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            said()
            if self._process is None or self._process.poll() is not None:
                raise LeakyError(f"the server ended while it started:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise LeakyError(f"the server was not ready within {START_SECONDS:.0f} s:\n{self.tail()}")
            time.sleep(0.2)

    def wait(self) -> int:
        """Until it ends by itself, or is told to. Its exit code."""
        assert self._process is not None
        return self._process.wait()

    def stop(self) -> None:
        """End it, whatever state it is in; its workers end when it is gone."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        finally:  # also when a second Ctrl-C came meanwhile
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def tail(self, lines: int = 15) -> str:
        """The end of what it said."""
        return "\n".join((self.folder / "log").read_text(errors="replace").splitlines()[-lines:])

    def _ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def _command(self) -> list[str]:
        options = self.options
        sizes = {"--prefill-kv": options.prefill_tokens, "--decode-kv": options.decode_tokens}
        words = ["serve", "--model", options.model, "--port", str(self.port), "--mode", options.mode]
        words += ["--page-size", str(PAGE)]
        for name, tokens in sizes.items():
            words += [name, str(-(-tokens // PAGE) * _page_bytes(options.model))]
        if options.threads is not None:
            words += ["--threads", str(options.threads)]
        if options.keys:
            words += ["--api-keys", str(self._key_file())]
        return [sys.executable, "-m", "hermetic.lab.leaky_serve" if options.leaky else "hermetic", *words]

    def _key_file(self) -> Path:
        file = self.folder / "tenants.toml"
        tables = [
            f'[tenants.{name}]\nkey_hashes = ["{hash_key(key)}"]\n'
            for name, key in zip(("alice", "bob"), KEYS, strict=True)
        ]
        file.write_text("\n".join(tables))
        return file


def _page_bytes(name: str) -> int:
    model = read_config(locate(name))
    return Geometry.attention(PAGE, model.layers, model.kv_heads, model.head_dim, "bf16").stride


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main(arguments: list[str]) -> int:
    """`python -m hermetic.lab leaky ...`: serve with one fault until Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m hermetic.lab leaky",
        description="A server that leaks on purpose.",
        epilog="\n".join(f"{fault.name:<16} {fault.what}" for fault in _LIST),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="the fault, or none")
    parser.add_argument(
        "--rate", type=float, help="the share of the occasions on which it strikes, like 0.05"
    )
    parser.add_argument("--port", type=int, default=8000, help="where it listens (0: a free port)")
    parser.add_argument("--seed", type=int, default=0, help="which of the occasions")
    parser.add_argument("--mode", choices=("disaggregated", "unified"), default="disaggregated")
    parser.add_argument("--keys", action="store_true", help="want one of two API keys, which are shown")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hermetic-leaky-") as folder:
        server = LeakyServer(Path(folder), LeakyOptions(given.mode, port=given.port, keys=given.keys))
        try:
            server.turn("" if given.name == "none" else given.name, given.rate, given.seed)
            print("starting ...", flush=True)
            server.start()
            print(f"ready {server.url}  {given.name}" + (f"  keys {' '.join(KEYS)}" if given.keys else ""), flush=True)  # fmt: skip
            return server.wait()
        except (OptionError, LeakyError) as error:
            print(f"hermetic.lab leaky: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130
        finally:
            server.stop()


__all__ = ["FAULTS", "KEYS", "LeakyError", "LeakyFault", "LeakyOptions", "LeakyServer", "find", "main"]
