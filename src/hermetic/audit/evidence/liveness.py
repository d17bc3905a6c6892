"""Evidence by silence: a request that gets neither an answer nor an error within its bound.

The one thing to know: what matters next is whether the server still serves others. So the finding says how many requests were
answered that were sent after the silent one. Where nothing can be reached any more after it, the network or the whole server has
gone, of which the audit speaks elsewhere: that is no finding.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from hermetic.audit.evidence.gathering import Gathering
from hermetic.audit.exchange import Answer
from hermetic.audit.result import Coverage, Finding

LAST = 15.0  # seconds after a silence within which the next request is sent
SLOW = 0.5  # share of the bound: a request whose tokens still came in its last half was slow, not silent


class Liveness:
    """The liveness part of a judge."""

    def __init__(self) -> None:
        self._compared = Counter[str]()
        self._silent: list[tuple[str, Answer]] = []
        self._answered_after: dict[str, int] = {}  # by scenario: sent after its first silence, and answered
        self._since: dict[str, float] = {}
        self._gone: float | None = (
            None  # when the first request was sent since which none has reached the server
        )
        self.slow = 0

    def seen(self, scenario: str, answer: Answer) -> None:
        """Every answer counts but those the audit left itself and those that never reached the server."""
        if answer.how == "unreachable" and self._gone is None:
            self._gone = answer.sent
        if answer.how in ("left", "unreachable", "limited"):
            return
        if self._gone is not None and answer.sent > self._gone:
            self._gone = None
        self._compared[scenario] += 1
        if answer.how == "answered":
            for name, since in self._since.items():
                self._answered_after[name] += answer.sent > since
        if answer.how != "silent":
            return
        if answer.tokens and answer.tokens[-1].at > SLOW * answer.ask.within:
            self.slow += 1
            return
        self._silent.append((scenario, answer))
        self._since.setdefault(scenario, answer.sent + answer.ask.within)
        self._answered_after.setdefault(scenario, 0)

    def _found(self) -> Gathering:
        """Those that cannot be explained by a server, or a network, that went while they were waited for."""
        found = Gathering("liveness")
        found.compared = self._compared
        for scenario, answer in self._silent:
            if self._gone is not None and self._gone < answer.sent + answer.ask.within + LAST:
                continue
            until = f"{len(answer.tokens)} pieces and then nothing" if answer.tokens else "no token at all"
            found.add(
                scenario,
                "silent",
                f"a request got neither an answer nor an error in {answer.ask.within:.0f} s: {until}",
                "a request that cannot be served has to be refused; one that nobody ends holds memory, and its client, for ever",
                (answer,),
            )
        return found

    def findings(self) -> list[Finding]:
        told = []
        for finding in self._found().findings():
            after = self._answered_after[finding.scenario]
            served = (
                f"{after} requests sent afterwards were answered"
                if after
                else "nothing sent afterwards was answered"
            )
            told.append(
                msgspec.structs.replace(
                    finding,
                    what=f"{finding.what}; {served}",
                    detail={**finding.detail, "answered_after": after},
                )
            )
        return told

    def coverage(self, scenario: str) -> Coverage:
        return self._found().coverage(scenario)


__all__ = ["Liveness"]
