"""The line of every key: random TOML documents whose author wrote down where each thing went."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.toml_lines import Path, line_of, lines

# Values that hold whatever a careless scanner could stumble over; `LONG` ones go over several lines.
SHORT = [
    "1", "-0.5e3", "true", "1979-05-27 07:32:00", "0xff", "inf", '""', "''", r'"a\"b # no \\"', "'c:\\ # no'", '"]}[{=,"',
    '"""one "" two"""', "'''it's'''", '""""quoted""""', "''''quoted''''", '"""\\""""',
]  # fmt: skip
LONG = [
    '"""\nkey = 1\n[table]\n"""',
    "'''\n[[entry]] # no\n\"\"\"\n'''",
    '"""a \\\n   b\n\\"""\n"x" """',
    '"""\n\n""""',
]
GAPS = ["", " ", "\t"]
BREAKS = ["", " ", "\n", ' # a [comment] = "\n', "\n\n  "]


class Author:
    """Writes a document and notes, for every name, the line on which it stood first."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.text, self.noted, self.names = data, "", dict[Path, int](), 0

    def pick(self, choices: list[str]) -> str:
        return self.data.draw(st.sampled_from(choices))

    def count(self, most: int) -> int:
        return self.data.draw(st.integers(0, most))

    def note(self, path: Path) -> None:
        self.noted.setdefault(path, self.text.count("\n") + 1)

    def name(self) -> tuple[str, str]:
        """A new name, and how it is written."""
        self.names += 1
        plain = f"k{self.names}"
        return self.data.draw(
            st.sampled_from(
                [
                    (plain, plain),
                    (plain, f'"{plain}"'),
                    (f"{plain} # [=.", f"'{plain} # [=.'"),
                    (f'{plain}"', f'"{plain}\\""'),
                    (str(self.names), str(self.names)),
                ]
            )
        )

    def pair(self, table: Path, deep: int, inline: bool) -> None:
        path = table
        for number in range(1 + self.count(1)):
            name, written = self.name()
            self.text += (self.pick([".", " . "]) if number else "") + written
            path = (*path, name)
            self.note(path)
        self.text += self.pick(GAPS) + "=" + self.pick(GAPS)
        self.value(path, deep, inline)

    def value(self, path: Path, deep: int, inline: bool) -> None:
        kind = self.count(4) if deep else 0
        if kind in (0, 1):
            self.text += self.pick(SHORT + LONG)
        elif kind == 2:
            self.text += "{" + self.pick(GAPS)
            for number in range(self.count(3)):
                self.text += ", " if number else ""
                self.pair(path, deep - 1, True)
            self.text += self.pick(GAPS) + "}"
        else:
            self.text += "[" + self.pick(BREAKS)
            entries = self.count(3)
            for number in range(entries):
                self.note((*path, number))
                self.value((*path, number), deep - 1, inline)
                last = number == entries - 1
                self.text += self.pick(BREAKS) + ("" if last and self.count(1) else ",") + self.pick(BREAKS)
            self.text += "]"

    def pairs(self, table: Path) -> None:
        for _ in range(self.count(3)):
            self.text += self.pick(["", "  "])
            self.pair(table, 3, False)
            self.text += self.pick(["\n", " # x = [\n", "\n\n"])

    def document(self) -> None:
        self.text += self.pick(["", "# begin\n", "\n"])
        self.pairs(())
        for _ in range(self.count(3)):
            name, written = self.name()
            if self.count(1):
                self.note((name,))
                self.text += f"[ {written} ]\n"
                self.pairs((name,))
                continue
            for entry in range(1 + self.count(2)):
                self.note((name,))
                self.note((name, entry))
                self.text += f"[[{written}]] # entry\n"
                self.pairs((name, entry))
                if self.count(1):
                    child, inner = self.name()
                    self.note((name, entry, child))
                    self.text += f"[{written}.{inner}]\n"
                    self.pairs((name, entry, child))


def paths(value: object, here: Path = ()) -> Iterator[Path]:
    """Everything that tomllib found."""
    if here:
        yield here
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        yield from paths(inner, (*here, name))


@settings(max_examples=200)
@given(st.data())
def test_every_name_is_found_on_the_line_on_which_it_was_written(data: st.DataObject) -> None:
    author = Author(data)
    author.document()
    found = lines(author.text)
    assert found == author.noted
    assert set(found) == set(paths(tomllib.loads(author.text)))


@settings(max_examples=50)
@given(st.data())
def test_windows_line_ends_change_nothing(data: st.DataObject) -> None:
    author = Author(data)
    author.document()
    assert lines(author.text.replace("\n", "\r\n")) == author.noted


@pytest.mark.parametrize(
    ("path", "line"),
    [(("b", "c"), 3), (("b", "c", "gone"), 3), (("b", "gone"), 2), (("gone",), 1), ((), 1)],
)
def test_what_does_not_stand_there_is_at_the_line_of_what_it_would_stand_in(path: Path, line: int) -> None:
    assert line_of(lines("a = 1\n[b]\nc = 2\n"), path) == line
