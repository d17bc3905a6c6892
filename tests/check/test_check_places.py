"""Where a finding stands, for a pull request: a file that is there, whatever of it a node or a proxy was read from."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from hermetic.check.check import CheckOptions, run
from hermetic.check.output import github, json_file, sarif
from hermetic.check.result import Report

COMPOSE = """\
services:
  prefill:
    image: lmsysorg/sglang:v0.5.20
    command: sglang serve m --disaggregation-mode prefill --host 0.0.0.0
  router:
    image: lmsysorg/sgl-model-gateway:v0.3.2
    command: ["--pd-disaggregation", "--prefill", "http://prefill:30000"]
"""
NGINX = "http {\n  server {\n    location /v1/ {\n      proxy_pass http://p:1;\n      proxy_next_upstream error timeout non_idempotent;\n    }\n  }\n}\n"


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Of a folder, as a workflow names it. One of the names has what stands between a file and a place in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "a, b.yml").write_text(COMPOSE)
    (tmp_path / "deploy" / "nginx.conf").write_text(NGINX)
    (tmp_path / "deploy" / "notes.txt").write_text("buy milk\n")
    return run(CheckOptions(("deploy",), select=("VER003", "PRX002", "CAP001")))


def test_the_files_that_something_was_taken_from_are_named(report: Report, tmp_path: Path) -> None:
    assert report.files == ["deploy/a, b.yml", "deploy/nginx.conf"]
    (tmp_path / "r.json").write_bytes(json_file.dump(report))
    assert json_file.load(tmp_path / "r.json").files == report.files


def test_an_annotation_stands_at_a_file_that_is_there(report: Report) -> None:
    found = [line.partition("title=")[0] for line in github.dump(report).splitlines() if "::error" in line]
    assert sorted(found) == [
        "::error file=deploy/a%2C b.yml,line=3,",  # VER003: where what prefill is begins
        "::error file=deploy/a%2C b.yml,line=6,",  # PRX002, router
        "::error file=deploy/nginx.conf,line=4,",  # where proxy_pass stands
    ]


def test_what_is_unknown_says_so_in_its_title(report: Report) -> None:
    lines = [line for line in github.dump(report).splitlines() if "CAP001" in line]
    assert "title=CAP001 unknown%3A the KV pool is smaller than the advertised context::" in lines[0]


def test_a_result_of_sarif_is_at_a_file_that_is_there(report: Report) -> None:
    results = json.loads(sarif.dump(report))["runs"][0]["results"]
    places = [
        place["physicalLocation"]
        for one in results
        for place in one["locations"]
        if "physicalLocation" in place
    ]
    assert {place["artifactLocation"]["uri"] for place in places} == {
        "deploy/a%2C%20b.yml",
        "deploy/nginx.conf",
    }
    assert {json.dumps(place.get("region")) for place in places} == {
        f'{{"startLine": {line}}}' for line in (3, 4, 6)
    }


def test_standard_input_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(COMPOSE.encode())))
    lines = github.dump(run(CheckOptions(("-",), select=("VER003",)))).splitlines()
    assert not any("file=" in line for line in lines)
    assert any(line.startswith("::error title=VER003") for line in lines)
