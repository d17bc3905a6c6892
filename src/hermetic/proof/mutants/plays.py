"""Mutants in a real pair of workers: what is left when the walls before them have fallen, and who sees it then.

Each play returns what was seen, in a few words, or "" when the fault passed. The one thing to know: the seals refuse bytes,
so a play that ends with `kv_integrity` was stopped by them; where no byte is wrong (a tenant's page read by another, tokens
of another request), the lab's witness or the answer itself says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hermetic.handoff.outcome import Completed, Failed
from hermetic.lab.faults import TARGET, Fault, Incident, Landed, bit_flipped
from hermetic.lab.pair import LabPair
from hermetic.lab.scene import (
    BYSTANDER,
    READER,
    VICTIM,
    Played,
    Scene,
    Setting,
    Verdict,
    make_pair,
    model,
    play,
    prompt,
)
from hermetic.lab.walls import Wall
from hermetic.lab.witness import Witness

READ_ONLY = Setting("seals at every read", "read", frozenset({Wall.OWNERSHIP}))


class BetweenHashAndCopy(Fault):
    """Another tenant's page arrives in the slot in the moment after the bytes were hashed."""

    name = "late write between hash and copy"

    def arm(self, scene: Scene) -> None:
        decode = scene.pair.decode
        kernels = decode.engine.runner.kernels
        verify, land = kernels.verify_pages, decode._land_few
        slots: list[Any] = []

        def landing(round_: Any) -> None:
            slots[:] = [
                decode._records[key].peer.receiver.memory[copy.slot.slot]
                for key, copy in round_
                if scene.is_reader(key) and copy.page == TARGET
            ]
            land(round_)

        def verifying(*args: Any) -> Any:
            found = verify(*args)
            for slot in slots:
                np.copyto(slot, scene.victim_pages[TARGET])
            slots.clear()
            return found

        scene.patch(decode, "_land_few", landing)
        scene.patch(kernels, "verify_pages", verifying)

    def due(self, scene: Scene) -> bool:
        return False


def _refused(fault: Fault, setting: Setting) -> str:
    played: Played = play(fault, setting)
    if played.verdict is not Verdict.CAUGHT:
        return ""
    assert isinstance(played.outcome, Failed)
    return f"{played.outcome.code} with {setting.name}"


def believed_count() -> str:
    return _refused(Incident(), READ_ONLY)


def late_write() -> str:
    return _refused(BetweenHashAndCopy(), READ_ONLY)


def unverified() -> str:
    return _refused(Landed(bit_flipped), READ_ONLY)


def placeholder() -> str:
    """A prefill worker whose pool is smaller than what is advertised gets a prompt that it cannot hold."""
    pair = make_pair("landing", prefill_pages=3)
    outcome = pair.ask(prompt(READER), READER).outcome
    refused = isinstance(outcome, Failed) and outcome.code == "kv_integrity"
    return "the counts of grant and request: kv_integrity" if refused else ""


def other_model() -> str:
    """A prefill worker with other weights is let in as a peer: what it sends has another lineage."""
    pair = make_pair("landing", prefill_model=model(1))
    outcome = pair.ask(prompt(READER), READER).outcome
    failed = isinstance(outcome, Failed) and outcome.code == "kv_integrity"
    return (
        f"kv_integrity with seals on landing, {pair.decode.landing.pages_refused_landing} pages refused"
        if failed
        else ""
    )


def others_prefix() -> str:
    """Two tenants ask the same: whose rows does the second one's attention read?"""
    pair, witness = make_pair("landing", prefill_pages=48, decode_pages=48), Witness()
    witness.watch(pair)
    pair.submit(prompt(VICTIM), VICTIM)
    pair.run(lambda: any(seq.computed >= 32 for seq in pair.prefill.engine._prefilling))
    second = pair.submit(prompt(VICTIM), READER)
    pair.run()
    leaked = witness.leaked_to(second.ticket)
    return f"witness: {len(leaked)} rows of another tenant were read" if leaked else ""


def others_firsts() -> str:
    """Two requests one after the other: each must begin with its own first token."""
    answers = [[_tokens(make_pair("landing"), tenant) for tenant in (READER, BYSTANDER)]]
    pair = make_pair("landing")
    answers.append([_tokens(pair, tenant) for tenant in (READER, BYSTANDER)])
    return "the answer: it begins with another request's token" if answers[0] != answers[1] else ""


def _tokens(pair: LabPair, tenant: str) -> list[int]:
    answer = pair.ask(prompt(tenant), tenant, max_tokens=4)
    assert isinstance(answer.outcome, Completed), answer.outcome
    return answer.tokens


PLAYS: dict[str, Callable[[], str]] = {
    "reject-becomes-placeholder": placeholder,
    "trust-complete-count": believed_count,
    "late-write-between-verify-and-copy": late_write,
    "verification-skipped": unverified,
    "nothing-differs": other_model,
    "lineage-without-tenant": others_prefix,
    "firsts-by-slot": others_firsts,
}
