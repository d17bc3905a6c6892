"""From what stands on the command line to one deployment: what each source is, and which sources speak of the same node.

The one thing to know: sources of one node are brought together by the address that it serves on; where a file does not say it (metrics,
half a log), by the beginning of its name beside another's in the same folder (`prefill.log`, `prefill.metrics.prom`), or because only one
node has its engine and role. NAME=SOURCE says it outright.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from hermetic.check import facts, hosts, unanswered
from hermetic.check.deployment import Proxy
from hermetic.check.facts import Sheet
from hermetic.check.fetch import FetchOptions, fetch
from hermetic.check.readers import engine_files, flags, manifests, proxies, systemd
from hermetic.check.readers.reading import Reading
from hermetic.check.result import Unread
from hermetic.check.urls import address, shown_url
from hermetic.options import OptionError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MOST_FILES = 2_000  # of a folder
WHOLE = 32 * 1024**2  # bytes up to which a file is read whole; a larger one can only be a log
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)=(.+)", re.DOTALL)
_PLACE = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\]):\d{1,5}(?:/[\w./-]*)?"
)  # host:port, and a path perhaps
_SOURCES = (
    "A source is a URL (http://10.0.0.7:30000), a file (prefill.log, nginx.conf), a folder, - for standard input, or a command line in quotes "
    '("vllm serve ..."); NAME=SOURCE says which node it is of'
)
_WHOLE = frozenset({facts.START, facts.SERVER_INFO, facts.COMMAND})  # a node has one of each


@dataclass(frozen=True)
class Source:
    """`name`: whose it is, if that was said; `text`: a URL, a path, `-`, or a command line."""

    text: str
    name: str = ""

    @property
    def is_url(self) -> bool:
        return self.text.startswith(("http://", "https://"))

    @property
    def shown(self) -> str:
        """For people. Not a command line itself, nor a URL's user and query: keys stand there."""
        if self.is_url:
            shown = shown_url(self.text)
        else:
            shown = self.text if self.text == "-" or os.path.exists(self.text) else "command line"
        return printable(f"{self.name}={shown}" if self.name else shown)


@dataclass
class Collected:
    """What all sources say, by node. `files`: those of which something was taken."""

    nodes: list[Sheet] = field(default_factory=list)
    proxies: list[Proxy] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


@dataclass
class _Entry:
    """One reading's sheet on its way to a node. `name`: said by the user; `stem`: of the file that it is from; `readings`: numbers of the
    readings that it has taken: two sheets of one reading are two nodes, or the reader would have made one of them; `first`: its place among all."""

    sheet: Sheet
    name: str
    stem: str
    readings: set[int] = field(default_factory=set)
    first: int = 0

    @property
    def sure(self) -> bool:
        """Whether it is said which node this is: by name, or an address that is one machine's alone."""
        return bool(self.name) or (
            self.sheet.address is not None and not hosts.is_anywhere(self.sheet.address[0])
        )

    @property
    def is_url(self) -> bool:
        return any(source.startswith(("http://", "https://")) for source in self.sheet.sources)


def parse(words: Sequence[str]) -> list[Source]:
    """Raises OptionError for what is neither URL, file, folder nor command line."""
    if not words:
        raise OptionError(
            f"name what to check: URLs of nodes, logs, saved answers, manifests, command lines. {_SOURCES}"
        )
    return [_parse(word, number) for number, word in enumerate(words, 1)]


def _parse(word: str, number: int) -> Source:
    named = _NAMED.fullmatch(word)
    if named is not None and not os.path.exists(word) and _is_source(named[2]):
        return Source(named[2], named[1])
    if not _is_source(word):
        raise OptionError(_no_source(word, number))
    return Source(word)


