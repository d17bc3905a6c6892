"""`hermetic check` as it is typed: the incident's deployment first of all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hermetic.check import command
from hermetic.check.command import Asked
from hermetic.options import OptionError

# The incident's numbers: prefill holds 681,280 tokens, 1,048,576 are advertised, decode holds more, SGLang 0.5.19.
LOG = """\
[2026-11-20 07:58:01] server_args=ServerArgs(model_path='/models/big', host='10.0.0.{n}', port=30000, disaggregation_mode='{role}', disaggregation_transfer_backend='mooncake', page_size=64, tp_size=8)
[2026-11-20 08:00:12] max_total_num_tokens={pool}, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=512, context_len=1048576, available_gpu_mem=9.12 GB
[2026-11-20 08:00:40] INFO:     Uvicorn running on http://10.0.0.{n}:30000 (Press CTRL+C to quit)
[2026-11-20 08:00:41] The server is fired up and ready to roll!
"""
IMAGE = "docker run -e X=1 lmsysorg/sglang:v0.5.19-cu126 python -m sglang.launch_server --model-path /models/big --disaggregation-mode {role} --host 10.0.0.{n} --port 30000"  # fmt: skip


@pytest.fixture
def incident(tmp_path: Path) -> list[str]:
    """The sources of that deployment: a log and a command line for each half."""
    words = []
    for n, (role, pool) in enumerate((("prefill", 681_280), ("decode", 1_310_720)), 7):
        log = tmp_path / f"{role}.log"
        log.write_text(LOG.format(n=n, role=role, pool=pool))
        words += [f"{role}={log}", f"{role}={IMAGE.format(n=n, role=role)}"]
    return words


def check(*sources: str, **more: object) -> int:
    return command.main(Asked(sources=sources, **more))  # type: ignore[arg-type]


def test_the_first_line_is_the_one_that_would_have_stopped_the_incident(
    incident: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*incident) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("CAP001 error  prefill: ")
    assert "681,280" in first
    assert "1,048,576" in first


def test_the_same_as_json_as_sarif_and_for_github(
    incident: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*incident, format="json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["verdicts"][0]["code"], report["verdicts"][0]["subject"]) == ("CAP001", "prefill")
    assert [node["version"] for node in report["nodes"]] == ["0.5.19", "0.5.19"]
    assert check(*incident, format="sarif") == 1
    assert json.loads(capsys.readouterr().out)["runs"][0]["results"][0]["ruleId"] == "CAP001"
    assert check(*incident, format="github") == 1
    assert capsys.readouterr().out.startswith("::error ")


def test_an_earlier_report_is_a_baseline(
    incident: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new KV dtype, and the pool is another: 681,280 tokens are no longer there."""
    check(*incident, format="json", select=("CAP006",))
    before = tmp_path / "before.json"
    before.write_text(capsys.readouterr().out)
    assert check(*incident, baseline=before, select=("CAP006",)) == 0
    log = tmp_path / "prefill.log"
    log.write_text(log.read_text().replace("681280", "340640"))
    capsys.readouterr()
    assert check(*incident, baseline=before, select=("CAP006",)) == 1
    said = capsys.readouterr().out
    assert "340,640" in said
    assert "681,280" in said


def test_a_patch_that_is_attested_is_listed_and_no_finding(
    incident: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*incident, select=("VER001",)) == 1
    capsys.readouterr()
    assert check(*incident, select=("VER001",), patches=("#38935",)) == 0
    said = capsys.readouterr().out
    assert "attested" in said
    assert "38935" in said


def test_unknown_is_a_failure_only_for_who_asks(incident: list[str]) -> None:
    assert check(*incident, select=("REL004",)) == 0  # no metrics were given
    assert check(*incident, select=("REL004",), strict=True) == 1


def test_a_config_file_says_what_the_command_line_does_not(incident: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    config = tmp_path / "check.toml"
    config.write_text(
        f'[check]\nsources = {json.dumps(incident)}\nselect = ["VER001"]\npatches = [38935]\nformat = "json"\n'
    )
    assert command.main(Asked(config=config)) == 0
    report = json.loads(capsys.readouterr().out)
    assert {verdict["code"] for verdict in report["verdicts"]} == {"VER001"}
    assert command.main(Asked(config=config, select=("CAP001",))) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("check = 5", r"one table, \[check\]"), ("[check]\nsauces = []", "no setting 'sauces'"), ("[check]\nstrict = 1", "strict must be a bool"),
        ("[check]\npatches = ['1']", "list of int"), ("[check", "not TOML"), ("[check]\ntimeout = true", "timeout must be a float"),
    ],
)  # fmt: skip
def test_a_config_file_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    config = tmp_path / "check.toml"
    config.write_text(text)
    with pytest.raises(OptionError, match=said):
        command.main(Asked(config=config))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"format": "yaml"}, "one of text, json"), ({"select": ("XYZ",)}, "no rule begins so"), ({"patches": ("abc",)}, "--has-patch"),
        ({"timeout": "soon"}, "--timeout"), ({"watch": "often"}, "--watch"), ({"metrics_port": 1}, "goes with --watch"),
        ({"explain": "XYZ001"}, "XYZ001"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_meant_are_refused(
    incident: list[str], more: dict[str, object], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        check(*incident, **more)


def test_what_cannot_be_read_ends_in_2_and_the_rest_is_checked(
    incident: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "app.log"
    other.write_text("2026-11-30 12:00:00 INFO hello from something else\n" * 100)
    assert check(*incident, str(other), "http://127.0.0.1:9") == 2
    said = capsys.readouterr().out
    assert said.startswith("CAP001 error  prefill: ")
    assert f"not read  {other}" in said
    assert "not read  http://127.0.0.1:9" in said


def test_of_a_folder_what_belongs_to_nobody_is_listed_and_does_no_harm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    (tmp_path / "notes.txt").write_text("buy milk\n")
    (tmp_path / "prefill.log").write_text(LOG.format(n=7, role="prefill", pool=2_000_000))
    assert check(str(tmp_path), select=("CAP001",)) == 0
    assert "notes.txt" in capsys.readouterr().out
    assert check(str(tmp_path), str(tmp_path / "notes.txt"), select=("CAP001",)) == 2


def test_the_base_install_is_enough_for_a_check() -> None:
    """Nothing of the engine, and nothing that only the extras bring."""
    code = "import sys, hermetic.check.command, hermetic.check.exposed; print('\\n'.join(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.split(".")[1] for name in loaded if name.startswith("hermetic.")} == {"check", "options"}
    assert not {"torch", "numpy", "numba", "transformers", "fastapi", "uvicorn", "zmq"} & {name.split(".")[0] for name in loaded}  # fmt: skip


def test_the_command_says_in_its_help_what_its_exit_codes_mean() -> None:
    done = subprocess.run([sys.executable, "-m", "hermetic.cli", "check", "--help"], capture_output=True, text=True, check=True)  # fmt: skip
    assert "Exit code 0" in done.stdout
