"""Known faults of known engines, as data: what they look like from outside, what is likely to cause them, what to do.

The one thing to know: a signature explains a finding, it never makes one and never excuses one. It is a guess by likeness:
"this looks like", with the reports it was learned from. Where a version is given as fixed, a server that says it is newer is
not matched; a server that does not say its version is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hermetic.audit.exchange import Answer
from hermetic.audit.learned import Learned
from hermetic.audit.result import Finding


@dataclass(frozen=True)
class Signature:
    """`engines`: lower-case names as in Learned.engine; empty: any. `fixed`: the version that no longer shows it, as far as
    is known. `sources`: public threads, or where it was measured here. `shows`: whether a finding looks like it."""

    name: str
    title: str
    engines: tuple[str, ...]
    cause: str
    fixed: str
    todo: str
    sources: tuple[str, ...]
    shows: Callable[[Finding, Learned], bool]
    fixed_in: tuple[int, ...] = ()  # the same as `fixed`, to compare with


# ---------------------------------------------------------------------------------------------- what is looked at


def prompt_tokens(answer: Answer, learned: Learned) -> int | None:
    """How long a request's prompt was: exact for token ids, else estimated by words. Never taken from the server's usage,
    which is what is in doubt. None for a raw body."""
    ask = answer.ask
    if ask.raw is not None:
        return None
    if not isinstance(ask.prompt, str):
        return len(ask.prompt)
    return round(len(f"{ask.system} {ask.prompt}".split()) * learned.tokens_per_word)


def _wrong(finding: Finding) -> Answer | None:
    return finding.answers[0] if finding.answers else None


def _over(finding: Finding, learned: Learned) -> bool:
    """Whether the wrong answer's prompt is longer than what this endpoint is known to take. An estimate by words has to be
    a tenth over."""
    wrong = _wrong(finding)
    if wrong is None:
        return False
    edge = learned.edges.get(wrong.ask.endpoint)
    tokens = prompt_tokens(wrong, learned)
    limit = edge.refused if edge is not None and edge.refused is not None else learned.claimed
    if tokens is None or limit is None:
        return "over-capacity" in finding.scenario
    return tokens >= (limit * 1.1 if isinstance(wrong.ask.prompt, str) else limit)


def _near_edge(finding: Finding, learned: Learned) -> bool:
    """Whether the prompt is at most two pages below the shortest that is refused: accepted, and close to it."""
    wrong = _wrong(finding)
    edge = learned.edges.get(wrong.ask.endpoint) if wrong is not None else None
    if wrong is None or edge is None or edge.refused is None:
        return False
    tokens, room = prompt_tokens(wrong, learned), 2 * (learned.page or 16)
    if tokens is None:
        return False
    slack = 0 if not isinstance(wrong.ask.prompt, str) else edge.refused // 10
    return edge.refused - room - slack <= tokens < edge.refused + slack or tokens in edge.silent


def _halves(answer: Answer) -> bool:
    return answer.prefill is not None


def _placeholder(answer: Answer, learned: Learned) -> bool:
    """The prefill half says it was given almost nothing, although it was sent a long prompt."""
    half, sent = answer.prefill, prompt_tokens(answer, learned)
    return half is not None and half.usage.prompt is not None and half.usage.prompt <= 2 and (sent or 0) > 16


def _text(answer: Answer) -> str:
    return f"{answer.error} {answer.excerpt} {answer.prefill.error if answer.prefill is not None else ''}".lower()


# ---------------------------------------------------------------------------------------------- the matchers


def _incident(finding: Finding, learned: Learned) -> bool:
    wrong = _wrong(finding)
    if wrong is None or wrong.how != "answered" or not _halves(wrong):
        return False
    if finding.evidence not in ("marker", "semantics", "contrast", "differential"):
        return False
    return _placeholder(wrong, learned) or _over(finding, learned)


def _spurious_length(finding: Finding, learned: Learned) -> bool:
    wrong = _wrong(finding)
    if wrong is None or finding.evidence != "semantics" or wrong.how != "answered":
        return False
    refused = wrong.prefill is not None and (
        wrong.prefill.how in ("refused", "failed") or _placeholder(wrong, learned)
    )
    return refused and wrong.finish == "length"


def _edge_hang(finding: Finding, learned: Learned) -> bool:
    wrong = _wrong(finding)
    return (
        finding.evidence == "liveness"
        and wrong is not None
        and wrong.how == "silent"
        and _near_edge(finding, learned)
    )


def _refused_half(answer: Answer) -> bool:
    return answer.prefill is not None and answer.prefill.how in ("refused", "failed")


def _decode_waits(finding: Finding, learned: Learned) -> bool:
    wrong = _wrong(finding)
    return (
        finding.evidence == "liveness"
        and wrong is not None
        and wrong.how == "silent"
        and _refused_half(wrong)
    )


def _nixl(finding: Finding, learned: Learned) -> bool:
    wrong = _wrong(finding)
    return (
        finding.evidence in ("marker", "differential", "contrast")
        and wrong is not None
        and wrong.how == "answered"
        and wrong.prefill is not None
        and not _over(finding, learned)
    )


def _truncates(finding: Finding, learned: Learned) -> bool:
    wrong = _wrong(finding)
    if wrong is None or finding.evidence != "semantics" or wrong.how != "answered" or _halves(wrong):
        return False
    said, sent = wrong.usage.prompt, prompt_tokens(wrong, learned)
    return said is not None and sent is not None and 16 < said < 0.9 * sent


def _ram_cache(finding: Finding, learned: Learned) -> bool:
    wrong = _wrong(finding)
    return (
        finding.evidence == "marker" and wrong is not None and wrong.how == "answered" and not _halves(wrong)
    )


def _same_id(finding: Finding, learned: Learned) -> bool:
    ids = [answer.ask.request_id for answer in finding.answers if answer.ask.request_id]
    shared = len(ids) > len(set(ids)) or (bool(ids) and finding.scenario == "request-ids")
    return shared and finding.evidence in ("marker", "liveness", "semantics", "differential")


def _offload(finding: Finding, learned: Learned) -> bool:
    return finding.evidence in ("marker", "differential") and finding.scenario == "sessions"


def _shared_cache(finding: Finding, learned: Learned) -> bool:
    return finding.evidence == "timing"


def _throttled(finding: Finding, learned: Learned) -> bool:
    """Any of its exchanges was told to slow down: a limiter stood between, and what it did is not the engine's."""
    return finding.evidence in ("liveness", "semantics", "timing") and any(
        answer.how == "limited" or answer.status == 429 or answer.retries > 0 or "rate limit" in _text(answer)
        for answer in finding.answers
    )


