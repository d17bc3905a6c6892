"""`hermetic check` as it is mistyped: one clear line that says what was meant perhaps, and what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hermetic.check import command, sources
from hermetic.check import watch as watching
from hermetic.check.command import Asked
from hermetic.check.result import Report
from hermetic.options import OptionError

DOCS = Path(__file__).parents[2] / "docs" / "check.md"
ENGINE = "vllm serve m --host 127.0.0.1 --port 8000"


def refused(*words: str) -> str:
    with pytest.raises(OptionError) as told:
        sources.parse(words)
    said = str(told.value)
    assert "\n" not in said
    return said


@pytest.mark.parametrize("word", ["node", "node 3", "prefil.log", "p=prefil.log"])
def test_a_word_that_is_no_source_is_told_what_sources_look_like(word: str) -> None:
    said = refused(word)
    assert "http://10.0.0.7:30000" in said
    assert "prefill.log" in said
    assert "NAME=SOURCE" in said


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("127.0.0.1:31000", "http://127.0.0.1:31000 "), ("prefill-0.svc:30000/v1", "http://prefill-0.svc:30000/v1 "),
        ("[::1]:80", "http://[::1]:80 "), ("p=10.0.0.7:30000", "p=http://10.0.0.7:30000 "),
    ],
)  # fmt: skip
def test_a_host_and_a_port_are_answered_with_the_url(word: str, meant: str) -> None:
    assert meant in refused(word)


def test_a_url_of_another_kind_is_told_which_there_are() -> None:
    assert "'ftp://h' is no URL that can be asked" in refused("ftp://h")
    assert "'http://' names no host" in refused("http://")


def test_a_name_with_a_blank_is_told_what_names_are(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("x")
    assert f"like node-3={log}" in refused(f"node 3={log}")


# ------------------------------------------------------------------------------------ fixes that nobody knows


def check(*words: str, **more: object) -> int:
    return command.main(Asked(sources=words, **more))  # type: ignore[arg-type]


def test_a_fix_that_no_rule_knows_is_said_to_carry_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    check(ENGINE, patches=("12345678",), select=("VLLM001",))
    said = capsys.readouterr()
    (line,) = [line for line in said.out.splitlines() if "12345678" in line]
    assert "attested, rests on nothing" in line
    assert "38935" in line  # those that are known
    assert said.err == ""
    check(ENGINE, patches=("12345678",), select=("VLLM001",), format="json")
    said = capsys.readouterr()
    assert "12345678: attested, rests on nothing" in json.loads(said.out)["notes"][0]
    assert said.err.startswith("warning: --has-patch 12345678: attested, rests on nothing")


def test_a_fix_that_nothing_here_needs_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    check(ENGINE, patches=("38935",), format="json")
    said = capsys.readouterr()
    assert (
        "--has-patch 38935: attested, and nothing in this report rests on it" in json.loads(said.out)["notes"]
    )
    assert said.err == ""


# ------------------------------------------------------------------------------------ the config file, and --help


def test_the_example_in_the_docs_has_every_key_and_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert set(tomllib.loads(block)["check"]) == set(command._SETTINGS)
    check(ENGINE, format="json")
    (tmp_path / "last-good.json").write_text(capsys.readouterr().out)
    (tmp_path / "cluster-ca.pem").write_text("")
    (tmp_path / "check.toml").write_text(block)
    monkeypatch.chdir(tmp_path)
    assert check(ENGINE, config=Path("check.toml")) == 0  # of a vLLM node CAP asks only what has changed
    assert "Rules asked: only CAP, VER001 but EXP" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "seconds"), [("4", 4.0), ("0.5", 0.5), ('"4s"', 4.0), ('"2m"', 120.0)])
def test_a_timeout_in_the_config_file_is_seconds_or_a_time(
    tmp_path: Path, value: str, seconds: float
) -> None:
    config = tmp_path / "check.toml"
    config.write_text(f"[check]\ntimeout = {value}\n")
    asked = Asked(sources=(ENGINE,), config=config)
    assert command._options(asked, command._settings(config)).fetch.timeout == seconds


def test_what_the_command_line_says_outright_goes_before_the_config_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "check.toml"
    config.write_text('[check]\nformat = "json"\nselect = ["VLLM008"]\n')
    check(ENGINE, config=config, format="text")
    assert not capsys.readouterr().out.startswith("{")


def test_help_has_groups_and_says_what_the_exit_codes_mean() -> None:
    done = subprocess.run([sys.executable, "-m", "hermetic.cli", "check", "--help"], capture_output=True, text=True, check=True)  # fmt: skip
    for part in ("Exit code 0: clean", "1: findings", "2: a source could not be read", "CAP capacity", "─ The report ─", "─ Again and again ─"):  # fmt: skip
        assert part in done.stdout


# ------------------------------------------------------------------------------------ again and again


def test_each_round_says_when_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = iter(["2026-11-30T12:00:00+00:00", "2026-11-30T12:01:00+00:00"])

    def run(options: object) -> Report:
        started = next(rounds, None)
        if started is None:
            raise KeyboardInterrupt
        return Report(started=started)

    monkeypatch.setattr(command, "run", run)
    assert check(ENGINE, watch="0.001s") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "round 1 at 2026-11-30T12:00:00+00:00"
    assert (
        said[-1] == "round 2 at 2026-11-30T12:01:00+00:00  as before: Clean: 0 findings, 0 unknown, 0 passed"
    )


def test_a_round_without_a_report_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = iter([Report(), OptionError("certificates are gone"), KeyboardInterrupt()])

    def run() -> Report:
        one = next(rounds)
        if isinstance(one, Report):
            return one
        raise one

    with pytest.raises(KeyboardInterrupt):
        watching.watch(run, 0.001, lambda _: None, watching.Figures())
    assert re.search(r"^no report at \d{4}-.*: certificates are gone$", capsys.readouterr().err, re.M)
