"""Words of one line as systemd and HAProxy write them: blanks part them, both quotes hold them together, a backslash stands before what is meant
as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hermetic.check.readers.shell import UNKNOWN


def quoted_words(
    line: str,
    *,
    escapes: Mapping[str, str] | None = None,
    as_it_is: str = "",
    comment: str = "",
    variable: re.Pattern[str] | None = None,
) -> list[str]:
    """`escapes`: what a backslash and a letter mean; `as_it_is`: the quote in which a backslash is an ordinary sign; `comment`: what begins one;
    `variable`: what follows a `$` in double quotes, which is not known here."""
    found: list[str] = []
    current: list[str] = []
    begun, quote, at = False, "", 0
    while at < len(line):
        char = line[at]
        at += 1
        if char == "\\" and at < len(line) and not (quote and quote == as_it_is):
            current.append((escapes or {}).get(line[at], line[at]))
            begun, at = True, at + 1
        elif char == "$" and quote == '"' and variable is not None and (name := variable.match(line, at)):
            current.append(UNKNOWN)
            at = name.end()
        elif quote:
            if char == quote:
                quote = ""
            else:
                current.append(char)
        elif char in "'\"":
            quote, begun = char, True
        elif char == comment:
            break
        elif char.isspace():
            if begun:
                found.append("".join(current))
            current, begun = [], False
        else:
            current.append(char)
            begun = True
    if begun:
        found.append("".join(current))
    return found


__all__ = ["quoted_words"]
