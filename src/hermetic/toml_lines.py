"""On which line of a TOML file something stands: tomllib reads values, and does not say where they were.

The one thing to know: this is a scanner for text that tomllib has accepted. It finds where names and values begin and
skips what is in between; it checks nothing.

    index = lines('a = 1\\n[b]\\nc = [1,\\n 2]')
    index == {("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "c", 0): 3, ("b", "c", 1): 4}
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

Path = tuple[str | int, ...]  # names of tables and keys; numbers of array entries

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'  # a string may end in one or two quotes of its own
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}\n#]+")


def line_of(index: Mapping[Path, int], path: Path) -> int:
    """The line of the nearest thing around `path` that stands in the file: 1 when nothing of it does."""
    while path and path not in index:
        path = path[:-1]
    return index.get(path, 1)


def lines(text: str) -> dict[Path, int]:
    """The line (from 1) on which each key, table and array entry of a TOML text first stands."""
    return _Scanner(text.replace("\r\n", "\n")).scan()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._line, self._counted = 1, 0  # the line of character `_counted`
        self._found: dict[Path, int] = {}
        self._tables: dict[Path, int] = {}  # arrays of tables: their entries so far

    def scan(self) -> dict[Path, int]:
        table: Path = ()
        while self._skip():
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
        return self._found

    def _header(self) -> Path:
        array = self._text.startswith("[[", self._at)
        self._at += 2 if array else 1
        self._skip()
        names = self._names()
        self._skip()
        self._at += 2 if array else 1
        table: Path = ()
        for name in names[:-1]:
            table = self._inside((*table, name))
        table = (*table, names[-1])
        if array:
            self._note(table)
            number = self._tables.get(table, 0)
            self._tables[table] = number + 1
            table = (*table, number)
        self._note(table)
        return table

    def _inside(self, table: Path) -> Path:
        """Where names below `table` belong: in the last entry, if it is an array of tables."""
        self._note(table)
        return (*table, self._tables[table] - 1) if table in self._tables else table

    def _pair(self, table: Path) -> None:
        """NAME = VALUE, with dots in the name or without."""
        for name in self._names():
            table = (*table, name)
            self._note(table)
        self._skip()
        self._at += 1  # the equals sign
        self._skip()
        self._value(table)

    def _names(self) -> list[str]:
        found = []
        while True:
            quoted = _STRING.match(self._text, self._at)
            bare = _BARE.match(self._text, self._at)
            if quoted is not None:
                found.append(tomllib.loads(f"name = {quoted[0]}")["name"])
                self._at = quoted.end()
            elif bare is not None:
                found.append(bare[0])
                self._at = bare.end()
            self._skip()
            if not self._text.startswith(".", self._at):
                return found
            self._at += 1
            self._skip()

    def _value(self, path: Path) -> None:
        if string := _STRING.match(self._text, self._at):
            self._at = string.end()
        elif self._text[self._at] == "[":
            self._at += 1
            number = 0
            while self._skip() and self._text[self._at] != "]":
                self._note((*path, number))
                self._value((*path, number))
                number += 1
                self._comma()
            self._at += 1
        elif self._text[self._at] == "{":
            self._at += 1
            while self._skip() and self._text[self._at] != "}":
                self._pair(path)
                self._comma()
            self._at += 1
        elif scalar := _SCALAR.match(self._text, self._at):
            self._at = scalar.end()

    def _comma(self) -> None:
        self._skip()
        if self._text.startswith(",", self._at):
            self._at += 1

    def _skip(self) -> bool:
        """Pass blanks, ends of lines and comments; whether anything is left."""
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        return self._at < len(self._text)

    def _note(self, path: Path) -> None:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        self._found.setdefault(path, self._line)
