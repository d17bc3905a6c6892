"""The list of scenarios: what each tries, what it needs, and how much of the time it gets.

The one thing to know: a scenario that cannot be played on this server is never dropped; `chosen` gives it back with the
reason, and the report shows it as not run.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hermetic.audit.learned import Learned
from hermetic.audit.result import Evidence
from hermetic.audit.stage import Stage
from hermetic.options import OptionError

Play = Callable[[Stage], Awaitable[None]]
PROFILES = ("quick", "standard", "soak")


@dataclass(frozen=True)
class Scenario:
    """`weight`: its share of the time beside the others'. `order`: small ones are played first; what a server may not
    recover from has a large one. `needs`: keys of NEEDS."""

    name: str
    says: str
    play: Play
    evidence: tuple[Evidence, ...]
    needs: tuple[str, ...] = ()
    profiles: tuple[str, ...] = PROFILES
    weight: float = 1.0
    order: int = 50


@dataclass(frozen=True)
class Need:
    """`met(learned, keys)`; `else_`: the reason for the report where it is not."""

    met: Callable[[Learned, int], bool]
    else_: str


SALTED = ("vllm", "sglang")  # engines that are known to read `cache_salt`
NEEDS: dict[str, Need] = {
    "text": Need(
        lambda learned, _: bool({"chat", "completions"} & set(learned.endpoints)),
        "this server has neither /chat/completions nor /completions",
    ),
    "streams": Need(
        lambda learned, _: learned.streams, "this server does not stream, so nobody can leave in mid-answer"
    ),
    "two keys": Need(
        lambda _, keys: keys >= 2, "needs the key of a second customer: --second-key, beside --api-key"
    ),
    "salt": Need(
        lambda learned, _: learned.engine in SALTED or bool(learned.facts.get("cache_salt")),
        "this server is not known to read `cache_salt`",
    ),
}
SCENARIOS: dict[str, Scenario] = {}


def scenario(
    name: str,
    says: str,
    *,
    evidence: tuple[Evidence, ...],
    needs: tuple[str, ...] = ("text",),
    profiles: tuple[str, ...] = PROFILES,
    weight: float = 1.0,
    order: int = 50,
) -> Callable[[Play], Play]:
    """Puts `async def play(stage)` into SCENARIOS."""
    assert name not in SCENARIOS, name
    assert set(needs) <= NEEDS.keys(), needs
    assert set(profiles) <= set(PROFILES), profiles

    def register(play: Play) -> Play:
        SCENARIOS[name] = Scenario(name, says, play, evidence, needs, profiles, weight, order)
        return play

    return register


def chosen(names: Sequence[str], profile: str, learned: Learned, keys: int = 1) -> list[tuple[Scenario, str]]:
    """Those to play, in the order to play them, each with the reason why it cannot be played here ("" if it can).

    `names` empty: those of the profile. `keys`: how many API keys there are. Raises OptionError for an unknown name."""
    for name in names:
        if name not in SCENARIOS:
            near = difflib.get_close_matches(name, SCENARIOS, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise OptionError(
                f"--scenario {name!r} is not known{meant}; there are {', '.join(sorted(SCENARIOS))}"
            )
    wanted = [one for one in SCENARIOS.values() if (one.name in names if names else profile in one.profiles)]
    wanted.sort(key=lambda one: one.order)
    return [(one, _missing(one, learned, keys)) for one in wanted]


def _missing(one: Scenario, learned: Learned, keys: int) -> str:
    return "; ".join(NEEDS[need].else_ for need in one.needs if not NEEDS[need].met(learned, keys))


__all__ = ["NEEDS", "PROFILES", "SCENARIOS", "Need", "Play", "Scenario", "chosen", "scenario"]
