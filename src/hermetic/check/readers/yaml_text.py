"""YAML and JSON as plain texts, lists and mappings, with bounds on size and depth.

The one thing to know: every scalar stays the text that stands in the file (`yes`, `30000:30000`, `0.5`), since what a manifest means by it is
for its reader to say; only an empty value and `null` become None. Aliases are counted as what they stand for, so that a few lines of
them cannot grow into millions of nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import yaml

MOST_BYTES = 4 * 1024**2
MOST_NODES = 200_000  # of a file, aliases counted as what they stand for
DEEPEST = 64

Node = str | None | list["Node"] | dict[str, "Node"]

_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
_NULLS = ("", "~", "null", "Null", "NULL")


class Located(dict[str, Node]):
    """A mapping, and the line that it begins on, from 1; 0 where that is not known (JSON)."""

    def __init__(self, line: int) -> None:
        super().__init__()
        self.line = line


class NotYaml(ValueError):
    """Why a text cannot be read, in words for people."""


@dataclass
class _Open:
    """A list or mapping that is being read. `size`: its nodes so far."""

    value: list[Node] | dict[str, Node]
    anchor: str | None
    size: int = 1
    key: str | None = None
    merged: list[Node] = field(default_factory=list)  # what stands under `<<`


def documents(text: str) -> list[Node]:
    """The documents of a file. Raises NotYaml."""
    if len(text) > MOST_BYTES:
        raise NotYaml(f"has more than {MOST_BYTES // 1024**2} MiB, which is no manifest")
    if text.lstrip().startswith(("{", "[")):
        try:
            return [_texts(msgspec.json.decode(text.encode("utf-8", "replace")))]
        except (msgspec.DecodeError, RecursionError):
            pass  # YAML in its flow form, which is no JSON, looks like this too
    try:
        return _documents(text)
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        hint = (
            "; it looks like a template: render it first (helm template), and check that"
            if "{{" in text
            else ""
        )
        raise NotYaml(f"is no YAML: {error.problem or error.context}{line}{hint}") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, NotYaml):
            raise
        raise NotYaml(
            f"is no YAML: {str(error).splitlines()[0][:200] if str(error) else 'odd characters'}"
        ) from None


def mapping(node: object) -> dict[str, Node]:
    """The node if it is a mapping, else an empty one."""
    return node if isinstance(node, dict) else {}


def line_of(node: object) -> int:
    """The line on which a mapping begins, or 0."""
    return node.line if isinstance(node, Located) else 0


def place(source: str, node: object) -> str:
    """The source, and the line in it on which the mapping begins, where that is known."""
    line = line_of(node)
    return f"{source}, line {line}" if line else source


def sequence(node: object) -> list[Node]:
    """The node if it is a list, else an empty one."""
    return node if isinstance(node, list) else []


def text_of(node: object) -> str:
    """The node if it is a text, else an empty one."""
    return node if isinstance(node, str) else ""


def under(node: object, *path: str) -> Node:
    """What stands below a node, or None."""
    for key in path[:-1]:
        node = mapping(node).get(key)
    return mapping(node).get(path[-1])


def _documents(text: str) -> list[Node]:
    found: list[Node] = []
    stack: list[_Open] = []
    anchors: dict[str, tuple[Node, int]] = {}
    total = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.DocumentStartEvent):
            anchors.clear()
        elif isinstance(event, yaml.ScalarEvent):
            plain = event.style in (None, "")
            value: Node = None if plain and event.value in _NULLS else event.value
            total += 1
            if event.anchor:
                anchors[event.anchor] = value, 1
            _put(found, stack, value, 1, event.value if plain and event.value == "<<" else None)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchors:
                raise NotYaml(
                    f"has an alias *{event.anchor} of something that is not there, or of what holds it"
                )
            value, size = anchors[event.anchor]
            total += size
            _put(found, stack, value, size)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            total += 1
            if len(stack) >= DEEPEST:
                raise NotYaml(f"is nested more than {DEEPEST} deep")
            anchors.pop(event.anchor or "", None)
            line = event.start_mark.line + 1
            stack.append(
                _Open(Located(line) if isinstance(event, yaml.MappingStartEvent) else [], event.anchor)
            )
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            closed = stack.pop()
            value = _merge(closed)
            if closed.anchor:
                anchors[closed.anchor] = value, closed.size
            _put(found, stack, value, closed.size)
        if total > MOST_NODES:
            raise NotYaml(f"has more than {MOST_NODES:,} values, or stands for so many by its aliases")
    return found


def _put(found: list[Node], stack: list[_Open], value: Node, size: int, merge: str | None = None) -> None:
    """Into the innermost list or mapping, or as a document."""
    if not stack:
        found.append(value)
        return
    inner = stack[-1]
    inner.size += size
    if isinstance(inner.value, list):
        inner.value.append(value)
    elif inner.key is None:
        if isinstance(value, list | dict):
            raise NotYaml("has a key that is no text")
        inner.key = "<<\0" if merge else value or ""
    elif inner.key == "<<\0":
        inner.merged += value if isinstance(value, list) else [value]
        inner.key = None
    else:
        inner.value[inner.key] = value
        inner.key = None


def _merge(closed: _Open) -> Node:
    """`<<`: what the mapping does not say itself is taken from those that it names, the first first."""
    if not isinstance(closed.value, dict):
        return closed.value
    for other in closed.merged:
        for key, value in mapping(other).items():
            closed.value.setdefault(key, value)
    return closed.value


def _texts(value: object) -> Node:
    """JSON values as YAML writes them."""
    stack: list[tuple[object, int]] = [(value, 0)]
    count = 0
    while stack:  # bounds first, without recursion
        one, depth = stack.pop()
        count += 1
        if count > MOST_NODES or (depth >= DEEPEST and isinstance(one, dict | list)):
            raise NotYaml("is too large or nested too deep to be a manifest")
        if isinstance(one, dict):
            stack += [(inner, depth + 1) for inner in one.values()]
        elif isinstance(one, list):
            stack += [(inner, depth + 1) for inner in one]
    return _text(value)


def _text(value: object) -> Node:
    if isinstance(value, dict):
        return {str(key): _text(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_text(inner) for inner in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    return None if value is None else str(value)


__all__ = [
    "Located",
    "Node",
    "NotYaml",
    "documents",
    "line_of",
    "mapping",
    "place",
    "sequence",
    "text_of",
    "under",
]
