"""Hermetic: LLM inference in which a request only ever attends to its own KV cache."""

__version__ = "0.1.0"
