"""The operator's commands against a running gateway: status, drain, disable, enable, context.

Each does one thing through /admin, writes its answer to standard output and what went wrong, in one line, to standard
error, and returns the exit code: 0 done, 1 the gateway could not be asked or could not do it, 2 the request itself is wrong
(an unknown worker, a key that is not an operator's).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table
from rich.text import Text

TIMEOUT = 15.0  # seconds for one answer: the gateway itself asks its workers for 2
POLL = 0.5  # seconds between two looks at a worker that is being drained
WIDTH = 100  # columns of the table where the terminal does not say

_STYLES = {"ready": "green", "draining": "yellow", "drained": "yellow", "joining": "yellow", "unreachable": "red",
           "gone": "dim", "refused": "red"}  # fmt: skip


class OperateError(Exception):
    """What the person reads, and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def status(url: str, key: str | None, as_json: bool) -> int:
    """Show the gateway and its workers."""

    def work() -> int:
        answer = _ask(url, key, "GET", "status")
        if as_json:
            print(json.dumps(answer, indent=2))
        else:
            _show(answer)
        return 0

    return _guarded(work)


def drain(url: str, key: str | None, worker: str, undo: bool, wait: bool) -> int:
    """Give a worker nothing new, and wait until it is free; or, with `undo`, give it work again."""

    def work() -> int:
        state = _ask(url, key, "POST", "undrain" if undo else "drain", {"worker": worker})["state"]
        if undo:
            print(f"{worker} takes requests again" if state == "ready" else f"{worker} is {state}")
            return 0
        while wait and state != "drained":
            time.sleep(POLL)
            found = {one["id"]: one for one in _ask(url, key, "GET", "status")["workers"]}
            now = found.get(worker, {"state": "gone", "reason": ""})
            if now["state"] == "gone":
                print(f"{worker} is gone: nothing is left on it")
                return 0
            if now["state"] == "unreachable" and not now["open"]:
                print(f"{worker} is unreachable ({now['reason']}), and this gateway has nothing on it")
                return 0
            if now["state"] not in ("draining", "drained", "unreachable"):
                raise OperateError(f"{worker} is {now['state']}: somebody took the drain back", 1)
            state = now["state"]
        print(f"{worker} is {state}")
        return 0

    return _guarded(work)


def disable(url: str, key: str | None, reason: str) -> int:
    """Take the model away: every new request gets 400 with this reason."""

    def work() -> int:
        answer = _ask(url, key, "POST", "disable", {"reason": reason})
        print(f"disabled: every new request gets 400 with the reason: {reason}")
        if answer.get("warning"):
            print(f"hermetic: {answer['warning']}", file=sys.stderr)
            return 1
        return 0

    return _guarded(work)


def enable(url: str, key: str | None) -> int:
    """Take requests again."""

    def work() -> int:
        _ask(url, key, "POST", "enable", {})
        print("enabled: requests are taken again")
        return 0

    return _guarded(work)


def context(url: str, key: str | None, tokens: int | None) -> int:
    """Advertise at most so many tokens; None: what the pools hold."""

    def work() -> int:
        answer = _ask(url, key, "POST", "context", {"tokens": tokens})
        cap = "as much as the pools hold" if tokens is None else f"at most {tokens} tokens"
        print(f"advertised: {answer['context_advertised']} tokens ({cap})")
        return 0

    return _guarded(work)


def _guarded(work: Callable[[], int]) -> int:
    try:
        return work()
    except OperateError as error:
        print(f"hermetic: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _ask(url: str, key: str | None, method: str, what: str, body: object = None) -> dict[str, Any]:
    """The gateway's answer. Raises OperateError."""
    base = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.request(method, f"{base}/admin/{what}", json=body, headers=headers, timeout=TIMEOUT)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
        raise OperateError(f"{url} is no URL of a gateway: {error}", 2) from error
    except httpx.TimeoutException as error:
        raise OperateError(f"{base} did not answer within {TIMEOUT:.0f} s", 1) from error
    except httpx.HTTPError as error:
        raise OperateError(
            f"no gateway answers at {base} ({error}); give its address with --url", 1
        ) from error
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if response.status_code == 200 and isinstance(answer, dict):
        return answer
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        told = answer["error"]
        if told.get("code") == "not_found":
            raise OperateError(
                f"what answers at {base} has no /admin: it is not a gateway of this version", 1
            )
        hint = "; give an operator's key with --operator-key or HERMETIC_OPERATOR_KEY" * (
            response.status_code == 401
        )
        raise OperateError(f"{told.get('message')}{hint}", 1 if response.status_code >= 500 else 2)
    raise OperateError(f"{base} answered {response.status_code}, which is not a gateway's answer", 1)


# ------------------------------------------------------------------------------ the table


def _show(answer: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    gateway = answer["gateway"]
    cap = "" if gateway["context_cap"] is None else f" (capped at {gateway['context_cap']:,})"
    console.print(
        Text(
            f"model {gateway['model']}, context {gateway['context_advertised']:,} tokens{cap}, "
            f"{gateway['requests_open']} requests open, hermetic {gateway['version']}"
        )
    )
    if gateway["disabled"]:
        off = gateway["disabled"]
        console.print(Text(f"DISABLED by {off['by']}: {off['reason']}", style="bold red"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("worker", overflow="fold", max_width=20)
    for column in ("role", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("pages free", "slots free", "open"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("heard", justify="right", no_wrap=True)
    table.add_column("pid", justify="right", no_wrap=True)
    table.add_column("incarnation", no_wrap=True)
    table.add_column("address", overflow="fold")
    for worker in answer["workers"]:
        pages, slots = worker["pages"], worker["slots"]
        table.add_row(
            Text(worker["id"]),
            worker["role"],
            Text(worker["state"], style=_STYLES.get(worker["state"], "")),
            f"{pages['free']}/{worker['capacities']['pages']}" if "free" in pages else "-",
            f"{slots['free']}/{sum(slots.values())}" if "free" in slots else "-",
            str(worker["open"]),
            f"{worker['heard_seconds_ago']:.1f} s",
            str(worker["pid"]),
            worker["incarnation"][:8],
            Text(worker["address"].removeprefix("tcp://")),
        )
    console.print(table)
    if not answer["workers"]:
        console.print("no worker has joined")
    for worker in answer["workers"]:
        quarantined = worker["pages"].get("quarantined", 0), worker["slots"].get("quarantined", 0)
        if any(quarantined):
            console.print(
                Text(f"{worker['id']}: {quarantined[0]} pages and {quarantined[1]} slots in quarantine")
            )
        if worker["reason"]:
            console.print(Text(f"{worker['id']}: {worker['reason']}"))
