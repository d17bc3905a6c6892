"""The drill's points: a handoff passes each of them, and a worker dies at the one that is armed and at no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hermetic.handoff.outcome import Completed
from hermetic.lab.pair import LabPair
from hermetic.lab.points import POINTS, RESENDS, Points, arm, fired, watch
from hermetic.lab.tiny import make_tiny


class Noted(Points):
    """Notes what is passed, and goes on."""

    def __init__(self, folder: Path, role: str) -> None:
        super().__init__(folder, role)
        self.seen: list[str] = []
        self.died: list[str] = []

    def passed(self, point: str) -> None:
        assert point in POINTS[self.role], point
        self.seen.append(point)
        super().passed(point)

    def die(self, point: str) -> None:
        self.died.append(point)


@pytest.fixture
def pair(tmp_path: Path) -> LabPair:
    return LabPair(make_tiny(tmp_path / "model"), dtype="float32", chunk=64, threads=1)


def notes(pair: LabPair, folder: Path) -> tuple[Noted, Noted]:
    """Watch both workers; the pair is paired again, so that its writes are watched as well."""
    prefill, decode = Noted(folder, "prefill"), Noted(folder, "decode")
    watch(pair.prefill, prefill)
    watch(pair.decode, decode)
    (peer,) = pair.decode._peers.values()
    for found in pair.prefill._pairs.values():
        found.sender = pair.prefill._transport.sender(peer.receiver.descriptor(), peer.info.geometry.stride)
    return prefill, decode


def test_a_handoff_a_cancel_and_a_resend_pass_every_point_of_both_roles(
    pair: LabPair, tmp_path: Path
) -> None:
    prefill, decode = notes(pair, tmp_path)
    prompt = list(range(3, 3 + 200))
    assert isinstance(pair.ask(prompt, n=2).outcome, Completed)
    for rounds in range(1, 6):  # clients that leave at different times
        key = pair.submit(prompt[rounds:])
        for _ in range(rounds):
            pair.round()
        pair.cancel(key)
        pair.run()
    arm(tmp_path, "prefill", RESENDS["prefill"][0])
    arm(tmp_path, "prefill", "write: half done")
    assert isinstance(pair.ask(prompt[10:]).outcome, Completed)
    assert set(POINTS["prefill"]) - set(prefill.seen) == set()
    assert set(POINTS["decode"]) - set(decode.seen) == set()


def test_an_armed_point_is_used_up_by_the_first_pass(pair: LabPair, tmp_path: Path) -> None:
    _, decode = notes(pair, tmp_path)
    arm(tmp_path, "decode", "copy: tagged")
    assert not fired(tmp_path, "decode", "copy: tagged")
    for seed in (1, 2):
        assert isinstance(pair.ask(list(range(seed, 100))).outcome, Completed)
    assert decode.died == ["copy: tagged"]
    assert fired(tmp_path, "decode", "copy: tagged")


def test_a_page_that_is_spoilt_for_a_drill_is_sent_again_and_the_answer_is_right(
    pair: LabPair, tmp_path: Path
) -> None:
    prompt = list(range(3, 3 + 200))
    undisturbed = pair.ask(prompt).tokens
    notes(pair, tmp_path)
    arm(tmp_path, "prefill", "resend: received")
    arm(tmp_path, "decode", "resend: sent")
    answer = pair.ask(prompt)
    assert isinstance(answer.outcome, Completed)
    assert answer.tokens == undisturbed
    assert pair.decode.landing.resends > 0
    pair.check()


def test_a_process_that_passes_an_armed_point_is_killed_and_says_where(tmp_path: Path) -> None:
    arm(tmp_path, "prefill", "ack: taken")
    code = (
        "import sys; from pathlib import Path; from hermetic.lab.points import Points\n"
        "p = Points(Path(sys.argv[1]), 'prefill'); p.passed('ack: received'); p.passed('ack: taken'); print('alive')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""
    assert (tmp_path / "log").read_text().split(" ", 2)[2] == "ack: taken\n"
