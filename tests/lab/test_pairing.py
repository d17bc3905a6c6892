"""Workers whose pages would not be each other's do not become a pair, and say what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Refused
from hermetic.kv.geometry import Geometry
from hermetic.kv.lineage import Secret
from hermetic.lab.pair import PREFILL, make_worker
from hermetic.lab.scene import model
from hermetic.model.params import SamplingParams
from hermetic.worker import messages as m


def said(theirs: m.WorkerInfo) -> tuple[str, Any]:
    """The reason with which a decode worker rejects a prefill worker that is like this ("": it does not), and itself."""
    answers: list[m.Body] = []
    here = make_worker("decode", model(), 8, threads=1, send=lambda _to, _key, body: answers.append(body))
    here.handle(PREFILL, None, m.Hello("prefill", theirs))
    (answer,) = answers
    return answer.reason if isinstance(answer, m.Rejected) else "", here


def prefill(**fields: Any) -> m.WorkerInfo:
    """What a real prefill worker with these options says of itself."""
    options: dict[str, Any] = {"model": model(), "pages": 8, "threads": 1}
    return make_worker("prefill", **(options | fields)).info


def with_pages_of(size: int) -> m.WorkerInfo:
    wide = Geometry.attention(size, 3, 2, 16, "bf16")
    return msgspec.structs.replace(prefill(), geometry=wide, page_size=size)


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (lambda: prefill(model=model(1)), ["model: "]),
        (lambda: prefill(dtype="float32"), ["numeric: weights=bf16", "weights=float32", "dtype='f32'"]),
        (lambda: with_pages_of(32), ["page_size: 16 here, 32 there"]),
        (lambda: prefill(secret=Secret(bytes(32))), ["key_id: "]),
    ],
    ids=["another model", "another KV dtype", "another page size", "another secret"],
)
def test_a_difference_that_would_change_a_page_refuses_the_pair_and_is_named(
    theirs: Callable[[], m.WorkerInfo], named: list[str]
) -> None:
    reason, decode = said(theirs())
    assert all(part in reason for part in named), reason
    assert not decode._peers  # no segment was made for it
    # And nothing can be asked of a pair that is not one.
    key, ids = Key(b"t" * 16, 1), (5).to_bytes(4, "little")
    outcomes: list[m.Body] = []
    decode.send = lambda _to, _key, body: outcomes.append(body)
    params = SamplingParams(max_tokens=1)
    decode.handle(b"gateway", key, m.Submit(ids, 1, params, 1, 0, 0, "t", "", 1, "prefill"))
    (ended,) = outcomes
    assert isinstance(ended, m.Ended)
    assert isinstance(ended.outcome, Refused)
    assert ended.outcome.code == "no_pair"


def test_equal_workers_become_a_pair() -> None:
    reason, decode = said(prefill())
    assert reason == ""
    assert list(decode._peers) == [PREFILL]
