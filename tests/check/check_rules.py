"""Nodes, pairs and proxies for the tests of the rules, as short as they can be written."""

from __future__ import annotations

from collections.abc import Iterable

from hermetic.check import facts
from hermetic.check.deployment import Deployment, Proxy
from hermetic.check.facts import Sheet
from hermetic.check.result import Verdict
from hermetic.check.rules import RULES, judge


def node(
    name: str = "prefill", role: str | None = None, engine: str | None = "sglang", **said: object
) -> Sheet:
    """A node of which this is known. Its role is its name, if nothing else is said; `role=""` leaves it unknown."""
    sheet = Sheet(name=name, sources=[f"{name}.json"])
    place = said.pop("address", None)
    sheet.address = place if isinstance(place, tuple) else None
    role = role if role is not None else name
    for fact, value in {"engine": engine, "role": role or None, **said}.items():
        values = value if isinstance(value, list) else [value]
        for number, one in enumerate(values):
            sheet.add(facts.FACTS[fact], one, f"{name}.json" if number == 0 else f"{name}.{number}.json")
    return sheet


def alone(**said: object) -> Deployment:
    return Deployment([node("server", "alone", **said)])


def prefill(**said: object) -> Deployment:
    return Deployment([node("prefill", **said)])


def decode(**said: object) -> Deployment:
    return Deployment([node("decode", **said)])


def vllm(role: str = "both", **said: object) -> Deployment:
    return Deployment([node("engine", role, "vllm", **said)])


def hermetic(**said: object) -> Deployment:
    return Deployment([node("gateway", "", "hermetic", **said)])


def pair(
    prefill: dict[str, object], decode: dict[str, object], engine: str = "sglang", role: str | None = None
) -> Deployment:
    return Deployment([node("prefill", role, engine, **prefill), node("decode", role, engine, **decode)])


def behind(proxy: dict[str, object], *nodes: Sheet, kind: str = "nginx") -> Deployment:
    return Deployment(list(nodes), [Proxy("front", kind, "nginx.conf, line 7", **proxy)])  # type: ignore[arg-type]


def asked(code: str, deployment: Deployment) -> list[Verdict]:
    return judge(deployment, [RULES[code]])


def all_asked(deployment: Deployment, codes: Iterable[str] = RULES) -> list[Verdict]:
    return judge(deployment, [RULES[code] for code in codes])