def _no_source(word: str, number: int) -> str:
    """Why a word is none, and what was meant perhaps. Several words are not said again: they may hold a key."""
    name, _, rest = word.partition("=")
    if rest and os.path.exists(rest) and name.isprintable():
        return f"the name {name[:60]!r} before {rest[:200]!r} may have letters, digits and . _ - only, like node-3={rest[:200]}"
    if re.search(r"\s", word):
        return f"source {number} (of several words) is no command line of an engine, and no file or folder that is here. {_SOURCES}"
    shown, named = shown_url(word)[:200], _NAMED.fullmatch(word)
    said = named[2] if named is not None else word
    if _PLACE.fullmatch(said):
        meant = f"{named[1]}=http://{said}" if named is not None else f"http://{said}"
        return (
            f"{shown!r} is no file or folder that is here. A node is named by its URL: {meant} (or https://)"
        )
    scheme, separator, _ = said.partition("://")
    if separator:
        why = "names no host" if scheme in ("http", "https") else "is no URL that can be asked"
        return f"{shown!r} {why}: a node's URL is like http://10.0.0.7:30000"
    return f"{shown!r} is no file or folder that is here. {_SOURCES}"


def _is_source(text: str) -> bool:
    if text == "-" or os.path.exists(text):
        return True
    if text.startswith(("http://", "https://")):
        return address(text) is not None
    return " " in text and flags.looks_like("", text)


def collect(sources: Sequence[Source], options: FetchOptions) -> Collected:
    """Read everything. What cannot be read is in `unread`; nothing is raised for it. Raises OptionError for certificates."""
    urls = [source for source in sources if source.is_url]
    fetched = iter(asyncio.run(fetch([source.text for source in urls], options)) if urls else [])
    collected, entries, numbers = Collected(), list[_Entry](), itertools.count()
    for source in sources:
        readings = [(next(fetched), "")] if source.is_url else _local(source)
        for reading, stem in readings:
            number = next(numbers)
            collected.proxies += reading.proxies
            collected.unread += reading.unread
            collected.files += [reading.file] if reading.file and (reading.sheets or reading.proxies) else []
            name = source.name if len(reading.sheets) == 1 else ""  # several nodes cannot all have it
            entries += [_Entry(sheet, name, stem, {number}) for sheet in reading.sheets]
    collected.nodes = merge(entries)
    return collected


# ------------------------------------------------------------------------------------ files


def _local(source: Source) -> Iterator[tuple[Reading, str]]:
    """The readings of a path, standard input, or a command line, each with the stem that it may share with others."""
    if source.text == "-" and sys.stdin is None:
        yield Reading().failed("standard input", "is closed", damaged=True), ""
        return
    if source.text == "-":
        yield _stream("standard input", sys.stdin.buffer), ""
        return
    if not os.path.exists(source.text):
        yield flags.read("command line", printable(source.text), {}), ""
        return
    path = Path(source.text)
    if not path.is_dir():
        yield _file(path), _stem(path)
        return
    files, missed = _below(path)
    yield missed, ""
    useful = False
    for file in files:
        if systemd.is_read_with_its_unit(file):
            continue
        reading = _file(file)
        useful = useful or bool(reading.sheets or reading.proxies)
        if not (reading.sheets or reading.proxies or reading.damaged):
            for one in reading.unread:  # nobody said that all of a folder belongs here
                one.part = one.left_out = True
        yield reading, _stem(file)
    if not useful:
        yield Reading().failed(printable(str(path)), "holds nothing of a deployment that could be read"), ""


def _file(path: Path) -> Reading:
    name = printable(str(path))
    try:
        with path.open("rb") as stream:
            reading = _stream(name, stream)
            reading.file = name
            return reading
    except OSError as error:
        return Reading().failed(name, f"cannot be read: {error.strerror}", damaged=True)


