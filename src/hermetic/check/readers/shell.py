"""A shell's commands as words, as far as a script can be read without running it.

The one thing to know: what only running it would tell (a variable that nobody gave, `$(...)`, what is set inside an `if`) stands in a word
as UNKNOWN. A reader takes no value from such a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

UNKNOWN = "\0"
SECRET = f"{UNKNOWN}secret"  # a secret's value: not known, and not empty
LONGEST = 64 * 1024  # characters of a variable that are kept: scripts can double them line by line
MOST_VARIABLES = 2_000
MOST_COMMANDS = 20_000
MOST_FILLED = (
    1024**2
)  # characters of values that are put into one file's texts: a short name may stand for a long one

_BLANK = " \t"
_ENDS_WORD = " \t\n;&|()<>"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_REDIRECT = re.compile(r"(?:\d*|&)(?:<<<|<<-?|>>|>\||[<>]&|<>|[<>])|&>>?")
_OPENS = ("if", "while", "until", "for", "case", "select", "{")
_CLOSES = {"fi": "if", "done": "loop", "esac": "case", "}": "{"}
_CONTINUES = ("then", "else", "elif", "do", "time", "!")
_DECLARES = ("export", "declare", "typeset", "readonly", "local")
_TESTS = ("[", "[[", "test", "!")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "0": ""}


class Filler:
    """Puts values into the texts of one file. What would make them too long stays UNKNOWN."""

    def __init__(self) -> None:
        self.left = MOST_FILLED

    def fill(self, pattern: re.Pattern[str], value_of: Callable[[re.Match[str]], str], text: str) -> str:
        """The text with what stands for each match."""
        if pattern.search(text) is None:
            return text
        self.left -= len(text)  # an alias may stand for it very often
        if self.left < 0:
            return UNKNOWN
        return pattern.sub(lambda match: self.bounded(value_of(match)), text)

    def bounded(self, value: str) -> str:
        self.left -= len(value)
        return value if self.left >= 0 else UNKNOWN


@dataclass(frozen=True)
class Command:
    """One simple command. `environment`: what it is given beside what the shell itself was given, or anew."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class _Piece:
    """Part of a word: text as it stands, or what stands behind a `$`."""

    text: str
    variable: bool
    quoted: bool


@dataclass(frozen=True)
class _Word:
    pieces: tuple[_Piece, ...]

    @property
    def plain(self) -> str:
        """The word if it stands there without quotes and variables: only then can it be a word of the shell's own."""
        if len(self.pieces) == 1 and not self.pieces[0].variable and not self.pieces[0].quoted:
            return self.pieces[0].text
        return ""


