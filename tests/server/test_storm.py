"""The abort storm: most clients leave at random points, many come back at once, and the others notice nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import here

from hermetic.lab.cluster import make_model, undisturbed
from hermetic.lab.storm import Traffic, storm, with_common_beginnings
from hermetic.options import ServeOptions
from hermetic.proof.conform import conform

VOCAB, OUTPUT, REQUESTS = 512, 24, 200


@pytest.mark.parametrize("policy", ["drain", pytest.param("cancel", marks=pytest.mark.soak)])
async def test_of_two_hundred_requests_seventy_in_a_hundred_leave_and_the_others_get_every_token(
    tmp_path: Path, policy: str
) -> None:
    model = make_model(tmp_path / "model", vocab_size=VOCAB)
    asks = with_common_beginnings(REQUESTS, OUTPUT, VOCAB, seed=11)
    expected = undisturbed(model, asks)
    options = ServeOptions(
        model=model,
        served_name="tiny",
        dtype="float32",
        prefill_kv=2 << 20,
        decode_kv=2 << 20,
        threads=1,
        chunk=64,
        landing_slots=16,
        on_disconnect=policy,
        trace=str(tmp_path / "trace"),
    )
    async with here(options) as served:
        traffic = Traffic(served.client, "tiny", expected)
        await storm(traffic, asks, leaving=0.7, again=0.5, concurrency=48, seed=5)
        figures = await served.wait_all_free()
    tally = traffic.tally
    assert not tally.wrong, tally
    assert not tally.hung, tally
    assert not tally.failed, tally
    # 60 stay and some 70 come back; of the 140 that leave, some have their answer before they get to it.
    assert tally.right + tally.left >= REQUESTS + 0.4 * 0.7 * REQUESTS
    assert tally.left >= 0.5 * 0.7 * REQUESTS
    found = conform(tmp_path / "trace")  # of two real processes: it is a behaviour of the abstract protocol
    assert found.conforms, found.lines()
    assert (found.open, found.killed, found.unfollowed) == (0, (), 0), found.lines()
    assert found.tickets >= 0.95 * REQUESTS  # a client may leave before its request has reached a worker
    assert figures["prefill-0"]["prefix_pages_shared"] > 0
    assert figures["decode-0"]["aborted"] > 0
    assert figures["decode-0"]["kv_integrity_failures"] == figures["prefill-0"]["kv_integrity_failures"] == 0
