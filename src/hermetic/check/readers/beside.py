"""Files that a configuration names: read where they lie beside it, else noted as not read.

The one thing to know: a path that another machine wrote is not looked up here. A name is taken from the folder of the file that names it;
an absolute path only where both lie in the same tree, so that a unit in /etc finds its file in /etc.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

MOST = 1024**2  # bytes of a file that is read so
MOST_FILES = 200  # that one pattern may stand for

Files = Callable[[str], str | None]


def beside(source: str) -> Files:
    """Reads files that the file `source` names. The reader returns None for what is not there or too large."""
    folder = _folder(source)

    def find(name: str) -> str | None:
        return next((text for place in _places(folder, name) if (text := _text(place)) is not None), None)

    return find


def matching(source: str, pattern: str) -> list[tuple[str, str | None]]:
    """(name, text) of the files that a pattern like conf.d/*.conf stands for, in the order of their names; None for what cannot be read."""
    for place in _places(_folder(source), pattern):
        try:
            found = sorted(place.parent.glob(place.name))
        except (OSError, ValueError):
            continue
        if found:
            return [
                (str(file), _text(file) if at < MOST_FILES else None)
                for at, file in enumerate(found)
                if not file.is_dir()
            ]
    return []


def _folder(source: str) -> Path | None:
    try:
        path = Path(source)
        return path.resolve().parent if path.is_file() else None
    except (OSError, ValueError):
        return None


def _places(folder: Path | None, name: str) -> list[Path]:
    """Where a named file may lie."""
    if folder is None or not name or "\0" in name or Path(name).name in ("", "..", "**"):
        return []
    wanted = Path(name)
    if not wanted.is_absolute():
        return [folder / wanted]
    beside_it = [folder / wanted.name, folder / wanted.parent.name / wanted.name]
    return [wanted, *beside_it] if wanted.parts[:2] == folder.parts[:2] else beside_it


def nowhere(name: str) -> str | None:
    """For a text that is no file."""
    return None


def _text(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > MOST:
            return None
        return path.read_text("utf-8", errors="replace")
    except (OSError, ValueError):
        return None


__all__ = ["Files", "beside", "matching", "nowhere"]
