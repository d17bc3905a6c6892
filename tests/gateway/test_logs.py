"""Logs: one line an event, readable by people or by machines, and no client can forge one."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from hermetic.options import OptionError
from hermetic.telemetry import logs


@pytest.fixture
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.mark.usefixtures("restored")
def test_an_event_is_one_line_whatever_a_client_put_into_it() -> None:
    out = io.StringIO()
    logs.setup("text", stream=out)
    logs.event(
        logging.getLogger("hermetic.gateway"),
        "request",
        tenant="alice",
        path="/a\n12:00 ERROR forged",
        ms=1.25,
    )
    (line,) = out.getvalue().splitlines()
    assert line.endswith(r'INFO  gateway request tenant=alice path="/a\n12:00 ERROR forged" ms=1.25')


@pytest.mark.usefixtures("restored")
def test_json_lines_hold_the_fields_and_the_traceback() -> None:
    out = io.StringIO()
    logs.setup("json", stream=out)
    log = logging.getLogger("hermetic.gateway")
    logs.event(log, "request", status=200, event="shadowed", path="/a\nb")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("broken")
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["event"], first["status"], first["field_event"], first["path"]) == (
        "request",
        200,
        "shadowed",
        "/a\nb",
    )
    assert second["level"] == "error"
    assert "ValueError: why" in second["traceback"]


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(OptionError, match="text or json"):
        logs.setup("xml")
