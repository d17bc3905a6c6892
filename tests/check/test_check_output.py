"""A report in all its forms."""

from __future__ import annotations

import io
import json
from pathlib import Path

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from rich.console import Console

from hermetic.check import command
from hermetic.check import watch as watching
from hermetic.check.output import github, json_file, sarif, text
from hermetic.check.result import Report, Told, Unread, Verdict
from hermetic.options import OptionError

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs"
NASTY = "evil\x1b[31m\r\n::error::owned \u202e<b>%0A,:"


def report(**more: object) -> Report:
    fields: dict[str, object] = {
        "started": "2026-11-30T12:00:00+00:00",
        "sources": ["prefill.log"],
        "nodes": [Told(name="prefill p:1", role="prefill", engine="sglang", version="0.5.19", sources=["prefill.log"],
                       facts={"pool": [{"value": 2048, "where": "prefill.log, line 7"}]})],
        "verdicts": [
            Verdict(code="CAP001", state="finding", subject="prefill p:1", message="holds 2,048 tokens and advertises 8,192",
                    where=["prefill.log, line 7", "http://p:1/server_info"]),
            Verdict(code="DET003", state="finding", subject="prefill p:1", message="the canary is off", severity="warning"),
            Verdict(code="REL001", state="unknown", subject="prefill p:1", message="prefill p:1: whether ... is not known"),
            Verdict(code="CAP005", state="passed", subject="prefill p:1", where=["prefill.log, line 2"]),
        ],
        **more,
    }  # fmt: skip
    return Report(**fields)  # type: ignore[arg-type]


def shown(made: Report, **options: bool) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    text.show(console, made, **options)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_first_line_is_the_gravest_finding() -> None:
    lines = shown(report()).splitlines()
    assert lines[0] == "CAP001 error  prefill p:1: holds 2,048 tokens and advertises 8,192"
    assert lines[-1].startswith("Not clean: 2 findings, 1 unknown, 1 passed")


def test_one_missing_fact_is_told_once_for_all_rules_that_want_it_and_all_nodes_that_lack_it() -> None:
    nodes = [Told(name=f"n{i}") for i in range(6)]
    verdicts = [
        Verdict(code=code, state="unknown", subject=node.name, message=f"{node.name}: the pool is not known")
        for code in ("CAP001", "CAP003")
        for node in nodes
    ]
    said = shown(report(verdicts=verdicts, nodes=nodes))
    assert "unknown  n0, n1, n2, n3 and 2 more: the pool is not known (CAP001, CAP003)" in said
    assert said.count("the pool is not known") == 1


def test_a_servers_text_commands_no_terminal_and_no_workflow() -> None:
    bad = report(verdicts=[Verdict(code="CAP001", state="finding", subject=NASTY, message=NASTY)], unread=[Unread(source=NASTY, why=NASTY)])  # fmt: skip
    seen = shown(bad)
    assert "\x1b" not in seen
    assert "\u202e" not in seen
    lines = github.dump(bad).splitlines()
    assert len(lines) == 3
    assert all(line.startswith(("::error ", "::notice")) for line in lines)


def test_github_annotations_name_file_and_line_where_there_is_one() -> None:
    lines = github.dump(report()).splitlines()
    assert lines[0].startswith("::error file=prefill.log,line=7,title=CAP001 ")
    assert lines[0].endswith("::prefill p:1: holds 2,048 tokens and advertises 8,192")
    assert lines[1].startswith("::warning title=DET003 ")
    assert lines[2].startswith("::notice title=REL001 ")
    assert github.dump(report(), strict=True).splitlines()[2].startswith("::error title=REL001 ")


def test_github_escapes_what_its_toolkit_escapes() -> None:
    """As documented: % first, then line ends; in properties also : and , ."""
    assert github._data("50%\n") == "50%25%0A"
    assert github._property("a:b,c") == "a%3Ab%2Cc"