@dataclass
class _State:
    """What is known of variables. `open`: the constructs that are open, the innermost last."""

    variables: dict[str, str]
    exported: set[str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    open: list[str] = field(default_factory=list)
    filler: Filler = field(default_factory=Filler)
    doubtful: bool = False  # the command runs only if one before it ended so or so
    environment: dict[str, str] | None = None  # what is exported, until something is set


def commands(text: str, environment: Mapping[str, str]) -> list[Command]:
    """All simple commands of a script, in the order in which they stand there, also those in branches and functions."""
    state = _State(dict(environment), set(environment))
    found: list[Command] = []
    for words in _simple(text.replace("\r\n", "\n"), state):
        command = _run(words, state)
        if command is not None:
            found.append(command)
        if len(found) >= MOST_COMMANDS:
            break
    return found


def words(text: str, environment: Mapping[str, str]) -> list[str]:
    """The words of one line for something that is no shell, as compose splits a command: no operators, no variables."""
    scanner = _Scanner(text.replace("\n", " "), plain=True)
    state = _State(dict(environment), set())
    found: list[str] = []
    while (word := scanner.word()) is not None:
        found += _expand(word, state)
    return found


# ------------------------------------------------------------------------------------ scanning


class _Scanner:
    """Cuts text into words and operators. `plain`: operators, comments and `$` are ordinary characters."""

    def __init__(self, text: str, plain: bool = False) -> None:
        self.text, self.at, self._plain = text, 0, plain
        self._documents: list[
            tuple[str, bool]
        ] = []  # here-documents: what ends each, and whether tabs are stripped

    def blank(self) -> None:
        """Skip blanks, joined lines and, at the beginning of a word, a comment."""
        text, size = self.text, len(self.text)
        while self.at < size:
            if text[self.at] in _BLANK:
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif text[self.at] == "#" and not self._plain:
                end = text.find("\n", self.at)
                self.at = size if end < 0 else end
            else:
                return

    def operator(self) -> str:
        """The operator that stands here, taken, or empty. Redirections are taken with their file."""
        text = self.text
        if found := _REDIRECT.match(text, self.at):
            self.at = found.end()
            if found[0].endswith(("<<", "<<-")):
                self._here_document(strip=found[0].endswith("-"))
            else:
                self.blank()
                self.word()
            return ">"
        for operator in ("&&", "||", ";;", "\n", ";", "&", "|", "(", ")"):
            if text.startswith(operator, self.at):
                self.at += len(operator)
                if operator == "\n":
                    self._skip_documents()
                return operator
        return ""

    def _here_document(self, strip: bool) -> None:
        """Note a here-document: its lines, from the next one on, are input and no commands."""
        self.blank()
        word = self.word()
        if word is not None:
            self._documents.append(("".join(piece.text for piece in word.pieces), strip))

    def _skip_documents(self) -> None:
        """At the beginning of a line: step over the here-documents that the line before it began."""
        for end, strip in self._documents:
            while self.at < len(self.text):
                line_end = self.text.find("\n", self.at)
                line_end = len(self.text) if line_end < 0 else line_end
                line = self.text[self.at : line_end]
                self.at = line_end + 1
                if (line.lstrip("\t") if strip else line) == end:
                    break
        self._documents.clear()

    def word(self) -> _Word | None:
        """The word that begins here after blanks, or None."""
        self.blank()
        text, size = self.text, len(self.text)
        pieces: list[_Piece] = []
        plain: list[str] = []

        def note(piece: _Piece | None = None) -> None:
            if plain:
                pieces.append(_Piece("".join(plain), False, False))
                plain.clear()
            if piece is not None:
                pieces.append(piece)

        while self.at < size:
            char = text[self.at]
            if char in (_BLANK if self._plain else _ENDS_WORD):
                break
            if char == "\\":
                follows = text[self.at + 1 : self.at + 2]
                self.at += 2
                if follows != "\n":
                    note(_Piece(follows, False, True))
            elif char == "'":
                end = text.find("'", self.at + 1)
                end = size if end < 0 else end
                note(_Piece(text[self.at + 1 : end], False, True))
                self.at = end + 1
            elif char == '"':
                self.at += 1
                note()
                pieces += self._double()
            elif char == "$" and not self._plain:
                note(self._dollar(quoted=False))
            elif char == "`" and not self._plain:
                self._skip_backquotes()
                note(_Piece(UNKNOWN, False, False))
            else:
                plain.append(char)
                self.at += 1
        note()
        return _Word(tuple(pieces)) if pieces else None

    def _double(self) -> list[_Piece]:
        """The rest of a text in double quotes."""
        text, size = self.text, len(self.text)
        pieces, plain = [_Piece("", False, True)], list[str]()

        def note(piece: _Piece | None = None) -> None:
            if plain:
                pieces.append(_Piece("".join(plain), False, True))
                plain.clear()
            if piece is not None:
                pieces.append(piece)

        while self.at < size and text[self.at] != '"':
            char = text[self.at]
            if char == "\\" and text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                if text[self.at + 1] != "\n":
                    plain.append(text[self.at + 1])
                self.at += 2
            elif char == "$" and not self._plain:
                note(self._dollar(quoted=True))
            elif char == "`" and not self._plain:
                self._skip_backquotes()
                note(_Piece(UNKNOWN, False, True))
            else:
                plain.append(char)
                self.at += 1
        self.at += 1
        note()
        return pieces

    def _dollar(self, quoted: bool) -> _Piece:
        text = self.text
        follows = text[self.at + 1 : self.at + 2]
        if follows == "(":
            self._skip_balanced("(", ")")
            return _Piece(UNKNOWN, False, quoted)
        if follows == "{":
            begin = self.at + 2
            self._skip_balanced("{", "}")
            return _Piece(text[begin : self.at - 1], True, quoted)
        if follows == "'" and not quoted:
            return self._ansi()
        name = _NAME.match(text, self.at + 1)
        if name is not None:
            self.at = name.end()
            return _Piece(name[0], True, quoted)
        if follows and follows in "0123456789@*#?$!-_":
            self.at += 2
            return _Piece(follows, True, quoted)
        self.at += 1
        return _Piece("$", False, True)

    def _ansi(self) -> _Piece:
        """$'...': a backslash stands before special characters."""
        self.at += 2
        text, size = self.text, len(self.text)
        plain: list[str] = []
        while self.at < size and text[self.at] != "'":
            if text[self.at] == "\\":
                follows = text[self.at + 1 : self.at + 2]
                plain.append(_ESCAPES.get(follows, follows))
                self.at += 2
            else:
                plain.append(text[self.at])
                self.at += 1
        self.at += 1
        return _Piece("".join(plain), False, True)

    def _skip_balanced(self, opens: str, closes: str) -> None:
        """From `$(` or `${` to behind its end, counting what is nested; quotes are stepped over."""
        text, size = self.text, len(self.text)
        depth, self.at = 0, self.at + 1
        while self.at < size:
            char = text[self.at]
            self.at += 1
            if char == opens:
                depth += 1
            elif char == closes:
                depth -= 1
                if depth == 0:
                    return
            elif char == "\\":
                self.at += 1
            elif char == "'" and opens == "(":
                end = text.find("'", self.at)
                self.at = size if end < 0 else end + 1

    def _skip_backquotes(self) -> None:
        end = self.text.find("`", self.at + 1)
        self.at = len(self.text) if end < 0 else end + 1


def _simple(text: str, state: _State) -> Iterator[list[_Word | list[_Word]]]:
    """Simple commands. A list among the words: what an array is set to. `state` is told of constructs and chains."""
    scanner = _Scanner(text)
    line: list[_Word | list[_Word]] = []
    while True:
        scanner.blank()
        if scanner.at >= len(scanner.text):
            break
        glued = scanner.at > 0 and scanner.text[scanner.at - 1] == "="
        operator = scanner.operator()
        if operator == "(" and glued and line:
            line.append(_array(scanner))
        elif operator == ">":
            continue
        elif operator:
            if line:
                yield line
            tested = bool(line) and isinstance(line[0], _Word) and line[0].plain in _TESTS
            state.doubtful = operator == "||" or (operator == "&&" and (state.doubtful or tested))
            line = []
            if operator == "(":
                state.open.append("(")
            elif operator == ")" and state.open[-1:] == ["("]:
                state.open.pop()
        else:
            word = scanner.word()
            if word is None:
                scanner.at += 1  # nothing of a shell: step over it
                continue
            if not line and _keyword(word.plain, state):
                continue
            line.append(word)
    if line:
        yield line


def _array(scanner: _Scanner) -> list[_Word]:
    """The words between the brackets of `NAME=(...)`."""
    found: list[_Word] = []
    while scanner.at < len(scanner.text):
        scanner.blank()
        if scanner.text[scanner.at : scanner.at + 1] == ")":
            scanner.at += 1
            break
        word = scanner.word()
        if word is not None:
            found.append(word)
        else:
            scanner.at += 1
    return found


def _keyword(plain: str, state: _State) -> bool:
    """Whether a word in a command's place is the shell's own, and a command may follow it."""
    if plain in _CLOSES:
        wanted = _CLOSES[plain]
        loops = ("while", "until", "for", "select")
        if state.open and (state.open[-1] == wanted or (wanted == "loop" and state.open[-1] in loops)):
            state.open.pop()
        return True
    if plain in _OPENS:
        state.open.append(plain)
        return plain not in ("for", "case", "select")
    return plain in _CONTINUES


# ------------------------------------------------------------------------------------ values


def _run(line: list[_Word | list[_Word]], state: _State) -> Command | None:
    """Note what a simple command sets; the command itself if there is one."""
    own: dict[str, str] = {}
    at = 0
    while at < len(line):
        word = line[at]
        name = _assigned(word)
        if name is None:
            break
        follows = line[at + 1] if at + 1 < len(line) else None
        if isinstance(follows, list):
            _set_array(name, follows, state)
            at += 1
        else:
            own[name[1]] = _value(word, name, state)
        at += 1
    rest = [word for word in line[at:] if isinstance(word, _Word)]
    if not rest:
        for variable, value in own.items():
            _keep(variable, _sure(value, state), state)
        return None
    if rest[0].plain in ("for", "select") and len(rest) > 1:
        _keep(rest[1].plain, UNKNOWN, state)
        return None
    if rest[0].plain in _DECLARES:
        _declare(rest, state)
        return None
    if rest[0].plain in ("unset", "read"):
        for word in rest[1:]:
            _keep(word.plain, UNKNOWN, state)
        return None
    words = [one for word in rest for one in _expand(word, state)]
    if not words:
        return None
    if state.environment is None:
        state.environment = {
            name: state.variables[name] for name in state.exported if name in state.variables
        }
    return Command(tuple(words), state.environment | own if own else state.environment)


def _declare(rest: list[_Word], state: _State) -> None:
    exports = rest[0].plain == "export" or any(word.plain.startswith("-x") for word in rest[1:])
    for word in rest[1:]:
        name = _assigned(word)
        if name is not None:
            _keep(name[1], _sure(_value(word, name, state), state), state)
        variable = name[1] if name is not None else word.plain
        if exports and variable and len(state.exported) < MOST_VARIABLES:
            state.exported.add(variable)
            state.environment = None


def _assigned(word: _Word | list[_Word]) -> re.Match[str] | None:
    if isinstance(word, list) or not word.pieces or word.pieces[0].variable or word.pieces[0].quoted:
        return None
    return _ASSIGNED.match(word.pieces[0].text)


def _value(word: _Word | list[_Word], name: re.Match[str], state: _State) -> str:
    assert isinstance(word, _Word)
    first = word.pieces[0]
    pieces = (_Piece(first.text[name.end() :], False, True), *word.pieces[1:])
    value = "".join(_piece(piece, state) for piece in pieces)
    return state.variables.get(name[1], UNKNOWN) + value if name[2] else value


def _keep(name: str, value: str, state: _State) -> None:
    if name in state.variables or len(state.variables) < MOST_VARIABLES:
        state.variables[name] = value if len(value) <= LONGEST else UNKNOWN
        state.environment = None


def _sure(value: str, state: _State) -> str:
    return UNKNOWN if state.open or state.doubtful else value


def _set_array(name: re.Match[str], given: list[_Word], state: _State) -> None:
    values = [one for word in given for one in _expand(word, state)]
    if name[2]:
        values = state.arrays.get(name[1], [UNKNOWN]) + values
    if state.open or state.doubtful or len(values) > MOST_VARIABLES:
        values = [UNKNOWN]
    if name[1] in state.arrays or len(state.arrays) < MOST_VARIABLES:
        state.arrays[name[1]] = values


def _expand(word: _Word, state: _State) -> list[str]:
    """The words that a word becomes: one, none, or several where a variable without quotes holds blanks."""
    done: list[str] = []
    current: list[str] = []
    begun = False
    for piece in word.pieces:
        if piece.variable and (array := _array_of(piece, state)) is not None:
            for number, value in enumerate(array):
                if number and begun:
                    done.append("".join(current))
                    current.clear()
                current.append(value)
                begun = True
            continue
        value = _piece(piece, state)
        if not piece.variable or piece.quoted or UNKNOWN in value:
            current.append(value)
            begun = begun or bool(value) or piece.quoted
            continue
        parts = value.split()
        if value[:1].isspace() and begun:
            done.append("".join(current))
            current, begun = [], False
        for number, part in enumerate(parts):
            if number and begun:
                done.append("".join(current))
                current = []
            current.append(part)
            begun = True
        if value[-1:].isspace() and begun:
            done.append("".join(current))
            current, begun = [], False
    if begun:
        done.append("".join(current))
    return done


def _array_of(piece: _Piece, state: _State) -> list[str] | None:
    found = re.fullmatch(r"([A-Za-z_]\w*)\[[@*]\]", piece.text)
    if found is None:
        return None
    values = state.arrays.get(found[1], [UNKNOWN])
    state.filler.left -= sum(len(value) + 1 for value in values)
    return values if state.filler.left >= 0 else [UNKNOWN]


def _piece(piece: _Piece, state: _State) -> str:
    """The text of a piece. A value that was not given is UNKNOWN, also where a default stands beside it: nobody says
    that the variable is not set where it will run."""
    return state.filler.bounded(_held(piece, state)) if piece.variable else piece.text


def _held(piece: _Piece, state: _State) -> str:
    name = _NAME.match(piece.text)
    if name is None or state.variables.get(name[0]) is None:
        return UNKNOWN
    value, rest = state.variables[name[0]], piece.text[name.end() :]
    if not rest:
        return value
    if rest.startswith((":-", ":=", ":?")):
        return value or (rest[2:] if rest[1] in "-=" and "$" not in rest else UNKNOWN)
    return value if rest[0] in "-=?" else UNKNOWN


__all__ = ["UNKNOWN", "Command", "Filler", "commands", "words"]