# ---------------------------------------------------------------------------------------------- the signatures

SIGNATURES: tuple[Signature, ...] = (
    Signature(
        name="sglang-pd-placeholder",
        title="SGLang pair: a prompt over prefill's pool is answered from other requests' KV cache",
        engines=("sglang",),
        cause=(
            "Prefill rejects a prompt that is longer than its pool by putting a one-token placeholder in its place, and the "
            "placeholder goes on to the transfer. Decode has reserved pages for the real prompt, gets one, and reads all: the "
            "others still hold what earlier requests left there."
        ),
        fixed="in 0.5.20, which refuses such a prompt with 400 (captured; 0.5.19 answers it)",
        fixed_in=(0, 5, 20),
        todo=(
            "Take the pair out of service until it runs 0.5.20 or later. Until then refuse at the gateway every prompt longer "
            "than the smallest prefill pool (max_total_num_tokens in /server_info), and treat answers given so far as leaked."
        ),
        sources=(
            "https://github.com/sgl-project/sglang/issues/30233",
            "https://github.com/sgl-project/sglang/pull/30325",
            "https://github.com/sgl-project/sglang/pull/34208",
        ),
        shows=_incident,
    ),
    Signature(
        name="sglang-pd-abort-as-length",
        title='SGLang pair: prefill gave up, the client is told finish_reason "length"',
        engines=("sglang",),
        cause=(
            "A prefill request that is aborted while its transfer runs is finished as FINISH_LENGTH when the transfer ends, so "
            "its error and status are lost and an HTTP 200 remains."
        ),
        fixed="not known: the report is open",
        todo="Do not take 200 with a short answer for success. Compare prompt_tokens of both halves at the router and fail if they differ.",
        sources=("https://github.com/sgl-project/sglang/issues/33507",),
        shows=_spurious_length,
    ),
    Signature(
        name="sglang-pd-decode-waits",
        title="SGLang pair: prefill refuses, decode never answers",
        engines=("sglang",),
        cause=(
            "A prompt that prefill refuses never reaches the rendezvous that decode waits for. Nobody tells decode, so its "
            "request is neither answered nor refused until the client leaves or a bootstrap time-out ends it."
        ),
        fixed="not in 0.5.20 and 0.5.23 (captured): the router has to end it",
        todo=(
            "Let the router cancel decode's request as soon as prefill's fails, and give the client prefill's error. A "
            "shorter SGLANG_DISAGGREGATION_WAITING_TIMEOUT (300 s in the reports) bounds how long a client is left waiting."
        ),
        sources=(
            "https://github.com/sgl-project/sglang/issues/9726",
            "https://github.com/vllm-project/aibrix/issues/2289",
            "https://github.com/llm-d/llm-d/issues/2433",
            "https://github.com/sgl-project/sglang/issues/10204",
        ),
        shows=_decode_waits,
    ),
    Signature(
        name="sglang-page-edge",
        title="SGLang: a prompt just below the refuse edge is accepted, never run, and blocks those behind it",
        engines=("sglang",),
        cause=(
            "Admission compares tokens with the pool; the scheduler's budget counts whole pages and the first output page as "
            "well. A prompt between the two is accepted, never fits, is tried again at every step, and everything queued behind "
            "it waits. It needs a page size above 1 and a context longer than the pool."
        ),
        fixed="not in 0.5.23 (page size 16, a pool of 2,048 tokens, a prompt of 2,041)",
        todo=(
            "Set --context-length below the pool by at least two pages (max_total_num_tokens in /server_info), or refuse "
            "such prompts at the gateway. A server that is stuck serves again when the waiting client disconnects."
        ),
        sources=(
            "https://github.com/sgl-project/sglang/issues/28530",
            "https://github.com/sgl-project/sglang/pull/29249",
        ),
        shows=_edge_hang,
    ),
    Signature(
        name="vllm-nixl-stale-blocks",
        title="vLLM pair over NIXL: decode read blocks that prefill had given to somebody else, or that never arrived",
        engines=("vllm",),
        cause=(
            "Prefill keeps a finished prompt's blocks under a lease and hands them on when it ends; a reference that is used "
            "later, or twice, reads the next prompt's blocks. A read that fails is, for hybrid (HMA) models, not reported to the "
            "scheduler, and decode goes on with what its pages held. All of these return HTTP 200."
        ),
        fixed="not known: the fix for failed reads is an open pull request (0.29.0 shows it)",
        todo=(
            'Set "kv_load_failure_policy": "fail", give kv_lease_duration (default 30 s) more than the longest queue in front '
            "of decode, never send a kv_transfer_params twice or on a retry, and alarm on nixl_num_kv_expired_reqs, "
            "nixl_num_failed_transfers and on 'Potentially invalid KV blocks' in prefill's log. None of these counters moved "
            "in the worst case reported."
        ),
        sources=(
            "https://github.com/vllm-project/vllm/issues/52234",
            "https://github.com/vllm-project/vllm/pull/52232",
            "https://github.com/vllm-project/vllm/issues/21570",
            "https://github.com/aws-samples/aws-do-eks/pull/84",
        ),
        shows=_nixl,
    ),
    Signature(
        name="silent-truncation",
        title="The prompt was cut short and answered as if it had been read whole",
        engines=("sglang", "ollama"),
        cause=(
            "The server drops what does not fit its context and answers the rest with HTTP 200: SGLang when it runs with "
            "--allow-auto-truncate, Ollama by itself when the prompt is over num_ctx. Usage counts what was read, not what was sent."
        ),
        fixed="nothing to fix: it is a setting",
        todo=(
            "SGLang: start without --allow-auto-truncate. Ollama: set num_ctx (OLLAMA_CONTEXT_LENGTH) to what clients are "
            "promised, and refuse longer prompts in front of it."
        ),
        sources=(
            "https://github.com/sgl-project/sglang/pull/15369",
            "https://github.com/mmcdermott/MEDS_EIC_AR/pull/172",
            "https://github.com/LatentNoise/content/pull/54",
        ),
        shows=_truncates,
    ),
    Signature(
        name="llamacpp-cache-ram",
        title="llama.cpp: an unrelated conversation was restored from the prompt cache in host memory",
        engines=("llama.cpp", "llamacpp"),
        cause=(
            "The prompt cache behind --cache-ram and --cache-idle-slots is shared between slots and on by default; under "
            "concurrent load it can restore a finished conversation into a slot that serves another. cached_tokens stays 0."
        ),
        fixed="not known: the report is open",
        todo="Start llama-server with --cache-ram 0 and without idle-slot caching, and audit again.",
        sources=("https://github.com/ggml-org/llama.cpp/issues/27148",),
        shows=_ram_cache,
    ),
    Signature(
        name="duplicate-request-id",
        title="Two requests with one id: one gets the other's output, or none",
        engines=("sglang", "vllm"),
        cause=(
            "State of the engine's parts is kept by the id that the client sent (rid, X-Request-Id). A second request with the "
            "same id takes over, loses or destroys the first one's."
        ),
        fixed="SGLang refuses duplicates in flight (pull request 19035), vLLM adds a random suffix (27987)",
        todo="Do not pass a client's id to the engine: let the gateway mint ids, and keep the client's as a label.",
        sources=(
            "https://github.com/sgl-project/sglang/pull/19035",
            "https://github.com/sgl-project/sglang/issues/8089",
            "https://github.com/vllm-project/vllm/pull/27987",
            "https://github.com/vllm-project/vllm/issues/10583",
        ),
        shows=_same_id,
    ),
    Signature(
        name="lmcache-returning-session",
        title="A returning session was answered from another one's offloaded KV",
        engines=("vllm", "sglang"),
        cause=(
            "KV that had been moved to host memory or disk came back for the wrong request. Reported for LMCache 0.5.2 in "
            "process (LMCacheConnectorV1) with a local disk, and for cache layouts that changed in vLLM 0.26."
        ),
        fixed="not known; LMCache's multi-process mode did not show it in the same report",
        todo="If LMCache is in use: switch the tier off and audit again; if that helps, move to its multi-process mode. Same for other offload tiers.",
        sources=(
            "https://github.com/LMCache/LMCache/issues/4385",
            "https://github.com/LMCache/LMCache/issues/4463",
        ),
        shows=_offload,
    ),
    Signature(
        name="rate-limit-shadow",
        title="Something was limiting the rate while this was seen",
        engines=(),
        cause=(
            "At least one of the exchanges was told to slow down (429, or 503 with Retry-After). A limiter, a full queue or a "
            "proxy can make a request slow or lose it; the engine behind it need not be at fault."
        ),
        fixed="",
        todo="Audit with a key that is not limited, or against the engine itself, before looking for the fault there.",
        sources=(),
        shows=_throttled,
    ),
    Signature(
        name="shared-prefix-cache",
        title="One key's requests are faster because another key sent the prompt before",
        engines=(),
        cause=(
            "The prefix cache is shared between tenants, so the time to the first token tells one tenant whether somebody else "
            "has sent a prompt that begins like a guess (CVE-2025-46570 for vLLM; SGLang's radix cache is shared alike). No "
            "content is read, but it can be guessed piece by piece."
        ),
        fixed="cache_salt keeps them apart where it is sent (vLLM since pull request 17045, SGLang's radix cache too)",
        todo=(
            "Let the gateway, not the client, set cache_salt from the tenant's key; SGLang's tiers behind LMCache and its remote "
            "storage did not carry it in the reports below. Or switch prefix caching off. Hermetic scopes its cache by tenant."
        ),
        sources=(
            "https://github.com/vllm-project/vllm/pull/17045",
            "https://github.com/vllm-project/vllm/pull/39082",
            "https://github.com/sgl-project/sglang/issues/37160",
        ),
        shows=_shared_cache,
    ),
)

BY_NAME = {signature.name: signature for signature in SIGNATURES}


def known(finding: Finding, learned: Learned) -> Signature | None:
    """The first known fault that this finding looks like on this engine; None if it is like none."""
    for signature in SIGNATURES:
        if _fits(signature, learned) and signature.shows(finding, learned):
            return signature
    return None


def _fits(signature: Signature, learned: Learned) -> bool:
    engine = learned.engine.lower()
    if engine and signature.engines and engine not in signature.engines:
        return False
    if not engine and signature.engines and signature.name not in UNSAID:
        return False
    version = _version(learned.version)
    return not (signature.fixed_in and version and version >= signature.fixed_in)


# These are told by what they do: they may be named also where the server does not say which engine it is.
UNSAID = frozenset(
    {"sglang-pd-placeholder", "sglang-pd-decode-waits", "silent-truncation", "duplicate-request-id"}
)


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
    return tuple(int(part) for part in match.groups(default="0")) if match else ()


__all__ = ["BY_NAME", "SIGNATURES", "Signature", "known", "prompt_tokens"]
