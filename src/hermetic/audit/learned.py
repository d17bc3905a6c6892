"""What the audit has learned of a server before it judges it: how much it takes, how fast it is, how much it varies by itself.

The one thing to know: limits are learned from what the server accepts and refuses, never assumed from what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Edge(msgspec.Struct, frozen=True):
    """Of one endpoint, in tokens of prompt (with `max_tokens` as asked): the longest accepted and the shortest refused.

    `refused` None: everything that was tried was accepted. `silent`: lengths that got neither answer nor error. `cut`: the
    shortest that was answered without having been read whole."""

    accepted: int
    refused: int | None
    silent: tuple[int, ...] = ()
    cut: int | None = None
    said: str = ""  # the refusal's text


class Noise(msgspec.Struct, frozen=True):
    """How much answers to one request differ when nobody else's data can be the cause: alone again and again, and beside
    copies of itself (batch arithmetic). Rates are of answers that differ from the first."""

    alone_runs: int = 0
    alone_differ: int = 0
    beside_runs: int = 0
    beside_differ: int = 0
    logprob_error: float | None = (
        None  # difference of a logprob over a common beginning that few runs exceed; None: no logprobs
    )
    logprob_largest: float | None = None  # and the largest that was seen


PLAIN_PREFILL = 400.0  # tokens a second, where it was not measured: a small model on a CPU
# How much slower than measured a server may read before it counts as silent. vLLM's pair on two cores, measured at 180 tokens a second, read a wave of
# 27,000 tokens at 124.
SLOWER = 3.0


class Learned(msgspec.Struct, kw_only=True):
    """`tokens_per_word`: of the audit's own prompts, by the server's own usage. `prefill`: prompt tokens a second at best
    (None: not measured); `first`: seconds to the first token of a short prompt, as measured (median)."""

    model: str
    models: tuple[str, ...] = ()
    engine: str = ""  # sglang, vllm, llama.cpp, ollama, hermetic, ... as far as it can be told; "" if not
    version: str = ""
    endpoints: tuple[str, ...] = ("chat", "completions")
    token_ids: bool = False  # whether prompts of token ids are accepted
    streams: bool = True
    logprobs: bool = False
    usage: bool = True  # whether it counts tokens
    counts_cached: bool = True  # whether its count of a prompt holds what it took from its cache
    claimed: int | None = None  # max_model_len, context_length
    edges: dict[str, Edge] = {}  # by endpoint
    page: int | None = None  # tokens of a KV page, if it can be told
    tokens_per_word: float = 2.0
    prefill: float | None = None
    first: float = 1.0
    bound: float = 60.0  # seconds within which any request of ours has to be answered
    noise: Noise = Noise()
    facts: dict[str, Any] = {}  # what the server says of itself

    def tokens(self, prompt: str | Sequence[int]) -> float:
        """About how many tokens a prompt of the audit's own has."""
        return len(prompt.split()) * self.tokens_per_word if isinstance(prompt, str) else len(prompt)

    def reading(self, tokens: float) -> float:
        """About how many seconds this server takes to read so many tokens."""
        return tokens / (self.prefill or PLAIN_PREFILL)

    def longest(self, endpoint: str) -> int:
        """Tokens of prompt that this endpoint is known to take."""
        edge = self.edges.get(endpoint)
        return edge.accepted if edge is not None else 512

    def takes(self, endpoint: str) -> int:
        """The same, to ask for; where there was no time to find this endpoint's own limit, what another endpoint takes, below what this one refused."""
        edge, known = self.edges.get(endpoint), self.longest(endpoint)
        if edge is None or (edge.refused is not None and edge.refused <= 2 * known):
            return known
        others = [other.accepted for other in self.edges.values()]
        return max([known, *(n for n in others if edge.refused is None or n < edge.refused)])


__all__ = ["SLOWER", "Edge", "Learned", "Noise"]
