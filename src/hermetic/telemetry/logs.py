"""Logging: one line per event, for people (default) or as JSON for machines.

The one thing to know: an event is a name and fields, not a sentence with values pasted in: `event(log, "request",
tenant="alice", status=200)`. Values are written so that no client can forge a line. Prompts and answers are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import IO

from hermetic.options import OptionError

FORMATS = ("text", "json")


def event(log: logging.Logger, name: str, level: int = logging.INFO, **fields: object) -> None:
    """Write one event."""
    log.log(level, name, extra={"fields": fields})


def setup(log_format: str = "text", level: int = logging.INFO, stream: IO[str] | None = None) -> None:
    """Send all logging of this process to `stream` (standard error). Raises OptionError for an unknown format."""
    if log_format not in FORMATS:
        raise OptionError(f"unknown --log-format {log_format!r}: use {' or '.join(FORMATS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("uvicorn.access", "uvicorn.error", "httpx", "httpcore", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class TextLines(logging.Formatter):
    """`12:03:04.123 INFO  gateway request tenant=alice status=200`; a traceback follows, indented."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        name = record.name.removeprefix("hermetic.")
        message = _one_line(record.getMessage())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<5} {name} {message}"
        for field, value in _fields(record).items():
            line += f" {field}={_plain(value)}"
        if record.exc_info:
            line += "\n" + "\n".join(
                f"    {part}" for part in self.formatException(record.exc_info).splitlines()
            )
        return line


class JsonLines(logging.Formatter):
    """One JSON object a line: ts (seconds), level, logger, event, then the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {
            field if field not in line else f"field_{field}": value
            for field, value in _fields(record).items()
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields = getattr(record, "fields", {})
    return fields if isinstance(fields, Mapping) else {}


def _one_line(value: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in value)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text)
