"""Which pair gets the next attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_worker import info

from hermetic.gateway.pairing import Need, choose, may_stand, standing, stands
from hermetic.gateway.remote import Remote


@dataclass(eq=False)
class Load:
    """An attempt as far as the choice looks at it."""

    length: int
    tokens_so_far: int = field(default=0)


def remote(name: str, *loads: int, **changes: Any) -> Remote:
    one = Remote(info(name, name.partition("-")[0], **changes), None, None, lambda: 0.0, 0.0)  # type: ignore[arg-type]
    one.welcomed = True
    one.attempts = {Load(load, load): None for load in loads}  # type: ignore[misc]
    return one


def paired(*remotes: Remote) -> list[Remote]:
    for prefill in remotes:
        if prefill.info.role == "prefill":
            prefill.paired = {r.info.worker: r.info.incarnation for r in remotes if r.info.role == "decode"}
    return list(remotes)


def names(halves: Any) -> tuple[str, ...] | None:
    return None if halves is None else tuple(half.info.worker for half in halves)


NEED = Need(tokens=64, choices=1)


def test_the_pair_with_the_fewest_pages_in_flight_relative_to_its_pools_is_taken() -> None:
    remotes = paired(
        remote("prefill-0", 160), remote("prefill-1", 16), remote("decode-0", 16), remote("decode-1", 160)
    )
    assert names(choose(remotes, NEED)) == ("decode-0", "prefill-1")
    # 160 tokens are 10 of 16 pages, or 10 of 160: the larger pool has more room.
    remotes = paired(
        remote("prefill-0"), remote("decode-0", 32), remote("decode-1", 160, pages=160, max_tokens=2560)
    )
    assert names(choose(remotes, NEED)) == ("decode-1", "prefill-0")


def test_pages_are_counted_whole_and_on_the_decoding_side_with_the_tokens_made_so_far() -> None:
    one = remote("decode-0")
    one.attempts = {Load(17, 33): None}  # type: ignore[misc]
    assert one.pages_in_flight() == 3
    other = remote("prefill-0")
    other.attempts = {Load(17, 33): None}  # type: ignore[misc]
    assert other.pages_in_flight() == 2


def test_with_equal_pages_the_fewer_attempts_decide_then_the_name() -> None:
    remotes = paired(remote("prefill-0"), remote("decode-0", 16, 16), remote("decode-1", 32))
    assert names(choose(remotes, NEED)) == ("decode-1", "prefill-0")
    remotes = paired(remote("prefill-0"), remote("decode-1"), remote("decode-0"))
    assert names(choose(remotes, NEED)) == ("decode-0", "prefill-0")


def test_a_unified_worker_competes_with_the_pairs() -> None:
    remotes = paired(remote("prefill-0", 16), remote("decode-0", 16), remote("unified-0"))
    assert names(choose(remotes, NEED)) == ("unified-0",)


def test_only_what_holds_all_of_the_request_is_taken() -> None:
    remotes = paired(
        remote("prefill-0", pages=3, max_tokens=48), remote("prefill-1", 160), remote("decode-0")
    )
    assert names(choose(remotes, NEED)) == ("decode-0", "prefill-1")
    assert choose(remotes, Need(257, 1)) is None
    assert choose(remotes, Need(64, 9)) is None  # choices


def test_a_pair_to_be_avoided_is_taken_only_when_there_is_no_other() -> None:
    remotes = paired(remote("prefill-0"), remote("decode-0"), remote("decode-1", 160))
    first = choose(remotes, NEED)
    assert first is not None
    assert names(choose(remotes, NEED, (first,))) == ("decode-1", "prefill-0")
    remotes[2].reachable = False
    assert names(choose(remotes, NEED, (first,))) == ("decode-0", "prefill-0")


@pytest.mark.parametrize(
    "change",
    [{"reachable": False}, {"ended": True}, {"draining": True}, {"leaving": True}, {"welcomed": False}],
)
@pytest.mark.parametrize("which", [0, 1])
def test_nothing_new_goes_to_a_worker_that_is_not_ready(which: int, change: dict[str, bool]) -> None:
    remotes = paired(remote("prefill-0"), remote("decode-0"))
    for name, value in change.items():
        setattr(remotes[which], name, value)
    assert choose(remotes, NEED) is None
    # What runs there may be run there again while it drains.
    assert stands((remotes[1], remotes[0])) == (not {"reachable", "ended", "welcomed"} & set(change))
    assert may_stand(remotes) == ("welcomed" in change)


def test_a_pair_stands_only_in_the_incarnations_that_were_paired() -> None:
    remotes = paired(remote("prefill-0"), remote("decode-0"))
    assert len(standing(remotes)) == 1
    restarted = remote("decode-0")
    assert standing([remotes[0], restarted]) == []
