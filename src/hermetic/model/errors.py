"""What goes wrong with a model, as types. The message always says which file or field, and what to do."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be found, read, or computed faithfully. Exit code 2; never shown as a traceback."""


class NonFiniteLogits(Exception):
    """The decoder produced NaN or infinity for `rows` (indices into the logits). Those requests must fail."""

    def __init__(self, rows: tuple[int, ...]):
        super().__init__(
            f"the model produced NaN or infinite logits in {len(rows)} row(s): the weights are damaged, or their "
            "values overflow this dtype (try --dtype float32)"
        )
        self.rows = rows
