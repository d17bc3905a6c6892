"""The report for a terminal, read as somebody who sees it for the first time: what is worst, what to do, what to give."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from check_rules import asked, node
from rich.cells import cell_len
from rich.console import Console

from hermetic.check import command
from hermetic.check.command import Asked
from hermetic.check.deployment import Deployment
from hermetic.check.output import github, sarif, text
from hermetic.check.output.missing import Missing, by_source, missing
from hermetic.check.result import Report, Told, Unread, Verdict
from hermetic.check.rules import RULES

CAPTURES = Path(__file__).parent / "captures"
INFO, LOG, METRICS = "its /server_info", "its start-up log", "its /metrics"


def shown(report: Report, width: int = 80, **options: bool) -> list[str]:
    file = io.StringIO()
    text.show(Console(file=file, width=width, highlight=False), report, **options)
    return file.getvalue().splitlines()


def unknown(code: str, name: str, lacks: str, *ask: str) -> Verdict:
    return Verdict(code=code, state="unknown", subject=name, message=f"{name}: {lacks} is not known; ...", lacks=lacks, ask=list(ask))  # fmt: skip


def finding(code: str, name: str) -> Verdict:
    return Verdict(code=code, state="finding", subject=name, message="is wrong", severity=RULES[code].severity)  # fmt: skip


# ------------------------------------------------------------------------------------ what is not known


def test_the_fewest_sources_that_would_settle_everything_are_named() -> None:
    """The log says two of three, so what /server_info or the log would say is asked of the log."""
    things = [
        Missing("p", "the version", ("VER001",), (INFO, LOG)), Missing("d", "the engine's version", ("VER009",), (LOG,)),
        Missing("d", "how many releases ended", ("REL004",), (METRICS,)),
    ]  # fmt: skip
    given = by_source(things)
    assert [(one.begins, [thing.what for thing in one.says]) for one in given] == [
        (f"{LOG} would say", ["the version", "the engine's version"]),
        (f"{METRICS} would say", ["how many releases ended"]),
    ]
    assert given[0].nodes == ["p", "d"]


def test_a_source_has_one_line_with_all_that_it_would_say() -> None:
    report = Report(
        nodes=[Told(name="p"), Told(name="d")],
        verdicts=[
            unknown("CAP001", "p", "the pool", INFO, METRICS), unknown("CAP003", "p", "the pool", INFO, METRICS),
            unknown("CAP001", "d", "the pool", INFO, METRICS), unknown("DET005", "d", "the canary", INFO),
            unknown("VER009", "p", "the transfer engine"),
            Verdict(code="REL003", state="unknown", subject="d", message="d: no transfer was measured yet"),
        ],
    )  # fmt: skip
    assert [line for line in shown(report) if line.startswith("unknown")] == [
        "unknown  p, d: its /server_info would say the pool (CAP001, CAP003); the canary (DET005)",
        "unknown  p: nothing that was read says the transfer engine (VER009)",
        "unknown  d: no transfer was measured yet (REL003)",
    ]
    assert len([line for line in shown(report, verbose=True) if line.startswith("unknown")]) == 6


def test_of_many_rules_that_want_one_thing_the_first_few_are_named() -> None:
    verdicts = [unknown(code, "n", "the engine", INFO) for code in ("CAP001", "CAP003", "CAP004", "CAP005", "VER001", "VER002")]  # fmt: skip
    (line,) = [one for one in shown(Report(nodes=[Told(name="n")], verdicts=verdicts)) if "unknown" in one[:8]]  # fmt: skip
    assert line.endswith("the engine (CAP001, CAP003, CAP004, CAP005 and 2 more)")


@pytest.mark.parametrize("code", ["CAP001", "VER001"])
def test_rules_say_what_they_lack_and_who_would_say_it(code: str) -> None:
    """VER001 asks for the version by way of another function, which may not lose it."""
    (verdict,) = asked(code, Deployment([node("prefill", context=8192)]))
    assert verdict.state == "unknown"
    assert verdict.lacks in ("how many tokens the KV pool holds", "the version")
    assert INFO in verdict.ask
    assert missing(Report(nodes=[Told(name="prefill")], verdicts=[verdict]))[0].node == "prefill"


def test_no_list_of_unknowns_is_longer_than_the_kinds_of_sources(capsys: pytest.CaptureFixture[str]) -> None:
    """26 unknowns of the vLLM pair, of three files without a manifest."""
    command.main(Asked(sources=(str(CAPTURES / "vllm-0.32.0-nixl-pd"),)))
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("unknown")]) <= 6
    assert any("its command line or manifest would say " in line for line in lines)


def test_of_contradictory_sources_it_is_said_which_disagree_and_on_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One file of before the last start. What rests on the pool is not known; that they disagree is the first line."""
    told = {
        "disaggregation_mode": "null", "version": "0.5.23", "page_size": 16, "host": "10.0.0.7", "port": 30000, "model_path": "/m",
        "internal_states": [{}], "tokenizer_path": "/m", "context_length": 8192,
    }  # fmt: skip
    for name, pool in (("new.json", 9_000), ("old.json", 2_048)):
        (tmp_path / name).write_text(json.dumps({**told, "max_total_num_tokens": pool}))
    assert command.main(Asked(sources=(str(tmp_path),), select=("CAP001", "SRC"))) == 1
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "SRC001 warning  10.0.0.7:30000: its sources disagree on how many tokens the KV pool holds: "
    )
    assert all(part in first for part in ("9000", "new.json", "2048", "old.json"))
    assert any(line.startswith("unknown") and "CAP001" in line for line in rest)


