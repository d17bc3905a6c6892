"""The decoder: token ids in, logits out, for inference only. It knows nothing of pages; the caller attends.

The one thing to know: a row of the result depends on that row alone (and on what `attend` gives back for it). Norms,
rotation and SiLU work row by row (`ops.py`); matrix products run in row counts that were measured to agree bit for bit
(`linear.py`). Set `torch.set_num_threads` before loading: the measurement holds for that number of threads.

In bf16, decode rows and prompt rows go through two kernels for the same weights, so a token's row has other last bits as
the answer's than as the prompt's. Weights that are large are kept in the prompt's packing only: see WEIGHTS_TWICE.

In bf16, values are rounded where transformers' Llama rounds them; see `ops.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from hermetic.kernels.matmul import FewRows
from hermetic.model.config import ModelConfig
from hermetic.model.errors import ModelError
from hermetic.model.fused import DecodeLayers, FusedLayer
from hermetic.model.linear import Linear
from hermetic.model.ops import PARALLEL_ELEMENTS, FusedOps, Ops
from hermetic.model.weights import ModelSource, Progress, Weights, fingerprint, open_weights

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
# Bytes of the layers' bf16 weights up to which they are packed twice, for prompts and for decode steps: SmolLM2-135M takes
# 212 MB more and its steps two thirds of the time. The head is packed once, for few rows.
WEIGHTS_TWICE = 4 << 30
_ROPE_BLOCK = 1024  # positions computed at once


class Attend(Protocol):
    """The caller's attention for one layer, over whatever KV cache it keeps."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, heads, dim], k and v [T, kv_heads, dim] -> [T, heads, dim], all of the model's dtype.

        q, k and v are normalised and rotated already. They are views into one [T, (heads + 2 * kv_heads) * dim] array:
        contiguous but for the first stride. They are only valid during the call.
        """
        ...


@dataclass(frozen=True)
class _Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A loaded model. `forward` may be called from one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        progress: Progress = lambda _fraction, _text: None,
        ops: Ops | None = None,
    ):
        """Read, convert and prepack every tensor. Raises ModelError when one cannot be read."""
        if dtype not in DTYPES.values():
            raise ModelError(f"hermetic computes in {', '.join(DTYPES)}, not in {dtype}")
        self.config, self.dtype = config, dtype
        self.fingerprint = ""
        self._ops: Ops = ops or FusedOps()
        self._rope = _RotaryTable(config, dtype)
        twice = _layer_bytes(config) <= WEIGHTS_TWICE

        def get(name: str) -> torch.Tensor:
            return weights.tensor(name).to(dtype)

        def fused(prefix: str, names: tuple[str, ...], bias: bool) -> Linear:
            joined = torch.cat([get(f"{prefix}.{name}.weight") for name in names])
            return Linear(
                joined, torch.cat([get(f"{prefix}.{name}.bias") for name in names]) if bias else None, twice
            )

        progress(0.0, "reading embeddings")
        self._embedding = get("embed_tokens.weight").contiguous()
        self._layers: list[_Layer] = []
        for n in range(config.layers):
            progress(n / (config.layers + 1), f"layer {n + 1} of {config.layers}")
            at = f"layers.{n}"
            self._layers.append(
                _Layer(
                    attention_norm=get(f"{at}.input_layernorm.weight"),
                    qkv=fused(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
                    qk_norms=(get(f"{at}.self_attn.q_norm.weight"), get(f"{at}.self_attn.k_norm.weight"))
                    if config.qk_norm
                    else None,
                    output=fused(f"{at}.self_attn", ("o_proj",), config.o_bias),
                    mlp_norm=get(f"{at}.post_attention_layernorm.weight"),
                    gate_up=fused(f"{at}.mlp", ("gate_proj", "up_proj"), config.mlp_bias),
                    down=fused(f"{at}.mlp", ("down_proj",), config.mlp_bias),
                )
            )
        progress(config.layers / (config.layers + 1), "output head")
        self._norm = get("norm.weight")
        self._decode = None if ops else self._fused()
        head = self._embedding if config.tied_head else get("lm_head.weight").contiguous()
        # In bf16 the logits stay the float32 sums that they are: rounding them would make ties where there are none.
        self._head = FewRows(head, dtype=torch.float32) if dtype is torch.bfloat16 else Linear(head)

    @classmethod
    def load(
        cls,
        source: ModelSource,
        dtype: str | torch.dtype = "bf16",
        progress: Progress = lambda _fraction, _text: None,
        most_rows: int = 512,
    ) -> Decoder:
        """Load from disk, take the fingerprint, and compile the kernels with one small run. `most_rows`: of one step. Raises ModelError."""
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise ModelError(f"hermetic computes in {' or '.join(DTYPES)}, not in {dtype!r}")
            dtype = DTYPES[dtype]
        weights = open_weights(source)
        config = weights.read_config()
        decoder = cls(config, weights, dtype, lambda fraction, text: progress(0.8 * fraction, text))
        progress(0.8, "fingerprint")
        decoder.fingerprint = fingerprint(config, weights)
        progress(0.9, "compiling kernels")
        decoder.warm_up(most_rows)
        progress(1.0, "ready")
        return decoder

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor,
        decode: int = 0,
    ) -> torch.Tensor:
        """One step over T tokens of any number of sequences.

        tokens i64 [T]; positions i64 [T], each in its own sequence and below config.window; rows i64 [R]: which of
        the T to compute logits for -> float32 [R, vocab]. The first `decode` rows are decode rows, one a sequence.
        """
        config, ops, eps = self.config, self._ops, self.config.norm_eps
        count, heads, kv_heads, dim = tokens.shape[0], config.heads, config.kv_heads, config.head_dim
        if count == 0:
            return torch.empty((0, config.vocab))
        cos, sin = self._rope.upto(int(positions.max()))
        x = self._embedding.index_select(0, tokens)
        if decode == count and self._decode is not None:
            h = ops.rms_norm(x, self._layers[0].attention_norm, eps)
            self._decode.run(x, h, positions, cos, sin, attend)
            return self._head(h.index_select(0, rows))
        # Decode rows and prompt rows meet only to attend.
        parts = [(x[:decode], True), (x[decode:], False)] if 0 < decode < count else [(x, decode > 0)]
        hs = [ops.rms_norm(part, self._layers[0].attention_norm, eps) for part, _ in parts]
        for n, layer in enumerate(self._layers):
            qkv = _joined(
                [layer.qkv.few(h) if few else layer.qkv(h) for h, (_, few) in zip(hs, parts, strict=True)]
            )
            ops.rope(qkv, positions, cos, sin, heads, kv_heads, layer.qk_norms, eps)
            q, k, v = qkv.view(count, heads + 2 * kv_heads, dim).split((heads, kv_heads, kv_heads), 1)
            attended = attend(n, q, k, v).reshape(count, heads * dim)
            following = self._layers[n + 1].attention_norm if n + 1 < config.layers else self._norm
            split = attended.split([len(part) for part, _ in parts]) if len(parts) > 1 else [attended]
            hs = [
                self._rest(layer, part, a, few, following)
                for (part, few), a in zip(parts, split, strict=True)
            ]
        if rows.shape[0] == 0:
            return torch.empty((0, config.vocab))
        return self._head(_joined(hs).index_select(0, rows))

    def _fused(self) -> DecodeLayers | None:
        """The layers for steps of decode rows only, where their weights are packed and shaped for it."""
        fused: list[FusedLayer] = []
        for layer in self._layers:
            products = [p.few for p in (layer.output, layer.gate_up, layer.down, layer.qkv)]
            few = [p for p in products if isinstance(p, FewRows)]
            if len(few) < len(products):
                return None
            fused.append(
                FusedLayer(
                    (few[0], few[1], few[2], few[3]), layer.attention_norm, layer.mlp_norm, layer.qk_norms
                )
            )
        if not all(layer.fits for layer in fused):
            return None
        config = self.config
        return DecodeLayers(fused, self._norm, config.heads, config.kv_heads, config.norm_eps)

    def _rest(
        self, layer: _Layer, x: torch.Tensor, attended: torch.Tensor, few: bool, following: torch.Tensor
    ) -> torch.Tensor:
        """What follows attention: x [T, hidden] in place, attended [T, heads * dim] -> x by the `following` norm."""
        ops, eps = self._ops, self.config.norm_eps
        output, gate_up, down = layer.output, layer.gate_up, layer.down
        h = ops.add_rms_norm(x, output.few(attended) if few else output(attended), layer.mlp_norm, eps)
        h = ops.silu_mul(gate_up.few(h) if few else gate_up(h))
        return ops.add_rms_norm(x, down.few(h) if few else down(h), following, eps)

    def warm_up(self, most_rows: int) -> None:
        """Run one row, and as many as it takes until every kernel is the one for many, so that no request waits for a compiler."""
        empty = torch.zeros(1, dtype=torch.int64)
        many = max(1, min(most_rows, max(512, -(-PARALLEL_ELEMENTS // self.config.hidden))))
        for count, decode in ((1, 1), (2, 1), (1, 0), (many, 0)):
            positions = torch.zeros(count, dtype=torch.int64)
            self.forward(positions, positions, lambda _layer, q, _k, _v: q.contiguous(), empty, decode)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _layer_bytes(config: ModelConfig) -> int:
    """Bytes of all layers' matrices in bf16."""
    attention = config.head_dim * (2 * config.heads + 2 * config.kv_heads)
    return 2 * config.layers * config.hidden * (attention + 3 * config.intermediate)


