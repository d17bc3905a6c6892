"""Exposure: who can reach what. Channels between nodes are made for nodes; an API without a key is for everybody who can connect.

The one thing to know: this reads what a node was told, not what a firewall does. A finding says that nothing on the node keeps others out.
"""

from __future__ import annotations

from hermetic.check import facts, hosts
from hermetic.check.deployment import BOTH, PREFILL
from hermetic.check.facts import Sheet
from hermetic.check.rules.registry import Answer, Fine, rule


@rule(
    "EXP001",
    "a channel between nodes listens on all interfaces",
    engines=("sglang", "vllm"),  # Hermetic's control channel asks for a key (CURVE)
    roles=(PREFILL, BOTH),
    why="The bootstrap server, side channel or control port is not asked for a key. Who reaches it can register as a node, take part in handshakes, "
    "or learn where KV lies.",
    fix="Bind it to the address of the network between the nodes (SGLang: --host and --dist-init-addr; vLLM: VLLM_NIXL_SIDE_CHANNEL_HOST), and close the port to "
    "all others.",
    source="The class 'open control' of the field's fault reports.",
)
def inner_open(node: Sheet) -> Answer:
    inner = node[facts.INNER_HOST]
    return (
        f"its bootstrap or side channel listens on all interfaces ({inner})"
        if hosts.is_everywhere(inner)
        else None
    )


@rule(
    "EXP002",
    "the API asks for no key",
    severity="warning",
    why="Whoever reaches the port can send prompts, and on a half of a pair also the internal fields that name a transfer.",
    fix="Start with --api-key, or bind the server to an address that only the gateway reaches.",
    source="SGLang and vLLM serve without a key by default.",
)
def no_key(node: Sheet) -> Answer:
    if node.get(facts.API_KEY, False):
        return None
    if hosts.is_loopback(host := _host(node)):
        return _alone(host)
    _ = node[facts.API_KEY]
    return f"it listens on {host} and asks for no API key"


@rule(
    "EXP003",
    "clients' keys open the control calls",
    severity="warning",
    engines=("sglang",),
    why="Without --admin-api-key the key that clients have also opens the calls that flush caches, change weights and release memory; without any key "
    "everybody can make them.",
    fix="Start with --admin-api-key, and give that key to operators only.",
    source="utils/auth.py of SGLang 0.5.23.",
)
def no_admin_key(node: Sheet) -> Answer:
    if node.get(facts.ADMIN_KEY, False):
        return None
    if hosts.is_loopback(host := _host(node)):
        return _alone(host)
    _ = node[facts.ADMIN_KEY]
    return (
        f"it listens on {host} and has no admin key: its control calls are open to whoever may send prompts"
    )


@rule(
    "EXP004",
    "/metrics answers everybody",
    severity="note",
    why="Figures tell who is served, how much, and with which models. Some engines leave /metrics open also where the API asks for a key.",
    fix="Let only the monitoring reach /metrics: a proxy in front, or a network of its own.",
    source="utils/auth.py of SGLang 0.5.23 leaves /metrics open on purpose.",
)
def metrics_open(node: Sheet) -> Answer:
    if not node.get(facts.METRICS_OPEN, True):
        return None
    if facts.METRICS_OPEN not in node and not node.get(facts.METRICS, True):
        return Fine("it exports no metrics")
    if hosts.is_loopback(host := _host(node)):
        return _alone(host)
    _ = node[facts.METRICS_OPEN]
    return f"it listens on {host}, and /metrics answers without a key"


@rule(
    "EXP005",
    "code from the model's repository runs in the server",
    severity="warning",
    why="--trust-remote-code runs Python files that come with the model. A revision that is not pinned can change them at the next start.",
    fix="Start without --trust-remote-code where the engine knows the architecture; else pin --revision to a commit that somebody has read.",
    source="SGLang and vLLM: --trust-remote-code.",
)
def remote_code(node: Sheet) -> Answer:
    return (
        "it runs code from the model's repository (--trust-remote-code)" if node[facts.REMOTE_CODE] else None
    )


def _alone(host: str) -> Fine:
    return Fine(f"it listens on {host} alone, so nobody else reaches it")


def _host(node: Sheet) -> str:
    """Where it can be reached: the address that it listens on, or another than loopback under which it was found. Raises NotKnown."""
    found = node.address[0] if node.address is not None else ""
    if (
        found
        and not hosts.is_loopback(found)
        and (facts.HOST not in node or hosts.is_loopback(node[facts.HOST]))
    ):
        return found
    return node[facts.HOST]
