"""Which engine answers, and what it says of itself: hints for the search of its limits, never proof of them.

The one thing to know: of what a server says of itself only named fields are kept. Some of those pages hold keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hermetic.audit.target import Page, Target
from hermetic.audit.wire import MOST

_OWNERS = {
    "vllm": "vllm", "sglang": "sglang", "hermetic": "hermetic", "llamacpp": "llama.cpp", "library": "ollama",
}  # fmt: skip
_CLAIMS = ("max_model_len", "context_length", "context_window", "max_context_length", "max_total_tokens")
_SGLANG = (
    "max_total_num_tokens",
    "max_req_input_len",
    "context_length",
    "chunked_prefill_size",
    "disaggregation_mode",
)


@dataclass
class Said:
    """`hints`: lengths in tokens at which something may end."""

    engine: str = ""
    version: str = ""
    claimed: int | None = None
    page: int | None = None
    hints: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


async def recognise(target: Target) -> Said:
    """Ask the pages that engines have, as few as tell."""
    said = Said(engine=_OWNERS.get(str(target.entry.get("owned_by", "")).lower(), ""))
    _listed(said, target.entry)
    if target.address.kind == "sglang-pd":
        said.engine = "sglang"
    if target.address.kind == "vllm-pd":
        said.engine = "vllm"
    if target.address.pair:  # rooms and transfer parameters are then the audit's own to send
        said.facts["pair"] = target.address.kind
    for engine, ask in _ASKERS.items():
        if said.engine in ("", engine):
            for place in range(len(target.address.servers) if said.engine else 1):
                await ask(said, target, place)
    if said.claimed is not None:
        said.hints = [said.claimed, said.claimed - 1, *said.hints]
    return said


def _listed(said: Said, entry: Mapping[str, Any]) -> None:
    """From the model list."""
    said.claimed = next((number for name in _CLAIMS if (number := _whole(entry.get(name)))), None)
    own = entry.get("hermetic")
    if isinstance(own, dict):
        said.page = _whole(own.get("page_size"))
        pools = own.get("pool_tokens")
        if isinstance(pools, dict):
            said.facts["pool_tokens"] = {str(k): v for k, v in pools.items() if _whole(v)}
            said.hints += [number for v in pools.values() if (number := _whole(v))]


async def _version(said: Said, target: Target, place: int) -> None:
    page = await target.look("/version", place)
    value = _found(page)
    if isinstance(value.get("version"), str):
        said.version = value["version"]


async def _vllm(said: Said, target: Target, place: int) -> None:
    await _version(said, target, place)
    metrics = await target.look("/metrics", place)
    if metrics is None or metrics.status != 200:
        return
    config = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics.body.decode(errors="replace"), re.M)
    if config is None:
        return
    said.engine = "vllm"
    fields = dict(re.findall(r'(\w+)="([^"]*)"', config[1]))
    said.page = _whole(fields.get("block_size")) or said.page
    blocks = _whole(fields.get("num_gpu_blocks")) or _whole(fields.get("num_cpu_blocks"))
    if said.page and blocks:
        said.facts["pool_tokens"] = said.page * blocks


async def _sglang(said: Said, target: Target, place: int) -> None:
    value = _found(await target.look("/server_info", place)) or _found(
        await target.look("/get_server_info", place)
    )
    if not isinstance(value.get("version"), str) or "max_total_num_tokens" not in value:
        return
    said.engine, said.version = "sglang", value["version"]
    said.page = _whole(value.get("page_size")) or said.page
    kept = {name: value[name] for name in _SGLANG if isinstance(value.get(name), int | str)}
    said.facts.setdefault("server_info", []).append(kept)
    longest = _whole(value.get("max_req_input_len"))
    said.hints += [longest, longest - 1] if longest else []


async def _llama(said: Said, target: Target, place: int) -> None:
    page = await target.look("/props", place)
    value = _found(page)
    settings = value.get("default_generation_settings")
    if not isinstance(settings, dict) and "llama.cpp" not in (page.headers.get("server", "") if page else ""):
        return
    said.engine = "llama.cpp"
    said.version = str(value.get("build_info", ""))[:80]
    said.claimed = _whole(settings.get("n_ctx")) if isinstance(settings, dict) else said.claimed


async def _ollama(said: Said, target: Target, place: int) -> None:
    value = _found(await target.look("/api/version", place))
    if isinstance(value.get("version"), str):
        said.engine, said.version = "ollama", value["version"]


async def _tgi(said: Said, target: Target, place: int) -> None:
    value = _found(await target.look("/info", place))
    if "max_input_tokens" not in value and "max_input_length" not in value:
        return
    said.engine, said.version = "tgi", str(value.get("version", ""))[:80]
    said.claimed = _whole(value.get("max_total_tokens")) or said.claimed
    longest = _whole(value.get("max_input_tokens")) or _whole(value.get("max_input_length"))
    said.hints += [longest, longest + 1] if longest else []


_ASKERS = {
    "hermetic": _version, "vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama, "ollama": _ollama, "tgi": _tgi,
}  # fmt: skip


def _found(page: Page | None) -> dict[str, Any]:
    return page.value() if page is not None and page.status == 200 else {}


def _whole(value: object) -> int | None:
    """A positive number that can count tokens, also one written as text."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST else None


__all__ = ["Said", "recognise"]