class _RotaryTable:
    """cos and sin by position, in float32 arrays, rounded to the model's dtype; grown in blocks as positions come.

    A block is always computed whole, and in float64: a value depends on its position alone, not on when it was made.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        self._inv_freq = torch.tensor(config.rope.inv_freq, dtype=torch.float32)
        self._scaling, self._window, self._dtype = config.rope.scaling, config.window, dtype
        self._cos = self._sin = torch.empty((0, len(config.rope.inv_freq)), dtype=torch.float32)

    def upto(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each f32 [more than `position`, dim / 2]."""
        if position >= self._window:
            raise ValueError(f"position {position} is outside the model's window of {self._window} tokens")
        if position >= self._cos.shape[0]:
            blocks = list(self._blocks(position))
            self._cos = torch.cat([self._cos, *(cos for cos, _ in blocks)])
            self._sin = torch.cat([self._sin, *(sin for _, sin in blocks)])
        return self._cos, self._sin

    def _blocks(self, position: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first in range(self._cos.shape[0], position + 1, _ROPE_BLOCK):
            where = torch.arange(first, first + _ROPE_BLOCK, dtype=torch.float32)
            # The product in float32, as transformers takes it: at position 8000 that matters more than its cosine.
            angle = (where.unsqueeze(1) * self._inv_freq).double()
            yield self._rounded(angle.cos()), self._rounded(angle.sin())

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        return (values.float() * self._scaling).to(self._dtype).float()
