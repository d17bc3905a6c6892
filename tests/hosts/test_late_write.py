"""Writes that may arrive when nobody expects them any more, between real processes over Mooncake TCP."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from hermetic.lab.apart import DRAIN, OWN, Apart, start_apart
from hermetic.lab.cluster import wrong
from hermetic.lab.hosts import missing_right
from hermetic.lab.late_write import DECODES, late_write


def test_a_prefill_worker_that_goes_on_after_it_was_given_up_writes_nowhere(apart: Apart) -> None:
    story = late_write(apart, lambda _text: None)
    assert not story.faults()
    assert story.answers >= 8


@pytest.mark.soak
def test_without_the_fence_the_late_bytes_do_arrive_and_harm_nobody(tmp_path: Path) -> None:
    """Nothing else is ever put where they land: segments are per peer, and a peer that comes back gets a new one."""
    if (why := missing_right()) is not None:
        pytest.skip(why)
    with ExitStack() as stack:
        apart = start_apart(tmp_path, stack, dict.fromkeys(DECODES, "fenceless"))
        story = late_write(apart, lambda _text: None)
    assert story.arrived > 0
    assert not story.faults()


@pytest.mark.soak
def test_a_write_that_may_still_be_running_is_ended_by_a_fence_while_both_workers_talk(apart: Apart) -> None:
    """Only the way of the data is cut: the transport gives up, prefill cannot say *drained*, and nobody is silent."""
    network, cluster = apart.network, apart.cluster
    before = _counts(apart)
    with apart.traffic([*apart.wide, *apart.short], 6) as traffic:
        cluster.wait(
            "the pair has served", lambda: apart.figure("worker_pages_landed_total", "decode-0") > 0, 30
        )
        network.block(
            "prefill-0", "decode-0", slice(OWN, OWN + 1)
        )  # where data go; control goes to the other address
        cluster.wait(
            "prefill is in doubt about a write",
            lambda: apart.figure("worker_writes_in_doubt", "prefill-0") > 0,
            60,
        )
        assert apart.state("prefill-0") == apart.state("decode-0") == "ready"
        cluster.wait(
            "decode fences its segment",
            lambda: apart.figure("worker_fences_total", "decode-0") > before.fences, 10 * DRAIN,
        )  # fmt: skip
        network.join("prefill-0", "decode-0")
        cluster.wait(
            "nothing is in doubt", lambda: apart.figure("worker_writes_in_doubt", "prefill-0") == 0, 60
        )
        landed = apart.figure("worker_pages_landed_total", "decode-0")
        time.sleep(3)
        assert not wrong(traffic.stop(), apart.expected)
    assert apart.figure("worker_pages_landed_total", "decode-0") > landed  # in the new segment
    after = _counts(apart)
    assert after.quarantined > before.quarantined
    assert after.slots_fenced > before.slots_fenced
    assert after.peers_lost == before.peers_lost


class Counts(NamedTuple):
    """Of decode-0."""

    quarantined: float
    fences: float
    slots_fenced: float
    peers_lost: float


def _counts(apart: Apart) -> Counts:
    return Counts(
        apart.figure("releases_total", "decode-0", outcome="quarantined"),
        *(
            apart.figure(f"worker_{name}_total", "decode-0")
            for name in ("fences", "slots_fenced", "peers_lost")
        ),
    )
