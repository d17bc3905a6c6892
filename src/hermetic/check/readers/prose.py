"""The commands in prose: a README or a page of notes names engines in its sentences, and starts none of them.

The one thing to know: of a file whose name says that it is prose only two things are read: the blocks that are fenced as a shell's, and lines
that begin with what starts an engine and give it an option.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_PROSE = re.compile(r"\.(?:md|markdown|mdx|rst|adoc)$", re.IGNORECASE)
_FENCE = re.compile(r"\s{0,3}(`{3,}|~{3,})\s*\{?\.?([\w+-]*)")
_SHELLS = ("", "sh", "bash", "shell", "zsh", "console", "shell-session", "shellsession", "sh-session")
_PROMPT = re.compile(r"\s*[$%] ")
_LAUNCHES = re.compile(
    r"\s*(?:[$%] )?(?:(?:python[\d.]*|sglang|vllm|hermetic|docker|podman|sglang-router|smg|vllm-router)\s|\S+/(?:sglang|vllm|hermetic)\s).*(?<=\s)--?[a-z]"
)


def commands_of(name: str, text: str) -> str:
    """The text itself, unless its name says that it is prose: then its commands, one below the other."""
    return "\n".join(_commands(text.splitlines())) if _PROSE.search(name) else text


def _commands(lines: list[str]) -> Iterator[str]:
    fence, shell, goes_on = "", False, False
    for line in lines:
        found = _FENCE.match(line)
        if fence:
            if found and found[1].startswith(fence) and not found[2]:
                fence = ""
            elif shell:
                yield _PROMPT.sub("", line, count=1)
        elif found:
            fence, shell, goes_on = found[1], found[2].lower() in _SHELLS, False
        elif goes_on or _LAUNCHES.match(line):
            yield _PROMPT.sub("", line, count=1)
            goes_on = line.rstrip().endswith("\\")


__all__ = ["commands_of"]
