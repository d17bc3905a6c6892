"""`--trace`: where it leads, and what is said at start when it cannot be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermetic.kv.lineage import Secret
from hermetic.lab.tiny import make_tiny
from hermetic.options import OptionError, ServeOptions
from hermetic.serve import deployment, worker_configs
from hermetic.worker.build import WorkerConfig
from hermetic.worker.process import WorkerProcess, run_standalone
from hermetic.worker.wire import CurveKeys


def configs(**options: Any) -> list[WorkerConfig]:
    return worker_configs(ServeOptions(**options), CurveKeys.make(), Secret.random())


def test_every_worker_of_serve_writes_to_the_same_file_whatever_directory_it_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {config.trace for config in configs(trace="here")} == {str(tmp_path / "here")}
    assert {config.trace for config in configs()} == {""}


async def test_serve_refuses_a_file_that_cannot_be_written_before_it_starts_a_worker(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny")
    path = tmp_path / "nowhere" / "trace"
    options = ServeOptions(model=model, prefill_kv=2 << 20, decode_kv=2 << 20, trace=str(path))
    started: list[object] = []
    with pytest.raises(
        OptionError, match=r"--trace .*nowhere/trace cannot be written: No such file or directory"
    ):
        async with deployment(options, started.append):  # type: ignore[arg-type]
            pass
    assert not started


async def test_serve_empties_the_file_that_was_there(tmp_path: Path) -> None:
    class Enough(Exception):
        """Nothing is to be started here."""

    def commands(_config: object) -> list[str]:
        raise Enough

    path = tmp_path / "trace"
    path.write_text("of another day\n")
    options = ServeOptions(
        model=make_tiny(tmp_path / "tiny"), prefill_kv=2 << 20, decode_kv=2 << 20, trace=str(path)
    )
    with pytest.raises((Enough, ExceptionGroup)):
        async with deployment(options, lambda *_: None, commands):
            pass
    assert path.read_bytes() == b""


def test_a_worker_by_itself_refuses_it_with_2_before_anything_else(tmp_path: Path) -> None:
    def make(*_: object) -> WorkerProcess:
        raise AssertionError("it was started all the same")

    said: list[dict[str, Any]] = []
    config = configs(trace=str(tmp_path))[0]
    with pytest.raises(SystemExit) as ended:
        run_standalone(config, said.append, make)
    assert ended.value.code == 2
    assert said == [{"error": f"--trace {tmp_path} cannot be written: Is a directory"}]
