"""Proxies and routers: what they do to a request whose answer takes long, or whose client has left.

The one thing to know: a proxy that gives up early, or asks twice, makes aborts and duplicates that the nodes behind it were not told to expect;
aborts in the middle of a transfer are what most reports of wrong answers begin with. Where release is deferred, closing upstream when the client
leaves is right: the work ends and the pages wait for the transfer. Where it is not, it is the trigger.
"""

from __future__ import annotations

from hermetic.check import facts
from hermetic.check.deployment import DECODE, PREFILL, Deployment, Proxy
from hermetic.check.facts import NotKnown, Sheet, T
from hermetic.check.rules.capacity import longest
from hermetic.check.rules.registry import Answer, Fine, rule
from hermetic.check.rules.release import defers, in_seconds

ROUTERS = ("sglang-router", "vllm-router")


@rule(
    "PRX001",
    "the proxy gives up before the longest prompt can be prefilled",
    per="proxy",
    severity="warning",
    why="Until the first token nothing comes back. A read time-out that is shorter than the longest prefill ends requests that would have been answered, "
    "in the middle of their transfer, and clients send them again.",
    fix="Raise the proxy's read time-out (nginx proxy_read_timeout, Envoy route timeout and idle time-outs, HAProxy timeout server) above the time that the "
    "longest accepted prompt takes on the slowest prefill node, waiting included.",
    source="https://github.com/sgl-project/sglang/pull/28651 (a gateway time-out that became an abort storm).",
)
def gives_up(proxy: Proxy, deployment: Deployment) -> Answer:
    timeout = _said(proxy, proxy.read_timeout, "how long it waits for an answer")
    nodes = [node for node in deployment.nodes if node.values(facts.ROLE) != [DECODE]]
    if not nodes:
        raise NotKnown("no node that prefills was read, so how long a prefill takes is not known")
    missing: list[str] = []
    slowest: tuple[float, Sheet, int] | None = None
    for node in nodes:
        try:
            tokens, speed = _longest(node), node[facts.PREFILL_SPEED]
            if speed <= 0:
                raise NotKnown(f"{node.name}: no prefill was measured yet")
        except NotKnown as unknown:
            missing.append(str(unknown))
            continue
        if slowest is None or tokens / speed > slowest[0]:
            slowest = tokens / speed, node, tokens
    if slowest is not None and slowest[0] > timeout:
        seconds, node, tokens = slowest
        return f"it waits {timeout:g} s for an answer, and {node.name} needs {in_seconds(seconds)} for a prompt of {tokens:,} tokens at the measured {tokens / seconds:,.0f} a second"
    if missing:
        raise NotKnown("; ".join(missing))
    return None


@rule(
    "PRX002",
    "the proxy sends POST requests again",
    per="proxy",
    why="A request that is sent again while the first one runs is computed twice, and what names its transfer (a bootstrap room, kv_transfer_params) is "
    "then used twice: the second reads pages that were given on.",
    fix="Retry only what cannot have reached a node: nginx without non_idempotent in proxy_next_upstream, Envoy with connect-failure alone, HAProxy with "
    "retry-on conn-failure or disable-l7-retry for POST, routers with --disable-retries.",
    source="https://github.com/vllm-project/vllm/issues/52234; the class 'id reuse' of the field's fault reports. sglang-router 0.3.2 asks up to five times "
    "after 408, 429 and 5xx (src/core/retry.rs).",
)
def retries(proxy: Proxy, deployment: Deployment) -> Answer:
    again = _said(proxy, proxy.retries_post, "whether it sends POST requests again")
    return "it sends a POST again after an error or time-out, when the first may still run" if again else None


