"""What an option or a variable means that is not given, by the release that it was read in.

The one thing to know: a row holds for the releases that it names and for no other, also not for those between or after them. Of a release that
is in no row nothing is known of what is not given.

Read in the source of sglang-router 0.3.2 (router_args.py, src/core/retry.rs, src/routers/http/pd_router.rs), of SGLang 0.5.19 (server_args.py, environ.py) and 0.5.20 to 0.5.23 (arg_groups/fields, environ.py), with what changes options after
they were parsed (arg_groups/*_hook.py), and of vLLM 0.32.0 (config/, envs.py, the NIXL connector).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hermetic.check import facts
from hermetic.check.deployment import ALONE
from hermetic.check.facts import Fact

SGLANG_READ = ("0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
VLLM_READ = ("0.32.0",)
ROUTER_READ = ("0.3.2",)  # sglang-router, which is in the image sgl-model-gateway
_SINCE_20, _SINCE_21 = SGLANG_READ[1:], SGLANG_READ[2:]
_BEFORE_21 = SGLANG_READ[:2]


@dataclass(frozen=True)
class Default:
    """`name`: of an option without its dashes, or of a variable; `exists`: whether these releases know it; what they do without it is `value`."""

    name: str
    fact: Fact[Any]
    value: Any
    releases: tuple[str, ...]
    exists: bool = True

    def says(self, release: str) -> str:
        """Where it is known from, for people."""
        return f"default of {release}" if self.exists else f"{release} has no such option"


OPTIONS: Mapping[str, tuple[Default, ...]] = {
    "sglang": (
        Default("disaggregation-mode", facts.ROLE, ALONE, SGLANG_READ),
        Default("disaggregation-enable-kv-checksum", facts.CHECKSUM, False, _BEFORE_21, exists=False),
        Default("disaggregation-enable-kv-checksum", facts.CHECKSUM, False, _SINCE_21),
        Default("num-reserved-decode-tokens", facts.RESERVE, 512, SGLANG_READ),
        Default("allow-auto-truncate", facts.TRUNCATES, False, SGLANG_READ),
        Default("kv-canary", facts.CANARY, "none", SGLANG_READ),
        Default("tp-size", facts.TP, 1, SGLANG_READ),
        Default("pp-size", facts.PP, 1, SGLANG_READ),
        Default("api-key", facts.API_KEY, False, SGLANG_READ),
        Default("admin-api-key", facts.ADMIN_KEY, False, SGLANG_READ),
        Default("trust-remote-code", facts.REMOTE_CODE, False, SGLANG_READ),
        Default("enable-metrics", facts.METRICS, False, SGLANG_READ),
        Default("host", facts.HOST, "127.0.0.1", SGLANG_READ),
    ),
    "vllm": (
        Default("tensor-parallel-size", facts.TP, 1, VLLM_READ),
        Default("pipeline-parallel-size", facts.PP, 1, VLLM_READ),
        Default("trust-remote-code", facts.REMOTE_CODE, False, VLLM_READ),
        Default("host", facts.HOST, "0.0.0.0", VLLM_READ),  # none: every interface
        Default("kv-transfer-config", facts.ROLE, ALONE, VLLM_READ),
    ),
}
_RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
VARIABLES: Mapping[str, tuple[Default, ...]] = {
    "sglang": (
        Default(_RELEASE, facts.DEFERRED, False, _BEFORE_21),
        Default(_RELEASE, facts.DEFERRED, True, _SINCE_21),
        Default(f"{_RELEASE}_TIMEOUT", facts.RELEASE_TIMEOUT, 30.0, SGLANG_READ),
        # 0.5.19 has no such variable, and REL002 says so by the version
        Default("SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES", facts.BATCH_PAGES, 0, _SINCE_20),
    ),
    "vllm": (Default("VLLM_SERVER_DEV_MODE", facts.DEVELOPER, False, VLLM_READ),),
}


@dataclass(frozen=True)
class RouterDefaults:
    """`timeout`: in seconds; `tries`: of a request that fails, the first one included; `cancels_both`: with halves, whether one is cancelled when the
    other fails (0.3.2 waits for both: tokio::join!)."""

    timeout: float
    tries: int
    cancels_both: bool


def router(release: str) -> RouterDefaults | None:
    """What SGLang's router does that is told nothing else; None for a release that was not read."""
    return RouterDefaults(1800.0, 5, cancels_both=False) if release in ROUTER_READ else None


def options(engine: str, release: str) -> Iterator[Default]:
    """The options of which it is known what they mean in this release where they are not given."""
    return (one for one in OPTIONS.get(engine, ()) if release in one.releases)


def variables(engine: str, release: str) -> Iterator[Default]:
    """The same of variables."""
    return (one for one in VARIABLES.get(engine, ()) if release in one.releases)


def was_read(engine: str, release: str) -> bool:
    """Whether the source of this release was read."""
    return release in {"sglang": SGLANG_READ, "vllm": VLLM_READ}.get(engine, ())


__all__ = [
    "OPTIONS",
    "ROUTER_READ",
    "SGLANG_READ",
    "VARIABLES",
    "VLLM_READ",
    "Default",
    "RouterDefaults",
    "options",
    "router",
    "variables",
    "was_read",
]
