"""`hermetic exposure`: access logs as they are collected, inside what Docker, Kubernetes and syslog write around each line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hermetic.check.exposure import NO_JSON, Exposure, ExposureOptions, read
from hermetic.check.exposure_lines import LONGEST_LINE

OBJECT = '{"time":"2026-11-29T14:05:00Z","request_id":"r","status":200,"prompt_tokens":900000}'
DOCKER = '{{"log":{},"stream":"stdout","time":"2026-11-29T14:05:00.123456789Z"}}'


def found(folder: Path, *lines: str) -> Exposure:
    path = folder / "access.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return read([path], ExposureOptions(681_280))


@pytest.mark.parametrize(
    "line",
    [
        OBJECT,
        DOCKER.format(json.dumps(OBJECT + "\n")),  # Docker's json-file
        f"2026-11-29T14:05:00.123456789+01:00 stdout F {OBJECT}",  # the kubelet's (CRI)
        f"[pod/gw-7d9f-x2x/gateway] {OBJECT}",  # kubectl logs --prefix
        f"[pod/gw-0/gateway] 2026-11-29T14:05:00.123456789Z {OBJECT}",  # and --timestamps
        f"2026-11-29T14:05:00.123456789Z {OBJECT}",
        f"gateway-1  | {OBJECT}",  # docker compose logs
        f"Nov  9 14:05:00 web01 nginx[812]: {OBJECT}",  # journalctl, syslog
        f"<190>Nov 29 14:05:00 web01 nginx: {OBJECT}",  # nginx's access_log syslog:
        f"2026-11-29T14:05:00+0000 web01 nginx[812]: {OBJECT}",  # journalctl -o short-iso
    ],
)
def test_what_stands_around_a_line_is_taken_away(tmp_path: Path, line: str) -> None:
    said = found(tmp_path, line, line)
    assert (said.lines, said.judged, [hit.id for hit in said.hits]) == (2, 2, ["r", "r"])
    assert said.hits[1].where.endswith("access.log, line 2")


def test_a_line_that_was_written_in_parts_is_one(tmp_path: Path) -> None:
    """The kubelet marks them with P, Docker leaves out the line's end."""
    start = "2026-11-29T14:05:00.1Z stdout"
    said = found(
        tmp_path, f"{start} P {OBJECT[:20]}", f"{start} P {OBJECT[20:40]}", f"{start} F {OBJECT[40:]}"
    )
    assert (said.lines, said.fits, said.hits[0].where[-6:]) == (1, 1, "line 3")
    parts = (json.dumps(OBJECT[:30]), json.dumps(OBJECT[30:] + "\n"))
    assert found(tmp_path, *map(DOCKER.format, parts)).fits == 1


def test_a_line_that_the_log_ends_in_is_not_judged(tmp_path: Path) -> None:
    said = found(tmp_path, OBJECT, f"2026-11-29T14:05:00.1Z stdout P {OBJECT[:20]}")
    assert (said.lines, said.judged, said.not_judged[0].why) == (2, 1, NO_JSON)


@pytest.mark.parametrize(
    "line",
    [
        f'10.0.0.1 - - [29/Nov/2026:14:05:00 +0000] "POST / HTTP/1.1" 400 12 "-" {OBJECT}',
        f"INFO bad request, body: {OBJECT}",
        f"{{{OBJECT}",
        f"2026-11-29T14:05:00Z ERROR body: {OBJECT}",
    ],
)
def test_an_object_behind_other_text_may_be_a_clients(tmp_path: Path, line: str) -> None:
    said = found(tmp_path, line)
    assert (said.judged, said.not_judged[0].why) == (0, NO_JSON)


def test_a_field_of_ones_own_that_is_called_log_is_no_wrapper(tmp_path: Path) -> None:
    own = '{"log":"access",' + OBJECT[1:]
    assert found(tmp_path, own, own).fits == 2


def test_a_line_that_is_too_long_inside_its_wrapper_is_told(tmp_path: Path) -> None:
    start = "2026-11-29T14:05:00.1Z stdout"
    part = f"{start} P {'x' * (LONGEST_LINE * 3 // 4)}"
    said = found(tmp_path, part, part, f"{start} F x", OBJECT)
    assert (said.fits, said.judged) == (1, 1)
    assert said.not_judged[0].why == f"is longer than {LONGEST_LINE:,} bytes"