@rule(
    "PRX003",
    "the proxy aborts requests in the middle of a transfer that nobody waits for",
    per="proxy",
    why="When a client leaves before the first token, this proxy closes its connection to the server, and the server aborts the request. On nodes "
    "whose release is not deferred the pages go to the next request while prefill still writes into them.",
    fix="Turn on deferred release on every node (the default from SGLang 0.5.21 on; 0.5.19 and 0.5.20 have to be told, and before there is none). Until then "
    "let the proxy finish such requests (nginx proxy_ignore_client_abort on).",
    source="https://github.com/sgl-project/sglang/pull/24578; a cancel is the trigger in one of five of the field's fault reports.",
)
def aborts(proxy: Proxy, deployment: Deployment) -> Answer:
    closes = _said(
        proxy, proxy.closes_upstream, "whether it closes the connection to the server when the client leaves"
    )
    if not closes:
        return None
    if not deployment.nodes:
        raise NotKnown("no node was read, so whether releases are deferred is not known")
    at_once: list[str] = []
    missing: list[str] = []
    for node in filter(_may_be_half, deployment.nodes):
        try:
            if not defers(node):
                _ = node[facts.ENGINE], node[facts.ROLE]
                at_once.append(node.name)
        except NotKnown as unknown:
            missing.append(str(unknown))
    if at_once:
        return f"it closes upstream when a client leaves, and {', '.join(at_once)} release{'s' if len(at_once) == 1 else ''} pages while a transfer may still write into them"
    if missing:
        raise NotKnown("; ".join(missing))
    return None


@rule(
    "PRX004",
    "the router does not cancel one half when the other fails",
    severity="warning",
    per="proxy",
    kinds=ROUTERS,
    why="A request that has failed in one half goes on in the other: decode holds its pages for a transfer that never comes until its time-out "
    "(SGLANG_DISAGGREGATION_WAITING_TIMEOUT, 300 s), or prefill writes for nobody.",
    fix="Use a router that cancels the other half, or bound the wait (SGLANG_DISAGGREGATION_WAITING_TIMEOUT on decode).",
    source="src/routers/http/pd_router.rs of sglang-router 0.3.2 waits for both halves; https://github.com/sgl-project/sglang/pull/29017 cancels decode. "
    "https://github.com/sgl-project/sglang/issues/9726, https://github.com/vllm-project/aibrix/issues/2289.",
    patches=(29017,),
)
def cancels_one(proxy: Proxy, deployment: Deployment) -> Answer:
    """What a router does is known of sglang-router 0.3.2, by the tag of the image sgl-model-gateway. A router that sends no request to two halves has none
    to cancel."""
    if proxy.pairs is False:
        return Fine("it sends a request to one server, so there is no other half")
    if proxy.cancels_both is None:
        raise NotKnown(
            f"{proxy.name}: whether it cancels one half when the other fails is not known; it is of sglang-router 0.3.2, where a manifest names the image "
            "sgl-model-gateway:v0.3.2"
        )
    return (
        None if proxy.cancels_both else "when one half fails it waits for the other, and does not cancel it"
    )


@rule(
    "PRX005",
    "the proxy sends copies of requests to another server",
    severity="warning",
    per="proxy",
    kinds=("nginx", "envoy"),
    why="A copy has everything that the request has: what its customer wrote, its request id, and what names its transfer (a bootstrap room, "
    "kv_transfer_params). Where it reaches nodes that serve, each of these is used twice; where it reaches others, customers' prompts are on servers "
    "that nobody has checked.",
    fix="Remove it (nginx mirror, Envoy request_mirror_policies, the mirror-target of an Ingress), or copy to a deployment of its own that was checked as "
    "this one was, with fields that name transfers taken out.",
    source="ngx_http_mirror_module; config.route.v3.RouteAction.RequestMirrorPolicy; the class 'id reuse' of the field's fault reports.",
)
def copies(proxy: Proxy, deployment: Deployment) -> Answer:
    where = _said(proxy, proxy.copies, "whether it sends copies of requests elsewhere")
    return f"it sends copies of requests to {where}" if where else None


def _may_be_half(node: Sheet) -> bool:
    """Whether nobody says that a node is of another engine, or no half of a pair."""
    engines, roles = node.values(facts.ENGINE), node.values(facts.ROLE)
    return (not engines or "sglang" in engines) and (not roles or not {PREFILL, DECODE}.isdisjoint(roles))


def _longest(node: Sheet) -> int:
    """The longest prompt that may come: what the front check accepts, or what pool and context allow."""
    if facts.LONGEST in node or node.values(facts.ENGINE) == ["sglang"]:
        return longest(node)
    return min(node[facts.POOL], node[facts.CONTEXT])


def _said(proxy: Proxy, value: T | None, what: str) -> T:
    if value is None:
        raise NotKnown(
            f"{proxy.name}: {what} is not known; its configuration does not say, and its default depends on more than that"
        )
    return value
