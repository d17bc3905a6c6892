"""The advertised context: never more than a reachable pair holds, never more because somebody is away."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_worker import info

from hermetic.gateway.cluster import Cluster, ClusterOptions
from hermetic.gateway.window import Window
from hermetic.worker import messages as m
from hermetic.worker import wire

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1", "unified-0")
PAGES = st.integers(1, 6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("register"), st.sampled_from(NAMES), PAGES),
        st.tuples(st.just("restart"), st.sampled_from(NAMES), st.none()),
        st.tuples(st.sampled_from(("die", "silent", "back", "leave")), st.sampled_from(NAMES), st.none()),
        st.tuples(st.just("cap"), st.none(), st.one_of(st.none(), st.integers(2, 100))),
    ),
    max_size=25,
)


def of_size(name: str, pages: int, address: str) -> m.WorkerInfo:
    return info(name, name.partition("-")[0], pages=pages, max_tokens=16 * pages, address=address)


@settings(max_examples=60)
@given(STEPS)
def test_whoever_comes_and_goes_the_advertised_context_fits_every_reachable_pair(steps: Any) -> None:
    asyncio.run(_walk(steps))


async def _walk(steps: list[tuple[str, str | None, int | None]]) -> None:
    cluster = Cluster("model", wire.CurveKeys.make(), ClusterOptions(silent_seconds=1000.0))
    members, window = cluster.members, cluster.members.window
    sizes: dict[str, int] = {}  # of whoever was a member last under this name
    try:
        for what, name, number in steps:
            before, cap = window.tokens, window.cap
            remote = members.remotes.get(name or "")
            here = remote is not None and not remote.ended
            alone = not [
                r for r in members.remotes.values() if r.reachable and not r.ended and r.info.worker != name
            ]
            match what:
                case "register":
                    if here:
                        members.end(remote, "ended")
                    new = of_size(name, number, "tcp://127.0.0.1:9")
                    let_in = isinstance(members.register(new, leaving=False), m.Registered)
                    if let_in:
                        sizes[name] = new.max_tokens
                    else:
                        assert new.max_tokens < window.tokens
                        assert not alone
                case "restart" if here:
                    again = msgspec.structs.replace(remote.info, incarnation=wire.new_incarnation())
                    members.end(remote, "ended")
                    # Whoever was in comes back in, as long as nobody allowed the context to grow meanwhile.
                    assert isinstance(members.register(again, leaving=False), m.Registered)
                    if not alone and before:  # 0: no pair could be reached, as now with the one that is back
                        assert window.tokens == before
                case "die" if here:
                    members.end(remote, "ended")
                case "leave" if here:
                    members.register(remote.info, leaving=True)
                    assert remote.ended
                case "silent" if here and remote.reachable:
                    members._unreachable(remote, "is silent")
                case "back" if here and not remote.reachable:
                    members._heard(remote, time.monotonic())
                case "cap":
                    cluster.set_context(number)
                case _:
                    continue
            reachable = [r.info for r in members.remotes.values() if r.reachable and not r.ended]
            unified = [i.max_tokens for i in reachable if i.role == "unified"]
            pairs = [
                min(p.max_tokens, d.max_tokens)
                for p in reachable
                for d in reachable
                if (p.role, d.role) == ("prefill", "decode")
            ]
            assert all(window.tokens <= held for held in unified + pairs), (what, name, number)
            if window.cap is not None and (unified or pairs):
                assert window.tokens <= window.cap
            if what in ("die", "silent", "leave"):
                assert (window.tokens, window.cap) == (before, cap)
    finally:
        await cluster.shut_down()


def test_a_change_of_capacity_rolls_through_the_workers() -> None:
    window = Window()
    window.join("prefill-0", "prefill", 256)
    assert window.tokens == 0  # nothing to promise before there is a pair
    window.join("decode-0", "decode", 256)
    window.join("decode-1", "decode", 256)
    assert window.tokens == 256
    small = info("decode-0", "decode", pages=8, max_tokens=128)
    refusal = window.refuse(small)
    assert refusal is not None
    assert "holds 128 tokens (8 pages of 16) and 256 are advertised" in refusal
    assert "hermetic context 128" in refusal
    window.set_cap(128)
    for name, role in (("decode-0", "decode"), ("decode-1", "decode"), ("prefill-0", "prefill")):
        assert window.tokens == 128
        window.gone(name)
        assert window.refuse(small) is None
        window.join(name, role, 128)
    window.set_cap(None)
    assert window.tokens == 128
    for name, role in (("decode-0", "decode"), ("decode-1", "decode"), ("prefill-0", "prefill")):
        assert window.tokens == 128  # grown only when the last one has
        window.join(name, role, 512)
    assert window.tokens == 512


def test_a_worker_that_is_away_keeps_its_place_until_the_operator_gives_it_up() -> None:
    window = Window()
    window.join("prefill-0", "prefill", 512)
    window.join("decode-0", "decode", 128)
    window.join("decode-1", "decode", 512)
    window.gone("decode-0")
    assert window.tokens == 128
    window.set_cap(None)
    assert window.tokens == 512


def test_when_nobody_is_left_the_last_context_stays_shown_and_the_next_ones_define_it_anew() -> None:
    window = Window()
    window.join("prefill-0", "prefill", 512)
    window.join("decode-0", "decode", 512)
    window.gone("prefill-0")
    window.gone("decode-0")
    assert window.tokens == 512
    small = info("decode-0", "decode", pages=8, max_tokens=128)
    assert window.refuse(small) is None
    window.join("decode-0", "decode", 128)
    assert window.tokens == 512  # nothing can be sent yet
    window.join("prefill-0", "prefill", 512)
    assert window.tokens == 128
