"""The bound between what may be in flight, how long a transport waits for it, and the drain deadline."""

from __future__ import annotations

import msgspec
import pytest
from held_transport import held_pair

from hermetic.kv.geometry import Geometry
from hermetic.options import OptionError
from hermetic.worker.build import WorkerConfig, check_bounds
from hermetic.worker.wire import CurveKeys

GEOMETRY = Geometry.attention(16, 3, 1, 8, "bf16")
CONFIG = WorkerConfig(
    name="decode",
    role="decode",
    model="any",
    dtype="auto",
    kv_bytes=1,
    page_size=16,
    verify="landing",
    context_length=None,
    chunk=512,
    max_batch=8,
    threads=1,
    host="127.0.0.1",
    secret=b"",
    keys=CurveKeys(b"", b"", b"", b""),
    log_format="text",
    slots=10,
    drain_seconds=20.0,
)


def test_all_that_is_in_flight_arrives_in_half_the_drain_deadline_or_the_worker_does_not_start() -> None:
    floor = GEOMETRY.stride  # one page a second: ten slots take ten seconds
    check_bounds(msgspec.structs.replace(CONFIG, transfer_floor=floor), GEOMETRY)
    with pytest.raises(
        OptionError,
        match=r"20 s is too short: 11 landing .* --drain-deadline 22 would do, or --landing-slots 10$",
    ):
        check_bounds(msgspec.structs.replace(CONFIG, transfer_floor=floor, slots=11), GEOMETRY)


def test_a_transport_waits_as_long_as_all_that_is_in_flight_may_take() -> None:
    # A shorter wait would end a peer's write in doubt, and fence the peer, though it is as fast as it has to be.
    asked: list[float] = []
    held_pair(drain_seconds=20.0, on_open=lambda name, host, seconds: asked.append(seconds))
    assert asked == [10.0, 10.0]
