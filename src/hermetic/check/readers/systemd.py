"""systemd units and their drop-ins, also as `systemctl cat` prints them one behind the other.

The one thing to know: a unit is read as systemd reads it, without a shell. Specifiers that depend on the machine (%H, %h) and variables that stand in a
file that is not here are not known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from hermetic.check.readers import flags
from hermetic.check.readers.beside import Files, beside, matching
from hermetic.check.readers.quoting import quoted_words
from hermetic.check.readers.reading import Reading
from hermetic.check.readers.shell import UNKNOWN, Filler

MOST = 1024**2  # characters of a unit

_SECTION = re.compile(r"\[([A-Za-z-]+)\]\s*$")
_LOOKS = re.compile(r"^\[(?:Unit|Service|Install)\]\s*$", re.MULTILINE)
_SETTING = re.compile(r"^[ \t]*(?:ExecStart|Environment|EnvironmentFile)[ \t]*=", re.MULTILINE)
_CAT = re.compile(r"#\s+(/\S+\.(?:service|conf))\s*$")
_VARIABLE = re.compile(r"\$\$|\$\{([A-Za-z_]\w*)\}")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "s": " "}


@dataclass
class _Unit:
    """What the files of a unit come to: a setting without a value takes back what stood before."""

    name: str
    starts: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)


def looks_like(name: str, text: str) -> bool:
    """Whether this is a unit or a drop-in of a service."""
    head = text[:MOST]
    first = next((line for line in head.splitlines() if line.strip() and line.lstrip()[0] not in "#;"), "")
    return (
        _SECTION.match(first.strip()) is not None
        and _LOOKS.search(head) is not None
        and _SETTING.search(head) is not None
    )


def read(source: str, text: str) -> Reading:
    """A sheet for each engine that the unit starts. A drop-in that only sets variables gives a sheet with what they say."""
    reading = Reading()
    if len(text) > MOST:
        return reading.failed(source, f"has more than {MOST:,} characters, so it is no unit")
    dropped, unread = _drop_ins(source)
    unit = _unit(source, "\n".join([text, *dropped]))
    files = beside(source)
    variables, missing = _variables(unit, files)
    for what in unread:
        reading.failed(source, what, damaged=True)
    runs = [
        run
        for start in unit.starts
        for run in flags.runs_of(_words(start, unit, variables), variables, complete=not missing)
    ]
    for what in missing if runs or unit.files else ():
        reading.failed(source, what, part=True)
    for number, run in enumerate(runs, 1):
        place = source if len(runs) == 1 else f"{source}, command {number}"
        flags.read_run(reading, run, place, unit.name if len(runs) == 1 else f"{unit.name} {number}", files)
    if (
        not runs
        and flags.read_environment(reading, variables, source, unit.name) is None
        and not reading.unread
    ):
        reading.failed(source, "starts no engine or router that is known here")
    return reading


def _drop_ins(source: str) -> tuple[list[str], list[str]]:
    """The texts of the unit's drop-ins beside it, and what is said of those that cannot be read: a unit that they change is not what runs."""
    path = PurePosixPath(source.replace("\\", "/"))
    names = [path.name] if path.suffix == ".service" else []
    if names and "@" in path.stem:  # of all instances of a template as well
        names.append(f"{path.stem.partition('@')[0]}@.service")
    found = sorted(
        {
            name: text for one in dict.fromkeys(names) for name, text in matching(source, f"{one}.d/*.conf")
        }.items(),
        key=lambda one: PurePosixPath(one[0]).name,
    )
    missing = [
        f"its drop-in {name} cannot be read, or is too large, so what runs is not known"
        for name, text in found
        if text is None
    ]
    return [text for _, text in found if text is not None], missing


def is_read_with_its_unit(path: Path) -> bool:
    """Whether this is a drop-in of a unit that stands beside its folder."""
    folder = path.parent
    if path.suffix != ".conf" or not folder.name.endswith(".service.d"):
        return False
    unit = folder.name.removesuffix(".d")
    units = (
        folder.parent.glob(f"{unit.partition('@')[0]}@*.service")
        if unit.endswith("@.service")
        else [folder.parent / unit]
    )
    return any(one.is_file() for one in units)


