"""Pairs: what must be the same in both halves, because bytes are moved from one to the other without being looked at.

The one thing to know: a transfer copies pages, not meaning. Halves that lay out or interpret a page differently move the right bytes and read
something else.
"""

from __future__ import annotations

from hermetic.check import facts
from hermetic.check.deployment import Pair
from hermetic.check.facts import Fact, T
from hermetic.check.rules.registry import Answer, rule


@rule(
    "PAIR001",
    "the halves have different page sizes",
    engines=("sglang", "vllm"),
    per="pair",
    why="A page number means another place on each side, and the last page of a prompt another number of rows.",
    fix="Give both halves the same --page-size (--block-size).",
    source="The class 'layout mismatch' of the field's fault reports.",
)
def page(pair: Pair) -> Answer:
    return _apart(pair, facts.PAGE, "pages of {} tokens")


@rule(
    "PAIR002",
    "the halves keep KV in different dtypes",
    engines=("sglang", "vllm"),
    per="pair",
    why="The same bytes are read as other numbers. Nothing fails; answers are wrong.",
    fix="Give both halves the same --kv-cache-dtype, and the same --dtype where that is auto.",
    source="The class 'layout mismatch' of the field's fault reports.",
)
def kv_dtype(pair: Pair) -> Answer:
    return _apart(pair, facts.KV_DTYPE, "KV in {}")


@rule(
    "PAIR003",
    "the halves serve different models",
    engines=("sglang", "vllm"),
    per="pair",
    why="Keys and values of one model mean nothing to another, also to another revision of it. If the shapes agree nothing fails.",
    fix="Start both halves with the same model path and revision.",
    source="KV carries no fingerprint of the model in SGLang and vLLM.",
)
def model(pair: Pair) -> Answer:
    return _apart(pair, facts.MODEL, "{}")


@rule(
    "PAIR004",
    "the halves serve different revisions of the model",
    engines=("sglang", "vllm"),
    per="pair",
    why="Two revisions of one model have the same shapes and other weights: KV of one is quietly wrong in the other.",
    fix="Pin the same --revision in both halves.",
    source="KV carries no fingerprint of the model in SGLang and vLLM.",
)
def revision(pair: Pair) -> Answer:
    """A model in a folder has no revision. Whether two folders hold the same files is not asked here."""
    if all(half[facts.MODEL].startswith(("/", "./", "../", "~")) for half in pair.halves):
        return None
    return _apart(pair, facts.REVISION, "revision {}")


@rule(
    "PAIR005",
    "the halves advertise different contexts",
    severity="warning",
    engines=("sglang", "vllm"),
    per="pair",
    why="A prompt that one half takes is refused by the other, after the first has reserved pages for it.",
    fix="Give both halves the same --context-length (--max-model-len).",
    source="The first cause of the incident.",
)
def context(pair: Pair) -> Answer:
    return _apart(pair, facts.CONTEXT, "a context of {:,} tokens")


@rule(
    "PAIR006",
    "the halves have different tensor parallel widths",
    severity="warning",
    engines=("sglang", "vllm"),
    per="pair",
    why="KV heads lie on other ranks, so each page is cut up and put together on the way. Not every backend and model can do that, and SGLang's "
    "checksum cannot compare such a pair.",
    fix="Give both halves the same --tp-size (--tensor-parallel-size), or make sure that this model and backend are tested with different ones.",
    source="https://github.com/llm-d/llm-d/issues/2433 (a pair of 1 and 4 that failed at transfer time).",
)
def tensor_parallel(pair: Pair) -> Answer:
    return _apart(pair, facts.TP, "a width of {}")


@rule(
    "PAIR007",
    "the halves use different transports",
    engines=("sglang", "vllm"),
    per="pair",
    why="They cannot talk to each other: every request of this pair waits until it times out.",
    fix="Give both halves the same transfer backend or connector.",
    source="SGLang: --disaggregation-transfer-backend; vLLM: kv_connector.",
)
def transport(pair: Pair) -> Answer:
    return _apart(pair, facts.TRANSPORT, "{}")


def _apart(pair: Pair, fact: Fact[T], shown: str) -> Answer:
    """Where the halves differ in a fact: what each has."""
    prefill, decode = pair.prefill[fact], pair.decode[fact]
    return (
        None
        if prefill == decode
        else f"prefill has {shown.format(prefill)} and decode {shown.format(decode)}"
    )
