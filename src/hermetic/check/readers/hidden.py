"""Containers that start an engine by something that is not read: a script in the image, or the image's own entry point.

The one thing to know: such a node is there, and nothing of it is known but its engine. The tag of its image does not even say the version, since a
script may install another.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from hermetic.check.readers.shell import UNKNOWN, commands

SGLANG, VLLM = "sglang", "vllm"
_SERVES = re.compile(
    r"(?:^|/)(?P<engine>sglang|vllm)(?:-(?:openai|server|serving|serve|prefill|decode|worker|runtime)[\w.-]*)?$"
)
_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ash", "ksh"})
_SCRIPT = re.compile(r".+\.(?:sh|bash)")
_MOST = 8  # words in which the script stands, behind `tini --` and the like
_SHOWN = 120


def started(repository: str, entry: Sequence[str], command: Sequence[str]) -> tuple[str, str] | None:
    """(engine, what starts it) where the image is of an engine, and no word says how it is started. `repository`: the image without its tag."""
    serves = _SERVES.search(repository)
    if serves is None:
        return None
    words = (*entry, *command)
    if not entry and all(word.startswith("-") for word in words[:1]):
        made_here = f"/{repository}".rpartition("/")[0] not in ("/lmsysorg", "/vllm")
        return (serves["engine"], "the image's own entry point") if made_here else None
    script = _script(words)
    return None if script is None else (serves["engine"], script)


def _script(words: Sequence[str]) -> str | None:
    """The script that these words run, or that what they give to a shell runs."""
    inner = _behind_c(words)
    if inner is None:
        return _named(words)
    return next((name for one in commands(inner, {}) if (name := _named(one.words)) is not None), None)


def _behind_c(words: Sequence[str]) -> str | None:
    for at in range(min(len(words), _MOST) - 1):
        if words[at].startswith("-") and re.fullmatch(r"-[a-z]*c", words[at]):
            shell = any(posixpath.basename(word) in _SHELLS for word in words[:at])
            return words[at + 1] if shell else None
    return None


def _named(words: Sequence[str]) -> str | None:
    """A file of a shell's commands that these words start; what is only read into the shell (`source`) starts nothing."""
    if not words or words[0] in ("source", "."):
        return None
    if UNKNOWN in words[0]:
        return "a command that a variable holds"
    found = next((word for word in words[:_MOST] if _SCRIPT.fullmatch(word) and UNKNOWN not in word), None)
    return None if found is None else found[:_SHOWN]


__all__ = ["started"]
