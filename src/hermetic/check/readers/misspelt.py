"""Variables of an engine whose names are nearly those of ones that rules rest on: an engine passes over a name that it does not know, without a word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator

_OF_AN_ENGINE = re.compile(r"(?:SGL|VLLM)\w{4,80}")
_MOST = 200  # names that are looked at
# Of all variables in the sources of SGLang 0.5.23 and vLLM 0.32 the next nearest to one of these has 0.885 (VLLM_EC_SIDE_CHANNEL_HOST).
_NEAR = 0.9


def misspelt(given: Iterable[str], known: Collection[str]) -> Iterator[tuple[str, str]]:
    """(a name that is given, the known one that may be meant)."""
    unknown = [name for name in given if name not in known and _OF_AN_ENGINE.fullmatch(name)]
    for name in unknown[:_MOST]:
        for near in difflib.get_close_matches(name, known, n=1, cutoff=_NEAR):
            yield name, near


__all__ = ["misspelt"]
