"""Faults of what is not a page: first tokens, rows of logits, parameters, kept by place and not by ticket. One engine's.

The one thing to know: the pages are right here, and stay so. No seal could see these faults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakSet

from hermetic.engine.engine import Engine
from hermetic.engine.sequence import First, Phase, Sequence
from hermetic.lab.leaky_switch import Switch

_AFTER = 3  # output tokens, before a row of logits is swapped


def slot_bleed(engine: Engine, switch: Switch) -> None:
    """Wrap this engine's beginning of an answer and its sampling, for the life of the process."""
    target: Any = engine
    begin, sample = target._begin, target._sample
    marked: WeakSet[Sequence] = WeakSet()

    def beginning(seq: Sequence, firsts: tuple[First, ...]) -> None:
        if _worth(seq):
            firsts = _first_token(switch, seq, firsts)
            _parameters(switch, seq)
            if switch.strikes("swapped-rows"):
                marked.add(seq)
        begin(seq, firsts)

    def sampling(wanted: list[tuple[int, Sequence, int]], result: Any) -> Any:
        return sample(_swapped(wanted, marked) if marked else wanted, result)

    target._begin, target._sample = beginning, sampling


def _worth(seq: Sequence) -> bool:
    """Not the gateway's own probe of one token, and not a request that goes on after it gave its pages back."""
    return seq.job.prompt > 1 and not seq.outputs


def _first_token(switch: Switch, seq: Sequence, firsts: tuple[First, ...]) -> tuple[First, ...]:
    """first-token: the first tokens of the request that began before."""
    if not switch.on("first-token"):
        return firsts
    former: tuple[First, ...] = switch.state.get("firsts", ())
    switch.state["firsts"] = firsts
    theirs = [first.token for first in former] != [first.token for first in firsts]
    if len(former) == len(firsts) and theirs and switch.strikes("first-token"):
        return former
    return firsts


def _parameters(switch: Switch, seq: Sequence) -> None:
    """parameters: sampling parameters, with the length of the answer, of the request that began before."""
    if not switch.on("parameters"):
        return
    former = switch.state.get("parameters")
    switch.state["parameters"] = seq.job.params
    if former is not None and former != seq.job.params and switch.strikes("parameters"):
        seq.job = replace(seq.job, params=former)


def _swapped(
    wanted: list[tuple[int, Sequence, int]], marked: WeakSet[Sequence]
) -> list[tuple[int, Sequence, int]]:
    """swapped-rows: for one step, two running requests of the batch are sampled from each other's logits."""
    running = [i for i, (_, seq, _) in enumerate(wanted) if seq.phase is Phase.RUNNING]
    for i in running:
        row, seq, choice = wanted[i]
        other = next((j for j in running if wanted[j][1].job.key.ticket != seq.job.key.ticket), None)
        if seq in marked and seq.outputs >= _AFTER and other is not None:
            marked.discard(seq)
            swapped = list(wanted)
            swapped[i], swapped[other] = (wanted[other][0], seq, choice), (row, *wanted[other][1:])
            return swapped
    return wanted


__all__ = ["slot_bleed"]
