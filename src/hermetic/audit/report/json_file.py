"""The report as a JSON file, and its published schema (docs/audit-schema.json).

The one thing to know: a file appears whole or not at all. It is written beside its place and moved there, so that an audit
that dies leaves the former report, never half of a new one. A pipe or a device is written to as it is. `python -m hermetic.audit.report.json_file FILE` writes the schema.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from hermetic.audit.result import Report
from hermetic.options import OptionError

VERSION = 1
_LONE = re.compile("[\ud800-\udfff]")


class ReportFileError(OptionError):
    """A report cannot be written or read; the message says which file, and why."""


def dump(report: Report) -> bytes:
    """The report as JSON, UTF-8, indented. Lone surrogates, which UTF-8 cannot hold, become U+FFFD; infinities null."""
    try:
        data = msgspec.json.encode(report, enc_hook=repr)
    except UnicodeEncodeError:
        data = msgspec.json.encode(_whole(report), enc_hook=repr)
    return msgspec.json.format(data, indent=1)


def _whole(value: Any) -> Any:
    """The same without lone surrogates, character for character."""
    if isinstance(value, str):
        return _LONE.sub("\ufffd", value)
    if isinstance(value, msgspec.Struct):
        return {name: _whole(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return {_whole(name): _whole(item) for name, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list | tuple) else value


def write(path: Path, report: Report) -> None:
    """Raises ReportFileError."""
    replace(path, dump(report))


def read(path: Path) -> Report:
    """A report that was written before, partial ones too. Raises ReportFileError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ReportFileError(f"cannot read {path}: {error.strerror}") from None
    try:
        head = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ReportFileError(f"{path} is no report of `hermetic audit`: it is not one JSON object") from None
    if head.get("version") != VERSION:
        raise ReportFileError(
            f"{path} has version {head.get('version')!r}; this Hermetic reads {VERSION}: use the one that wrote it"
        )
    try:
        return msgspec.convert(head, Report)
    except msgspec.ValidationError as error:
        raise ReportFileError(f"{path} is no report of `hermetic audit`: {error}") from None


def check(path: Path) -> None:
    """See that a report can be written there, as far as that can be seen before. Raises ReportFileError."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not _special(path):
            handle, beside = _beside(path)
            os.close(handle)
            os.unlink(beside)
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ReportFileError(f"cannot write {path}: {error.strerror}") from None


def replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; into a pipe or device as it is. Raises ReportFileError."""
    try:
        if _special(path):
            path.write_bytes(data)
            return
        handle, beside = _beside(path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(beside, 0o666 & ~_umask())
            os.replace(beside, os.path.realpath(path))
        except BaseException:  # a Ctrl-C too leaves nothing behind
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise
    except OSError as error:
        raise ReportFileError(f"cannot write {path}: {error.strerror}") from None


def _special(path: Path) -> bool:
    """A pipe, a terminal, /dev/null: nothing that could be moved to its place."""
    return path.exists() and not path.is_file()


def _beside(path: Path) -> tuple[int, str]:
    """A new file, open, in the folder of the one that is meant (a link's target)."""
    return tempfile.mkstemp(dir=os.path.dirname(os.path.realpath(path)), prefix=".hermetic-")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def schema() -> bytes:
    """The JSON schema of a report (draft 2020-12), made of the types in result.py and exchange.py."""
    (top,), parts = msgspec.json.schema_components([Report], ref_template="#/$defs/{name}")
    whole = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://hermetic.invalid/audit-schema.json",
        "title": "Report of hermetic audit",
        **top,
        "$defs": parts,
    }
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def main(arguments: list[str]) -> int:
    """Write the schema to the file that is named, or to standard output."""
    if len(arguments) > 1:
        print("usage: python -m hermetic.audit.report.json_file [FILE]", file=sys.stderr)
        return 2
    if not arguments:
        sys.stdout.buffer.write(schema())
        return 0
    try:
        replace(Path(arguments[0]), schema())
    except ReportFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

__all__ = ["ReportFileError", "check", "dump", "read", "replace", "schema", "write"]