def _unit(source: str, text: str) -> _Unit:
    path = PurePosixPath(source.replace("\\", "/"))
    folder = path.parent.name
    named = folder.removesuffix(".d") if folder.endswith(".service.d") else path.name
    unit = _Unit(named.removesuffix(".service"))
    section = ""
    for line in _joined(text):
        if shown := _CAT.match(line):
            shown_path = PurePosixPath(shown[1])
            if shown_path.suffix == ".service":
                unit.name = shown_path.stem
        elif found := _SECTION.match(line):
            section = found[1]
        elif section == "Service" and not line.startswith(("#", ";")):
            key, equals, value = line.partition("=")
            if equals:
                _set(unit, key.strip(), value.strip())
    return unit


def _joined(text: str) -> list[str]:
    """Lines, those that end in a backslash with the next; comments between them are skipped."""
    found: list[str] = []
    kept: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        comment = line.startswith(("#", ";"))
        if kept and comment:
            continue
        if line.endswith("\\") and not comment:
            kept.append(line[:-1])
            continue
        if kept or line:
            found.append(" ".join([*kept, line]))
        kept = []
    return [*found, " ".join(kept)] if kept else found


def _set(unit: _Unit, key: str, value: str) -> None:
    if key == "ExecStart":
        unit.starts = [*unit.starts, value] if value else []
    elif key == "Environment":
        if not value:
            unit.variables.clear()
        for word in _split(_specified(value, unit.name)):
            name, equals, content = word.partition("=")
            if equals and _NAME.fullmatch(name):
                unit.variables[name] = content
    elif key == "EnvironmentFile":
        unit.files = [*unit.files, value] if value else []
    elif key in ("PassEnvironment", "UnsetEnvironment"):
        unit.passed += value.split()


def _variables(unit: _Unit, files: Files) -> tuple[dict[str, str], list[str]]:
    """(what is set, what else may set variables and is not read). A file's value counts before the unit's own."""
    variables, missing = dict(unit.variables), list[str]()
    for name in unit.files:
        path = _specified(name.removeprefix("-"), unit.name)
        text = files(path) if UNKNOWN not in path else None
        if text is None:
            missing.append(f"EnvironmentFile {name.removeprefix('-')} is not read: it is not here")
        else:
            variables |= _file(text)
    for name in unit.passed:
        variables[name.partition("=")[0]] = UNKNOWN
    return variables, missing


def _file(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in _joined(text):
        name, equals, value = line.partition("=")
        if equals and _NAME.fullmatch(name.strip()) and not line.startswith(("#", ";")):
            found[name.strip()] = "".join(_split(value)) if value[:1] in "'\"" else value.strip()
    return found


def _specified(text: str, name: str) -> str:
    """Specifiers that the unit's own name tells; others are not known."""
    prefix, _, instance = name.partition("@")
    known = {"%": "%", "n": f"{name}.service", "N": name, "p": prefix}
    if instance:
        known |= {"i": instance, "j": prefix.rpartition("-")[2]}
        known["I"] = instance.replace("-", "/") if "\\" not in instance else UNKNOWN
    return re.sub(r"%(.)", lambda match: known.get(match[1], UNKNOWN), text, flags=re.DOTALL)


def _words(start: str, unit: _Unit, variables: Mapping[str, str]) -> list[str]:
    """The words of an ExecStart with its variables: ${NAME} inside a word, $NAME alone as the words that it holds."""
    found: list[str] = []
    filler = Filler()
    for word in _split(_specified(start.lstrip("@-:+!|"), unit.name)):
        alone = re.fullmatch(r"\$([A-Za-z_]\w*)", word)
        if alone is not None:
            value = filler.bounded(variables.get(alone[1], UNKNOWN))
            found += _split(value) if UNKNOWN not in value else [UNKNOWN]
            continue
        found.append(_filled(word, variables, filler))
    return found


def _filled(word: str, variables: Mapping[str, str], filler: Filler) -> str:
    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], UNKNOWN)

    return filler.fill(_VARIABLE, one, word)


def _split(text: str) -> list[str]:
    return quoted_words(text, escapes=_ESCAPES)


__all__ = ["is_read_with_its_unit", "looks_like", "read"]