def _below(path: Path) -> tuple[list[Path], Reading]:
    """All files below a folder but hidden ones, and what stands there and cannot be looked at. Raises OptionError."""
    found, missed, errors = list[Path](), Reading(), list[OSError]()
    for folder, folders, names in os.walk(path, onerror=errors.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        for file in (Path(folder, name) for name in sorted([*names, *linked]) if not name.startswith(".")):
            if file.is_file():
                found.append(file)
            else:
                missed.failed(
                    printable(str(file)),
                    "is no file (a pipe, or a link to nothing or to a folder)",
                    part=True,
                )
        if len(found) > MOST_FILES:
            raise OptionError(
                f"{path} holds more than {MOST_FILES:,} files; name those that belong to the deployment"
            )
    for error in errors:
        missed.failed(printable(str(error.filename)), f"cannot be read: {error.strerror}")
    return sorted(found), missed


def _stem(file: Path) -> str:
    """What files of one node share: the folder, and the name up to its first dot."""
    return f"{file.parent}/{file.name.partition('.')[0]}"


def _stream(name: str, stream: BinaryIO) -> Reading:
    """Of which kind it is, by what stands in it."""
    head = stream.read(WHOLE + 1)
    if len(head) > WHOLE:
        return engine_files.read_log(name, _rejoined(head, stream))
    if not head.strip():
        return Reading().failed(name, "is empty")
    for read in (engine_files.read_json, engine_files.read_metrics):
        if (reading := read(name, head)) is not None:
            return reading
    text = head.decode("utf-8", "replace")
    for kind in (systemd, manifests, proxies, flags):
        if kind.looks_like(name, text):
            return kind.read(name, text) if kind is not flags else flags.read(name, text, {})
    reading = engine_files.read_log(name, _rejoined(head, stream))
    what = None if reading.sheets or reading.damaged else _what(head)
    return reading if what is None else Reading().failed(name, what)


def _what(head: bytes) -> str | None:
    """What a file is that is none of ours, as far as its beginning shows; None for other text."""
    start = head[:4096].lstrip()
    page = unanswered.Page(200, start)
    if page.is_html:
        return f"is an HTML page{page.title}, not what an engine answers: a login or an error perhaps"
    if start[:1] in b"{[":
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            msgspec.json.decode(head, type=msgspec.Raw)
            return "is JSON, and of no engine that is known here"
    return "is no text, and nothing that is known here" if b"\0" in start else None


def _rejoined(head: bytes, rest: BinaryIO) -> BinaryIO:
    return io.BufferedReader(_Rejoined(head, rest))


class _Rejoined(io.RawIOBase):
    """A stream of which the beginning has been read already, in one pass."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head, self._rest = io.BytesIO(head), rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self._head.read(len(view)) or self._rest.read(len(view))
        view[: len(data)] = data
        return len(data)


# ------------------------------------------------------------------------------------ nodes


def merge(entries: Sequence[_Entry]) -> list[Sheet]:
    """One sheet for each node, in the order in which nodes were first named."""
    for place, entry in enumerate(entries):
        entry.first = place
    nodes: list[_Entry] = []
    waiting = [entry for entry in entries if not entry.name and entry.sheet.address is None]
    placed = [entry for entry in entries if entry.name or entry.sheet.address is not None]
    for entry in sorted(placed, key=lambda one: not one.sure):
        _join(nodes, entry, _same_node(_others(nodes, entry), entry))
    for entry in waiting:
        _join(nodes, entry, _likely_node(_others(nodes, entry), entry))
    nodes.sort(key=lambda node: node.first)
    for number, node in enumerate(nodes, 1):
        node.sheet.name = node.name or _named(node) or f"node {number}"
    _tell_apart([node.sheet for node in nodes])
    return [node.sheet for node in nodes]


def _others(nodes: Iterable[_Entry], entry: _Entry) -> list[_Entry]:
    """Those of which no sheet is of the same reading."""
    return [node for node in nodes if node.readings.isdisjoint(entry.readings)]


def _join(nodes: list[_Entry], entry: _Entry, node: _Entry | None) -> None:
    if node is None:
        nodes.append(entry)
        return
    sure = node.sure
    node.sheet.take(entry.sheet)
    if not sure and entry.sheet.address is not None:
        node.sheet.address = entry.sheet.address
    node.readings |= entry.readings
    node.first = min(node.first, entry.first)
    node.name, node.stem = node.name or entry.name, node.stem or entry.stem


def _same_node(nodes: Sequence[_Entry], entry: _Entry) -> _Entry | None:
    """By its name or address. An address that every machine has (127.0.0.1, 0.0.0.0) tells only where one node alone may be meant."""
    named = next((node for node in nodes if entry.name and node.name == entry.name), None)
    if named is not None:
        return named
    at_it = [
        node
        for node in nodes
        if not (entry.name and node.name)
        and _one_address(node.sheet.address, entry.sheet.address)
        and _one_role(node.sheet, entry.sheet)
    ]
    if entry.sure:
        surely = next((node for node in at_it if node.sheet.address == entry.sheet.address), None)
        if surely is not None:
            return surely
    beside = [node for node in at_it if _called_alike(node, entry)]
    found = beside or [node for node in at_it if not _had_it_already(node, entry)]
    return found[0] if len(found) == 1 else None


def _one_address(ours: tuple[str, int] | None, theirs: tuple[str, int] | None) -> bool:
    """A file says 127.0.0.1 or 0.0.0.0 where a URL says the host's name: then the port decides."""
    if ours is None or theirs is None or ours[1] != theirs[1]:
        return False
    return ours[0] == theirs[0] or hosts.is_anywhere(ours[0]) or hosts.is_anywhere(theirs[0])


def _called_alike(node: _Entry, entry: _Entry) -> bool:
    """`prefill.log` and `prefill.info.json`, or two parts of one unit."""
    ours, theirs = node.sheet.name, entry.sheet.name
    return bool(entry.stem and node.stem == entry.stem) or bool(ours and ours == theirs)


def _had_it_already(node: _Entry, entry: _Entry) -> bool:
    """Whether both have what a node has one of, as two start-up logs of two machines have. What a URL answered may be in a file too."""
    both = _WHOLE & node.sheet.read & entry.sheet.read
    return bool(both - {facts.SERVER_INFO} if node.is_url or entry.is_url else both)


def _likely_node(nodes: Sequence[_Entry], entry: _Entry) -> _Entry | None:
    beside = [node for node in nodes if entry.stem and node.stem == entry.stem]
    if len(beside) == 1:
        return beside[0]
    called = [node for node in nodes if entry.sheet.name and node.sheet.name == entry.sheet.name]
    if len(called) == 1:
        return called[0]
    alike = [node for node in nodes if _agree(node.sheet, entry.sheet)]
    return alike[0] if len(alike) == 1 else None


def _agree(node: Sheet, other: Sheet) -> bool:
    """Both say the same engine, and the same role if either says one."""
    engines: set[str] = {*node.values(facts.ENGINE)} & {*other.values(facts.ENGINE)}
    return bool(engines) and _one_role(node, other)


def _one_role(node: Sheet, other: Sheet) -> bool:
    """Nobody says that it is another."""
    ours, theirs = node.values(facts.ROLE), other.values(facts.ROLE)
    return not ours or not theirs or not set(ours).isdisjoint(theirs)


def _named(entry: _Entry) -> str:
    """By its role and its address, or what its manifest calls it; else by the first file that speaks of it."""
    sheet = entry.sheet
    role = next(iter(sheet.values(facts.ROLE)), "")
    where = sheet.name or (f"{sheet.address[0]}:{sheet.address[1]}" if sheet.address else "")
    said = role in re.split(r"[^a-z]+", where.lower())  # a service's own name may say it
    if role in ("prefill", "decode") and not said:
        return f"{role} {where}".strip()
    return where or (Path(sheet.sources[0]).name if entry.stem else role)


def _tell_apart(sheets: Sequence[Sheet]) -> None:
    """No two nodes with one name: rules and reports speak of them by it."""
    taken: dict[str, int] = {}
    for sheet in sheets:
        number = taken[sheet.name] = taken.get(sheet.name, 0) + 1
        if number > 1:
            sheet.name = f"{sheet.name} ({number})"


def printable(name: str) -> str:
    """A file's name may have bytes that are no text, which no report could be written with."""
    return name.encode("utf-8", "backslashreplace").decode()


__all__ = ["Collected", "Source", "collect", "merge", "parse", "printable"]