def test_sarif_is_sarif() -> None:
    """Against the schema of OASIS (SARIF 2.1.0, as in Microsoft's sarif-multitool 5.7.0), without its texts."""
    schema = msgspec.json.decode((HERE / "sarif-2.1.0.json").read_bytes())
    made = msgspec.json.decode(sarif.dump(report(unread=[Unread(source="x", why="y")])))
    assert not list(Draft202012Validator(schema).iter_errors(made))
    (run,) = made["runs"]
    assert [(r["ruleId"], r["kind"], r["level"]) for r in run["results"]] == [
        ("CAP001", "fail", "error"), ("DET003", "fail", "warning"), ("REL001", "open", "none"), ("CAP005", "pass", "none"),
    ]  # fmt: skip
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("prefill.log", 7)
    assert len(run["results"][0]["locations"]) == 1  # a URL is no file
    assert run["invocations"][0]["executionSuccessful"] is False
    for result in run["results"]:
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]


def test_json_comes_back_as_it_was_and_fits_its_published_schema(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(json_file.dump(report()))
    assert json_file.load(path) == report()
    published = json.loads((DOCS / "check-schema.json").read_bytes())
    assert not list(Draft202012Validator(published).iter_errors(json.loads(path.read_bytes())))
    assert (DOCS / "check-schema.json").read_bytes() == json_file.schema(), (
        "run: python -m hermetic.check.output.json_file docs/check-schema.json"
    )


@pytest.mark.parametrize("bad", ["", "[]", '{"verdicts": 5}', "<html>"])
def test_a_baseline_that_is_none_is_refused(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(bad)
    with pytest.raises(OptionError, match="no report of"):
        json_file.load(path)
    with pytest.raises(OptionError, match="cannot read"):
        json_file.load(tmp_path / "gone")


# ------------------------------------------------------------------------------------ exit codes, and figures


def test_the_exit_code_says_what_a_pipeline_has_to_know() -> None:
    unknown = [Verdict(code="CAP001", state="unknown", subject="n", message="?")]
    assert command.code(report()) == 1
    assert command.code(report(verdicts=[])) == 0
    assert command.code(report(verdicts=unknown)) == 0
    assert command.code(report(verdicts=unknown), strict=True) == 1
    assert command.code(report(verdicts=[], unread=[Unread(source="x", why="y")])) == 2
    assert (
        command.code(report(unread=[Unread(source="x", why="y")])) == 2
    )  # half a deployment was not checked
    assert command.code(report(verdicts=[], unread=[Unread(source="x", why="y", part=True)])) == 0


def test_what_was_found_is_served_as_figures() -> None:
    figures = watching.Figures()
    port = watching.serve(figures, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}/metrics"
    assert "hermetic_check_runs_total 0.0" in httpx.get(url).text
    figures.ran(report(unread=[Unread(source="x", why="y")]), 0.5)
    figures.failed()
    said = httpx.get(url).text
    assert 'hermetic_check_finding{code="CAP001",severity="error",subject="prefill p:1"} 1.0' in said
    assert 'hermetic_check_unknown{code="REL001",subject="prefill p:1"} 1.0' in said
    assert 'hermetic_check_unread{source="x"} 1.0' in said
    assert "hermetic_check_runs_failed_total 1.0" in said
    assert "hermetic_check_last_run_timestamp_seconds" in said


def test_a_port_that_is_taken_is_said() -> None:
    port = watching.serve(watching.Figures(), "127.0.0.1", 0)
    with pytest.raises(OptionError, match=f"--metrics-port {port}: cannot listen"):
        watching.serve(watching.Figures(), "127.0.0.1", port)


def test_watching_goes_on_after_a_run_that_failed_but_not_after_the_first() -> None:
    figures, told, runs = watching.Figures(), list[Report](), 0

    def check() -> Report:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise OptionError("a file is gone for a moment")
        if runs == 4:
            raise KeyboardInterrupt
        return report()

    with pytest.raises(KeyboardInterrupt):
        watching.watch(check, 0.001, told.append, figures)
    assert len(told) == 2

    def never() -> Report:
        raise OptionError("no such thing")

    with pytest.raises(OptionError):
        watching.watch(never, 0.001, told.append, figures)
