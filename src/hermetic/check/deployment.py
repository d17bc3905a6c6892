"""The nodes of one deployment, who hands KV to whom, and what stands before them.

The one thing to know: every prefill node is taken to reach every decode node of the same engine and model, since routers pair them
freely: one bad pair is enough for a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hermetic.check import facts
from hermetic.check.facts import Sheet

PREFILL, DECODE, BOTH, ALONE = "prefill", "decode", "both", "alone"


@dataclass(frozen=True)
class Pair:
    """A prefill node and a decode node that may serve one request."""

    prefill: Sheet
    decode: Sheet

    @property
    def name(self) -> str:
        return f"{self.prefill.name} -> {self.decode.name}"

    @property
    def halves(self) -> tuple[Sheet, Sheet]:
        return self.prefill, self.decode


@dataclass
class Proxy:
    """nginx, Envoy, HAProxy or a router before the nodes. Seconds; None: it does not say, and its kind's default is not known. math.inf: it never gives up.

    `closes_upstream`: whether it closes the connection to the server when the client leaves before the first token.
    `copies`: where it sends copies of requests, "" for nowhere.
    `pairs`: of a router, whether it sends each request to two halves; `cancels_both`: whether it cancels one when the other fails."""

    name: str
    kind: str  # nginx, envoy, haproxy, sglang-router, vllm-router
    where: str
    read_timeout: float | None = None
    retries_post: bool | None = None
    closes_upstream: bool | None = None
    copies: str | None = None
    pairs: bool | None = None
    cancels_both: bool | None = None
    routes: str = ""  # which location, route or backend this is


@dataclass
class Deployment:
    """`patches`: numbers of fixes that somebody attests. `baseline`: an earlier report's facts, by node name."""

    nodes: list[Sheet] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)
    patches: frozenset[int] = frozenset()
    baseline: dict[str, Sheet] = field(default_factory=dict)

    def with_role(self, *roles: str) -> list[Sheet]:
        return [node for node in self.nodes if any(role in roles for role in node.values(facts.ROLE))]

    def pairs(self) -> list[Pair]:
        """Every prefill node with every decode node of its engine. `both` stands on either side, but not with itself unless
        there is no other."""
        prefill, decode = self.with_role(PREFILL, BOTH), self.with_role(DECODE, BOTH)
        found = [Pair(p, d) for p in prefill for d in decode if p is not d and _may_meet(p, d)]
        one_way = [pair for pair in found if _role(pair.prefill) == PREFILL or _role(pair.decode) == DECODE]
        return one_way or found

    def of_engine(self, engine: str) -> list[Sheet]:
        return [node for node in self.nodes if engine in node.values(facts.ENGINE)]


def _role(node: Sheet) -> str:
    return next(iter(node.values(facts.ROLE)), "")


def _may_meet(prefill: Sheet, decode: Sheet) -> bool:
    """Not where both say their engine and it is another."""
    ours, theirs = prefill.values(facts.ENGINE), decode.values(facts.ENGINE)
    return not ours or not theirs or bool(set(ours) & set(theirs))


__all__ = ["ALONE", "BOTH", "DECODE", "PREFILL", "Deployment", "Pair", "Proxy"]
