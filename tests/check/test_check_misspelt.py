"""A variable that is misspelt turns nothing on, and the engine says nothing of it."""

from __future__ import annotations

import pytest

from hermetic.check import facts
from hermetic.check.readers import manifests
from hermetic.check.readers.misspelt import misspelt

KNOWN = (
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT",
    "SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
)


def test_a_misspelt_variable_is_told_with_the_one_that_may_be_meant_and_counts_for_nothing() -> None:
    text = (
        "services:\n  d:\n    image: lmsysorg/sglang:v0.5.20\n    command: sglang serve m --disaggregation-mode decode\n"
        "    environment: {SGLANG_DISAGGREGATION_DEFERED_DECODE_KV_RELEASE: 1, SGLANG_TORCH_PROFILER_DIR: /x}\n"
    )
    reading = manifests.read("c.yml", text)
    assert reading.sheets[0][facts.DEFERRED] is False  # the default of 0.5.20
    (part,) = reading.unread
    assert (part.source, part.part) == ("c.yml, line 3, service d", True)
    assert part.why.startswith(
        "the variable SGLANG_DISAGGREGATION_DEFERED_DECODE_KV_RELEASE is none that is known here"
    )
    assert part.why.endswith(f"is {KNOWN[0]} meant?")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICE", KNOWN[2]),
        ("SGL_MOONCAKE_MAX_TRANSFER_BATCH_INDICES", KNOWN[2]),
        ("VLLM_NIXL_SIDECHANNEL_HOST", KNOWN[3]),
        ("SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUTS", KNOWN[1]),
    ],
)
def test_what_may_be_meant(given: str, meant: str) -> None:
    assert list(misspelt([given], KNOWN)) == [(given, meant)]


@pytest.mark.parametrize(
    "given",
    # the nearest that vLLM 0.32 and SGLang 0.5.23 have themselves, and what is nobody's
    [
        "VLLM_EC_SIDE_CHANNEL_HOST",
        "VLLM_P2P_SIDE_CHANNEL_PORT",
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
        "NIXL_SIDE_CHANNEL_HOST",
        *KNOWN,
    ],
)
def test_a_variable_of_its_own_is_not_misspelt(given: str) -> None:
    assert list(misspelt([given], KNOWN)) == []
