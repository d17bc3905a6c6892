"""Disabling: at once, by itself after integrity failures, kept over a restart, and closed when in doubt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from scripted_worker import ask, read, world

from hermetic.gateway.backend import Failed, Refused
from hermetic.gateway.cluster import Cluster
from hermetic.gateway.options import ClusterOptions
from hermetic.gateway.switch import Disabled, Switch
from hermetic.handoff.outcome import Aborted
from hermetic.handoff.outcome import Failed as HalfFailed
from hermetic.options import OptionError
from hermetic.worker import wire


def switch(clock: Any = None, **options: Any) -> Switch:
    return Switch(ClusterOptions(**options), clock) if clock else Switch(ClusterOptions(**options))


def test_repeated_integrity_failures_within_the_window_disable_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    one = switch(lambda: now[0], trip_failures=3, trip_seconds=600.0)
    for at in (0.0, 300.0, 600.1, 900.2):  # never three within 600 s
        now[0] = at
        one.integrity_failure()
        one.check()
    now[0] = 1200.0
    one.integrity_failure()
    with pytest.raises(
        Refused, match="3 requests met KV pages that were not their own within 600 s"
    ) as error:
        one.check()
    assert (error.value.code, error.value.status) == ("model_disabled", 400)
    assert one.counts() == {"disabled": 1.0, "integrity_failures_total": 5, "disabled_trips_total": 1}
    assert [r.levelname for r in caplog.records] == ["CRITICAL"]
    one.integrity_failure()
    assert one.trips_total == 1  # it is off already
    one.enable("tester")
    one.check()
    one.integrity_failure()
    one.check()  # counted from the enabling on


def test_no_number_of_failures_disables_the_model_when_that_is_turned_off() -> None:
    one = switch(trip_failures=0)
    for _ in range(100):
        one.integrity_failure()
    one.check()
    assert one.counts()["integrity_failures_total"] == 100


def test_the_state_is_kept_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state"
    one = switch(state_file=str(path))
    assert one.disabled is None
    assert one.disable("an incident", "alice") is None
    assert path.stat().st_mode & 0o777 == 0o600
    again = switch(state_file=str(path))
    assert again.disabled == one.disabled
    with pytest.raises(Refused, match="disabled by alice: an incident"):
        again.check()
    again.enable("bob")
    assert switch(state_file=str(path)).disabled is None
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"version": 1}', b'{"version": 2, "disabled": null}', b"\xff\xfe",
     b'{"version": 1, "disabled": null, "more": 1}', b'{"version": 1, "disabled": true}'],
)  # fmt: skip
def test_a_state_file_that_cannot_be_read_keeps_the_gateway_from_starting(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=r"state file .*/state .*emove it"):
        Cluster("model", wire.CurveKeys.make(), ClusterOptions(state_file=str(path)))
    with pytest.raises(OptionError, match="cannot be read"):
        switch(state_file=str(tmp_path))
    with pytest.raises(OptionError, match="no directory"):
        switch(state_file=str(tmp_path / "nowhere" / "state"))


@pytest.mark.parametrize("kind", ["pipe", "zeros"])
def test_what_is_no_state_file_holds_nobody_up(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(OptionError, match="not a file"):
        switch(state_file=str(path))


def test_a_pipe_where_the_new_state_goes_holds_nobody_up(tmp_path: Path) -> None:
    one = switch(state_file=str(tmp_path / "state"))
    os.mkfifo(tmp_path / "state.new")
    warning = one.disable("an incident", "alice")
    assert warning is not None
    assert "a restart would enable the model" in warning


def test_a_reason_that_would_draw_on_the_terminal_is_shown_without_that(tmp_path: Path) -> None:
    path = tmp_path / "state"
    state = '{"version": 1, "disabled": {"reason": "a\\u001b[2Jb\\nc", "by": "x", "at": 1}}'
    path.write_text(state)
    assert switch(state_file=str(path)).disabled == Disabled("a [2Jb c", "x", 1)


def test_what_cannot_be_written_still_disables_and_does_not_enable(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    one = switch(state_file=str(home / "state"))
    home.rename(tmp_path / "moved")
    warning = one.disable("an incident", "alice")
    assert warning is not None
    assert "a restart would enable the model" in warning
    with pytest.raises(Refused):
        one.check()
    with pytest.raises(Failed) as error:
        one.enable("alice")
    assert (error.value.code, error.value.status) == ("state_not_saved", 500)
    with pytest.raises(Refused):
        one.check()
    (tmp_path / "moved").rename(home)
    one.enable("alice")
    one.check()


async def test_while_disabled_new_requests_are_refused_and_running_ones_go_on() -> None:
    async with world() as w:
        await w.pair()
        w.workers["decode-0"].limit = 2
        running = await w.cluster.generate(ask())
        w.cluster.disable("an incident", "alice")
        w.workers["decode-0"].limit = None
        assert len((await read(running))[0]) == 8
        for refused in (w.cluster.accepting, lambda: w.cluster.switch.check()):
            with pytest.raises(Refused, match="an incident"):
                refused()
        with pytest.raises(Refused) as error:
            await w.cluster.generate(ask())
        assert (error.value.code, error.value.status) == ("model_disabled", 400)
        w.cluster.runs.last_first_token = 0.0
        assert await w.cluster.ready() is None  # a probe goes through all the same
        assert w.cluster.disabled() == "an incident"
        assert (await w.cluster.stats())["gateway"]["disabled"] == 1
        w.cluster.enable("alice")
        assert len((await read(await w.cluster.generate(ask())))[0]) == 8


async def test_integrity_failures_of_distinct_requests_disable_the_model_by_itself() -> None:
    async with world(trip_failures=3) as w:
        await w.pair()
        decode, prefill = w.workers["decode-0"], w.workers["prefill-0"]
        decode.limit = 0
        for count in range(1, 4):
            stream = await w.cluster.generate(ask())
            await w.until(lambda: decode.jobs and prefill.jobs)
            halves = next(iter(decode.jobs.values())), next(iter(prefill.jobs.values()))
            # Both halves name the same page: that is one request.
            for worker, job in ((decode, halves[0]), (prefill, halves[1])):
                worker.ends_on_cancel = False
                worker.end(job, HalfFailed("kv_integrity", "page 3"))
            with pytest.raises(Failed) as error:
                await read(stream)
            assert error.value.code == "kv_integrity"
            await w.until(lambda: not w.cluster.runs._attempts)
            assert w.cluster.switch.failures_total == count
            assert (w.cluster.disabled() is not None) == (count == 3)
        with pytest.raises(Refused, match="met KV pages that were not their own"):
            await w.cluster.generate(ask())


async def test_a_bad_page_found_after_the_client_left_counts_too() -> None:
    async with world(trip_failures=1) as w:
        await w.pair()
        decode = w.workers["decode-0"]
        decode.limit, decode.ends_on_cancel = 0, False
        stream = await w.cluster.generate(ask())
        await w.until(lambda: decode.jobs)
        job = next(iter(decode.jobs.values()))
        await stream.aclose()
        decode.end(job, HalfFailed("kv_integrity", "page 3"))
        await w.until(lambda: w.cluster.disabled() is not None)
        assert isinstance(Aborted("x", "y"), Aborted)
