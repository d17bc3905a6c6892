"""What a half says about tickets that have no machine: every message, for every way in which the ticket may be away."""

from __future__ import annotations

import pytest

from hermetic.handoff import messages as m
from hermetic.handoff.outcome import Aborted, Completed, Failed, Outcome, Refused
from hermetic.handoff.unknown import UNKNOWN, Answer, at_decode, at_prefill

GRANT, CREDIT, RESEND = m.Grant(40, 3), m.Credit(0, ((5, 1),)), m.Resend(0, (5, 1))
ABORT, ACK = m.Abort("client_gone", "it left"), m.Ack()
FAILED = Failed("kv_integrity", "page 1")
MISSED = Answer(send=(m.Abort("kv_integrity", "page 1"), m.Drained()))
STALE = Answer(stale=True)


@pytest.mark.parametrize(
    ("ended", "message", "answer"),
    [
        (None, GRANT, Answer(begin=True)),
        (None, CREDIT, STALE),
        (None, RESEND, STALE),
        (None, ACK, STALE),
        (None, ABORT, Answer(send=(m.Drained(),), remember=Aborted("client_gone", "it left"))),
        (FAILED, GRANT, MISSED),
        (FAILED, CREDIT, MISSED),
        (FAILED, RESEND, MISSED),
        (FAILED, ACK, STALE),
        (FAILED, ABORT, Answer(send=(m.Drained(),))),
        (Completed(), GRANT, STALE),
        (Completed(), CREDIT, STALE),
        (Completed(), RESEND, STALE),
        (Completed(), ACK, STALE),
        (Completed(), ABORT, Answer(send=(m.Drained(),))),
    ],
)
def test_prefill_begins_only_what_was_never_here_and_answers_what_decode_missed(
    ended: Outcome | None, message: m.HandoffMessage, answer: Answer
) -> None:
    assert at_prefill(ended, message) == answer


@pytest.mark.parametrize("ended", [Aborted("a", "b"), Refused("a", "b"), FAILED])
def test_the_first_cause_of_an_end_is_what_decode_is_told(ended: Aborted | Refused | Failed) -> None:
    assert at_prefill(ended, GRANT).send[0] == m.Abort(ended.code, ended.reason)


@pytest.mark.parametrize("message", [m.Started(3), m.Landed(1, ((0, 5, 1),)), m.Complete(40, 3, 1, b"")])
@pytest.mark.parametrize(("entered", "said"), [(True, m.Ack()), (False, UNKNOWN)])
def test_decode_tells_a_prefill_that_still_works_how_the_ticket_ended(
    message: m.HandoffMessage, entered: bool, said: m.HandoffMessage
) -> None:
    assert at_decode(entered, message) == Answer(send=(said,), stale=True)


@pytest.mark.parametrize("message", [m.Drained(), ABORT])
def test_decode_says_nothing_to_a_prefill_that_has_ended_as_well(message: m.HandoffMessage) -> None:
    assert at_decode(False, message) == at_decode(True, message) == STALE
