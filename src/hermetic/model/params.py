"""What a request asks of the sampler. Imports no torch: the gateway builds these, the workers read them.

The one thing to know: a `SamplingParams` that exists is valid. Its numbers are checked when it is made, and also
when msgspec decodes one from the wire, so nothing behind it needs to check again.
"""

from __future__ import annotations

import math

import msgspec

MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_LOGIT_BIAS = 300  # OpenAI's limit for the number of biased tokens


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=False):
    """How to choose each output token, and when to stop.

    `logprobs`: None none, 0 the chosen token's only, k also the k most likely; always of the raw distribution,
    before temperature, penalties and bias. `top_k` 0 is off. Without `ignore_eos` the model's own end tokens stop
    the answer as `stop_token_ids` do. Until `min_tokens` are out, neither can be chosen (`sampling.sample`).

    Raises ValueError (msgspec.ValidationError when decoding) with the field and the value.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}  # msgspec makes an empty one for each struct
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}")
        if self.seed is not None:
            _check("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are taken"
            )
        for token, bias in self.logit_bias.items():
            _check("logit_bias token", token, 0, 2**31 - 1)
            _check(f"logit_bias of token {token}", bias, -100.0, 100.0)
        for token in self.stop_token_ids:
            _check("stop_token_ids", token, 0, 2**31 - 1)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken. No seed matters then."""
        return self.temperature == 0.0


def _check(name: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    if math.isfinite(value) and (low < value if low_open else low <= value) and value <= high:
        return
    bounds = f"{'over' if low_open else 'from'} {low} to {high}"
    raise ValueError(f"{name} is {value}; it must be a number {bounds}")
