"""The rules, as data with one small function each; and how they are asked.

The one thing to know: a rule's function returns what is wrong, or None; it reads facts with `node[facts.POOL]`, which raises NotKnown where
nobody says. The registry turns that into a verdict, so no rule can pass on what it does not know.

    @rule("CAP001", "the KV pool is smaller than the advertised context", severity="error", engines=("sglang",),
          why="...", fix="...", source="...")
    def pool_below_context(node: Sheet) -> Answer:
        if node[facts.POOL] < node[facts.CONTEXT]:
            return f"holds {node[facts.POOL]:,} tokens and advertises {node[facts.CONTEXT]:,}"
        return None
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from hermetic.check import facts
from hermetic.check.deployment import DECODE, PREFILL, Deployment, Pair, Proxy
from hermetic.check.facts import NotKnown, Sheet
from hermetic.check.result import Severity, Verdict

Subject = Literal["node", "pair", "proxy", "deployment"]


class Fine(str):
    """What a rule returns where all is well and the reason is not what its title suggests: "it listens on 127.0.0.1 alone"."""


Answer = str | None
Check = Callable[..., Answer]
F = TypeVar("F", bound=Check)


@dataclass(frozen=True)
class Rule:
    """`per`: what it looks at, one by one. `engines`: it applies to these; empty: to any. `roles`: of a node, those that it applies to. `kinds`: of a
    proxy. `when`: of deployments, those in which there is anything to ask.

    `patches`: fixes that settle it when somebody attests one of them. `why`, `fix`: sentences; `source`: where the knowledge comes from."""

    code: str
    title: str
    severity: Severity
    per: Subject
    check: Check
    why: str
    fix: str
    source: str
    engines: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    patches: tuple[int, ...] = ()
    kinds: tuple[str, ...] = ()
    when: Callable[[Deployment], bool] = lambda _: True

    @property
    def family(self) -> str:
        return self.code.rstrip("0123456789")


RULES: dict[str, Rule] = {}


def rule(
    code: str,
    title: str,
    *,
    why: str,
    fix: str,
    source: str,
    severity: Severity = "error",
    per: Subject = "node",
    engines: tuple[str, ...] = (),
    roles: tuple[str, ...] = (),
    patches: tuple[int, ...] = (),
    kinds: tuple[str, ...] = (),
    when: Callable[[Deployment], bool] = lambda _: True,
) -> Callable[[F], F]:
    """Puts a function into RULES. A node's rule gets the node, a pair's the Pair, a proxy's the proxy and the deployment."""
    assert code not in RULES, code

    def register(check: F) -> F:
        RULES[code] = Rule(
            code, title, severity, per, check, why, fix, source, engines, roles, patches, kinds, when
        )
        return check

    return register


def judge(deployment: Deployment, rules: Iterable[Rule]) -> list[Verdict]:
    """Every rule at everything that it applies to."""
    return [verdict for one in rules for verdict in _judge(one, deployment)]


def _judge(one: Rule, deployment: Deployment) -> Iterator[Verdict]:
    if not one.when(deployment):
        return
    if one.per == "node":
        for node in deployment.nodes:
            yield from _ask(one, node.name, [node], deployment, (node,))
    elif one.per == "pair":
        pairs = deployment.pairs()
        for pair in pairs:
            yield from _ask(one, pair.name, pair.halves, deployment, (pair,))
        met = {id(half) for pair in pairs for half in pair.halves}
        for half in deployment.with_role(PREFILL, DECODE):
            if id(half) not in met and _applies(one, half):
                yield Verdict(code=one.code, state="unknown", subject=half.name, severity=one.severity, message=f"{half.name}: no other half was read that it could be compared with")  # fmt: skip
    elif one.per == "proxy":
        for proxy in deployment.proxies:
            if one.kinds and proxy.kind not in one.kinds:
                continue
            yield from _ask(one, proxy.name, [], deployment, (proxy, deployment), proxy.where)
    else:
        yield from _ask(one, "the deployment", [], deployment, (deployment,))


def _ask(
    one: Rule,
    subject: str,
    nodes: Sequence[Sheet],
    deployment: Deployment,
    arguments: tuple[Sheet | Pair | Proxy | Deployment, ...],
    where: str = "",
) -> Iterator[Verdict]:
    """One verdict, or none where the rule does not apply."""
    if any(not _applies(one, node) for node in nodes):
        return
    read = nodes or deployment.nodes  # of a node or a pair no other is asked
    told = Verdict(code=one.code, state="passed", subject=subject, severity=one.severity)
    try:
        for node in nodes:  # a rule for some engines says nothing of a node whose engine is not known
            if one.engines:
                _ = node[facts.ENGINE]
            if one.roles:
                _ = node[facts.ROLE]
        for node in read:
            node.asked.clear()
        message = one.check(*arguments)
    except NotKnown as unknown:
        message, told.state, told.message = None, "unknown", str(unknown)
        told.lacks, told.ask = unknown.lacks, list(unknown.ask)
    told.where = [
        *([where] if where else []),
        *(place for node in read for place in node.rests_on()),
    ]
    if isinstance(message, Fine):
        told.message = str(message)
    elif message is not None:
        told.state, told.message = "finding", message
        if attested := sorted(deployment.patches & set(one.patches)):
            told.state = "attested"
            told.message = f"{message}; patch {', '.join(map(str, attested))} is attested"
    yield told


def _applies(one: Rule, node: Sheet) -> bool:
    """A node of which the engine or the role is not known is asked all the same, and its verdict is unknown."""
    engines, roles = node.values(facts.ENGINE), node.values(facts.ROLE)
    return (not one.engines or not engines or bool(set(engines) & set(one.engines))) and (
        not one.roles or not roles or bool(set(roles) & set(one.roles))
    )


__all__ = ["RULES", "Answer", "Fine", "Rule", "Subject", "judge", "rule"]
