"""Tests of the handoff are recorded, as `--trace` does it, and each recording has to be a behaviour of the protocol.

The one thing to know: recorded are the tests of RECORDED, machines by themselves as well. A test that breaks
the protocol on purpose says so, with the reason: `@pytest.mark.breaks_the_protocol("...")`. Its recording must then be
found out, unless `seen=False` (what it breaks is not the protocol's to see). A run of tests/handoff prints which rows of
the tables were taken.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # speed is for benchmarks; this machine may be busy
settings.load_profile("untimed")

HERE = Path(__file__).parent
TOGETHER = {"handoff": "handoff"} | dict.fromkeys(("commands", "hosts", "server"), "servers")
RECORDED = ("handoff", "engine", "lab", "worker/test_lifecycle.py")  # folders and files
_RECORDING: pytest.StashKey[tuple[str, Any]] = pytest.StashKey()
_taken: Counter[tuple[str, str, str]] = Counter()
_checked: Counter[str] = Counter()


# nohup, and a shell that starts a run in the background, have these ignored, which every process of a test would inherit. A
# handler that does nothing is not inherited.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


def _recorded(item: pytest.Item) -> bool:
    return any(item.path.is_relative_to(HERE / place) for place in RECORDED)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """The recording of a test begins before its fixtures are made."""
    if not _recorded(item):
        return (yield)
    from recorded import LooseRecorder

    from hermetic.handoff.trace import Recorder

    handle, name = tempfile.mkstemp(suffix=".trace")
    os.close(handle)
    recorder = LooseRecorder(name) if item.path.parent.name == "handoff" else Recorder(name)
    recorder.install()
    item.stash[_RECORDING] = name, recorder
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that failed is not judged a second time."""
    result = yield
    if _RECORDING in item.stash:
        name, recorder = item.stash[_RECORDING]
        recorder.close()
        if Path(name).stat().st_size:
            _judge(item, Path(name), getattr(recorder, "loose", False))
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    if _RECORDING in item.stash:
        name, recorder = item.stash[_RECORDING]
        recorder.close()
        os.unlink(name)
        del item.stash[_RECORDING]
    result = yield
    if nextitem is not None and nextitem.path.parent != item.path.parent:
        _let_go()
    return result


def _let_go() -> None:
    """Models that functions of ours remember for one folder's tests are not kept beside the next folder's."""
    gc.unfreeze()
    for thing in gc.get_objects():
        if isinstance(thing, _lru_cache_wrapper) and _ours(thing.__module__):
            thing.cache_clear()
    gc.collect()


def _ours(module: str | None) -> bool:
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return (module or "").startswith("hermetic.lab") or HERE in Path(file or "/").parents


def _judge(item: pytest.Item, path: Path, loose: bool) -> None:
    from hermetic.proof.conform import conform

    found = conform(path, alone=loose, lab=True)
    mark = item.get_closest_marker("breaks_the_protocol")
    _taken.update(found.rows)
    _checked["tests"] += 1
    _checked["records"] += found.records
    if mark is None:
        assert found.conforms, "\n".join([*found.lines(), *_story(found.violation)])
    elif mark.kwargs.get("seen", True):
        assert not found.conforms, (
            f"this test is marked as breaking the protocol ({mark.args[0]}), and conforms"
        )


def _story(violation: Any) -> list[str]:
    return [
        f"{s.move}: {s.actor} {s.what} {s.key} {s.detail}" for s in (violation.steps if violation else ())
    ]


def pytest_itemcollected(item: pytest.Item) -> None:
    """A file's tests run in one process (`--dist loadgroup`). So do those that are judged together, and all that start
    servers of several gigabytes: there is never a second one of these at the same time."""
    path = item.path.relative_to(HERE)
    item.add_marker(pytest.mark.xdist_group(TOGETHER.get(path.parts[0], str(path))))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What judges the rows of all tests of the handoff comes last, and only after all of them."""
    judges = [item for item in items if item.get_closest_marker("after_all_others")]
    others = [item for item in items if item not in judges]
    if judges and not _all_of_the_handoff(config, others):
        config.hook.pytest_deselected(items=judges)
        judges = []
    items[:] = others + judges


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ungrouped tests would start all their servers in both processes, until there is no memory left."""
    if getattr(session.config.option, "loadgroup", False) and any("@" not in i.nodeid for i in session.items):
        raise pytest.UsageError("pytest-xdist has not put every test into its group (`--dist loadgroup`)")


def _all_of_the_handoff(config: pytest.Config, items: list[pytest.Item]) -> bool:
    chosen = any("::" in argument for argument in config.args) or config.getoption("keyword")
    return not chosen and {item.path for item in items}.issuperset((HERE / "handoff").glob("test_*.py"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes: what it has counted goes to the one that prints it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["recorded"] = (list(_taken.items()), dict(_checked))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    taken, checked = getattr(node, "workeroutput", {}).get("recorded", ((), {}))
    _taken.update(dict(taken))
    _checked.update(checked)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _checked:
        return
    from hermetic.proof.conform import ROWS

    missing = sorted(ROWS - _taken.keys())
    terminalreporter.write_line(
        f"recorded {_checked['tests']} tests, {_checked['records']:,} records; "
        f"rows taken: {len(ROWS) - len(missing)} of {len(ROWS)}"
        + (
            f"; never: {', '.join(f'{who} {state} --{event}' for who, state, event in missing)}"
            if 0 < len(missing) < 12
            else ""
        )
    )


@pytest.fixture
def rows_taken_so_far() -> Counter[tuple[str, str, str]]:
    """Rows of both tables that recorded tests of this run have taken: (role, state, event)."""
    return _taken