def test_of_a_version_that_is_none_it_is_said_that_it_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "disaggregation_mode": "prefill", "version": "main", "host": "10.0.0.7", "port": 30000, "model_path": "/m", "internal_states": [{}],
    }  # fmt: skip
    (tmp_path / "info.json").write_text(json.dumps(told))
    assert command.main(Asked(sources=(str(tmp_path),), select=("VER001",), strict=True)) == 1
    assert "unknown  prefill 10.0.0.7:30000: the version 'main' is no version that can be compared (VER001)" in capsys.readouterr().out  # fmt: skip


# ------------------------------------------------------------------------------------ order, and what to do


def test_what_was_not_read_stands_before_what_is_not_known_and_after_what_is_wrong() -> None:
    report = Report(
        nodes=[Told(name="n")],
        verdicts=[finding("CAP001", "n"), unknown("DET005", "n", "the canary", INFO)],
        unread=[Unread(source="d.log", why="is empty"), Unread(source="p.log", why="line 7 is cut", part=True)],
    )  # fmt: skip
    labels = [line.split("  ")[0] for line in shown(report) if not line.startswith("    ")]
    assert labels == ["CAP001 error", "not read", "unknown", "read only in part", "node", "n", "Not clean: 1 finding, 1 unknown, 0 passed, 1 source not read"]  # fmt: skip


def test_what_mends_both_halves_is_said_once() -> None:
    verdicts = [finding("VER003", "p"), finding("VER003", "d"), finding("VER005", "p")]
    lines = shown(Report(verdicts=verdicts))
    assert [line.split("  ")[0] or line.strip() for line in lines[:5]] == [
        "VER003 error", "VER003 error", RULES["VER003"].fix, "VER005 error", RULES["VER005"].fix,
    ]  # fmt: skip


def test_the_last_line_says_where_there_is_more() -> None:
    report = Report(verdicts=[finding("CAP001", "n"), unknown("DET005", "n", "the canary", INFO)])
    assert "`hermetic check --explain CAP001`" in shown(report)[-1]
    assert "-v tells each unknown" in shown(report)[-1]
    assert "-v" not in shown(report, verbose=True)[-1]
    assert shown(Report())[-1] == "Clean: 0 findings, 0 unknown, 0 passed"


def test_the_nodes_are_one_line_each_however_narrow_the_terminal_is() -> None:
    files = [f"/var/log/a-rather-long-folder/prefill-with-a-long-name-{n}.log" for n in range(3)]
    nodes = [Told(name="prefill 10.0.0.7:30000", role="prefill", engine="sglang", version="0.5.23", sources=files),
             Told(name="節点" * 12, facts={"pool": [{"value": 681280, "where": "x"}]})]  # fmt: skip
    head, first, second, _ = shown(Report(nodes=nodes), width=40)
    assert first.endswith("prefill-with-a-long-name-0.log, prefill-with-a-long-name-1.log, prefill-with-a-long-name-2.log")  # fmt: skip
    assert head.index("version") == first.index("0.5.23")
    assert cell_len(second.partition("681,280")[0]) + len("681,280") == head.index("pool") + len("pool")


def test_a_file_that_does_not_say_whose_it_is_is_named_by_itself_and_told_how_to_join_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "d.prom").write_text('vllm:cache_config_info{num_gpu_blocks="10",block_size="16"} 1.0\n')
    here, line = str(tmp_path / "d.prom"), "vllm serve m --host 10.0.0.7 --port 8000 --max-model-len 64"
    other = "vllm serve m --host 10.0.0.8 --port 8000 --max-model-len 64"
    command.main(Asked(sources=(line, other, here), select=("VLLM001",)))
    out = capsys.readouterr().out
    assert "d.prom" in [row.split("  ")[0] for row in out.splitlines()]
    assert "NAME=FILE says it, like a=d.prom" in out
    command.main(Asked(sources=(f"a={line}", other, f"a={here}"), select=("VLLM001",)))
    assert "NAME=FILE" not in capsys.readouterr().out


def test_notes_are_in_every_form() -> None:
    report = Report(notes=["rests on nothing"])
    assert "note  rests on nothing" in shown(report)
    assert "::notice::rests on nothing" in github.dump(report).splitlines()
    assert b'"text": "rests on nothing"' in sarif.dump(report)
