"""The rules by family; importing this fills registry.RULES."""

from hermetic.check.rules import (
    capacity,
    coverage,
    detection,
    exposure,
    hermetic,
    pair,
    proxy,
    release,
    sources,
    version,
    vllm,
)
from hermetic.check.rules.registry import RULES, Rule, judge

__all__ = ["RULES", "Rule", "capacity", "coverage", "detection", "exposure", "hermetic", "judge", "pair", "proxy", "release", "sources", "version", "vllm"]  # fmt: skip
