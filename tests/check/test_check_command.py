"""`hermetic check` as it is typed: the incident's deployment first of all."""

from __future__ import annotations

import json
import os
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
        ("check = 5", r"one table, \[check\]"), ("[check]\nsauces = []", "no setting 'sauces'"), ("[check]\nstrict = 1", "strict must be true or false"),
        ("[check]\npatches = ['1']", r"list of numbers, like \[38935\]"), ("[check", "not TOML"), ("[check]\ntimeout = true", "timeout must be seconds, like 4, or a time in quotes"),
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


# ------------------------------------------------------------------------------------ what an attacker or a slip may do

KEY = "sk-not-for-anybody"


@pytest.mark.parametrize("form", command.FORMATS)
def test_keys_on_a_command_line_and_in_a_url_are_in_no_report(form: str, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    line = (
        f"HF_TOKEN={KEY} python -m sglang.launch_server --model-path /m --api-key {KEY} --admin-api-key={KEY}"
    )
    check(line, f"v=vllm serve m --api-key {KEY}", f"http://user:{KEY}@127.0.0.1:9/v1?key={KEY}", format=form)
    said = capsys.readouterr().out
    assert "127.0.0.1:9" in said
    assert KEY not in said


def test_a_word_that_is_no_source_is_not_repeated_where_it_may_hold_a_key() -> None:
    for word in (f"python -m other --api-key {KEY}", f"http://user:{KEY}@[::1"):
        with pytest.raises(OptionError) as told:
            check(word)
        assert KEY not in str(told.value)


def test_a_folder_with_nothing_of_a_deployment_is_not_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    assert check(str(tmp_path)) == 2
    (tmp_path / "notes.txt").write_text("buy milk\n")
    assert check(str(tmp_path)) == 2
    assert "holds nothing of a deployment" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("info.json", b'{"disaggregation_mode":"prefill","internal_states":[{"memory'),
        ("pod.yaml", b"apiVersion: v1\nkind: Pod\nspec: [\n"),
        ("decode.log.gz", b"\x1f\x8b\x08\x00"),
    ],
)
def test_what_is_damaged_in_a_folder_is_not_taken_for_a_file_of_something_else(tmp_path: Path, name: str, data: bytes) -> None:  # fmt: skip
    (tmp_path / "prefill.log").write_text(LOG.format(n=7, role="prefill", pool=2_000_000))
    assert check(str(tmp_path), select=("CAP001",)) == 0
    (tmp_path / name).write_bytes(data)
    assert check(str(tmp_path), select=("CAP001",)) == 2


def test_of_a_folder_pipes_and_links_are_told_and_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    (tmp_path / "prefill.log").write_text(LOG.format(n=7, role="prefill", pool=2_000_000))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "around").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("nothing")
    assert check(str(tmp_path), select=("CAP001",)) == 0
    said = capsys.readouterr().out
    assert [name for name in ("pipe", "around", "broken") if f"/{name}: is no file" in said] == ["pipe", "around", "broken"]  # fmt: skip


def test_a_folder_that_cannot_be_looked_into_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prefill.log").write_text(LOG.format(n=7, role="prefill", pool=2_000_000))
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def closed(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert check(str(tmp_path), select=("CAP001",)) == 2


@pytest.mark.parametrize("form", command.FORMATS)
def test_a_name_that_is_no_text_is_shown_all_the_same(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    path = f"{tmp_path}/pre\udcff.log"
    Path(path).write_text(LOG.format(n=7, role="prefill", pool=681_280))
    line = "python -m sglang.launch_server --model-path m --host \udcff"
    assert check(path, line, select=("CAP001",), format=form) == 1
    assert "\udcff" not in capsys.readouterr().out


def test_a_command_line_longer_than_a_name_can_be_is_read() -> None:
    assert check(f"vllm serve {'/m' * 5000}", select=("VLLM001",)) == 0


def test_a_pair_of_which_one_half_is_missing_is_not_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    (tmp_path / "prefill.log").write_text(LOG.format(n=7, role="prefill", pool=2_000_000))
    (tmp_path / "decode.log").write_text("")
    assert check(str(tmp_path), select=("PAIR001",)) == 0
    assert "no other half was read" in capsys.readouterr().out
    assert check(str(tmp_path), select=("PAIR001",), strict=True) == 1


@pytest.mark.parametrize(
    "more", [{"ignore": ("",)}, {"select": ("",)}, {"select": ("CAP001",), "ignore": ("CAP",)}]
)
def test_options_that_leave_nothing_to_check_are_refused(
    incident: list[str], more: dict[str, object]
) -> None:
    with pytest.raises(OptionError):
        check(*incident, **more)


@pytest.mark.parametrize(
    "text",
    [
        '{"check": 1}', '{"nodes": []}', '{"version": 99, "nodes": [{"name": "prefill"}]}', "[" * 20_000,
        '{"nodes": [{"name": "prefill", "facts": {"pool": [{"value": "many"}]}}]}',
    ],
)  # fmt: skip
def test_a_baseline_that_is_another_file_is_refused(incident: list[str], tmp_path: Path, text: str) -> None:
    before = tmp_path / "before.json"
    before.write_text(text)
    with pytest.raises(OptionError, match="make one first"):
        check(*incident, baseline=before)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_timeout_in_a_config_file_that_cannot_be_meant_is_refused(incident: list[str], tmp_path: Path, value: str) -> None:  # fmt: skip
    config = tmp_path / "check.toml"
    config.write_text(f"[check]\ntimeout = {value}\n")
    with pytest.raises(OptionError, match="timeout is"):
        check(*incident, config=config)


@pytest.mark.parametrize("more", [{"api_key": "schlüssel"}, {"api_key": "a\nb"}, {"patches": ("9" * 5000,)}, {"ca": "\0"}])  # fmt: skip
def test_values_that_cannot_be_sent_or_opened_are_option_errors(more: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        check("http://127.0.0.1:9", **more)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_report_for_which_there_is_no_room_is_no_fault_of_the_deployment(incident: list[str], form: str, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OptionError, match="cannot be written: No space left"):
            check(*incident, format=form)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # what is still held goes somewhere
