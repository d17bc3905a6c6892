"""What somebody who used it for the first time ran into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from check_rules import asked, node, pair

from hermetic.check import command, facts
from hermetic.check.command import Asked
from hermetic.check.deployment import Deployment
from hermetic.check.output import github, sarif, words
from hermetic.check.readers import manifests, proxies
from hermetic.check.result import Report, Told, Unread, Verdict

NGINX = """\
http {
  server {
    location /v1/ {
      proxy_read_timeout 30s;
      proxy_ignore_client_abort on;
      proxy_pass http://prefill:30000;
      proxy_next_upstream error timeout non_idempotent;
    }
  }
}
"""


def test_a_compose_file_may_have_a_service_on_one_line() -> None:
    text = 'services:\n  p: {image: "lmsysorg/sglang:v0.5.23", command: "python3 -m sglang.launch_server --model-path m --tp 2"}\n'
    assert manifests.looks_like("two.yaml", text)
    (sheet,) = manifests.read("two.yaml", text).sheets
    assert (sheet[facts.TP], sheet[facts.VERSION]) == (2, "0.5.23")
    assert not manifests.looks_like("a.log", "services: started\n  worker: {state: up, command: none}\n"[:20])


def test_who_only_sends_cannot_fail_to_load() -> None:
    assert asked("VLLM002", Deployment([node("prefill", engine="vllm", load_failure="recompute")])) == []


@pytest.mark.parametrize("inner", ["0.0.0.0", "::", "localhost"])
def test_an_address_that_leads_decode_to_itself_is_no_side_channel(inner: str) -> None:
    both = pair({"inner_host": inner, "address": ("10.0.0.7", 1)}, {"address": ("10.0.0.8", 1)}, "vllm")
    assert [verdict.state for verdict in asked("VLLM007", both)] == ["finding"]


def test_a_dtype_that_the_baseline_does_not_say_is_not_passed_over() -> None:
    now, before = (
        node("server", "alone", pool=2_048, kv_dtype="fp8_e5m2"),
        node("server", "alone", pool=2_048),
    )
    (verdict,) = asked("CAP006", Deployment([now], baseline={"server": before}))
    assert verdict.state == "unknown"
    assert "fp8_e5m2" in verdict.message


def test_a_limit_of_a_pool_is_enough_to_see_that_a_pair_cannot_hold_its_context() -> None:
    (verdict,) = asked("CAP002", pair({"context": 1_048_576, "pool_limit": 681_280}, {"context": 1_048_576}))
    assert verdict.state == "finding"
    assert "681,280" in verdict.message


def test_release_that_is_off_is_off_with_every_backend() -> None:
    (verdict,) = asked("REL001", Deployment([node("prefill", deferred=False)]))
    assert verdict.state == "finding"


@pytest.mark.parametrize("cut", ["      proxy_next_upstream error", "      proxy_next", "    }\n  }"])
def test_of_a_configuration_that_breaks_off_only_what_cannot_be_taken_back_is_known(cut: str) -> None:
    (whole,) = proxies.read("nginx.conf", NGINX).proxies
    assert (whole.read_timeout, whole.retries_post, whole.closes_upstream) == (30.0, True, False)
    reading = proxies.read("nginx.conf", NGINX[: NGINX.index(cut)])
    (proxy,) = reading.proxies
    retries = True if cut.startswith("    }") else None
    assert (proxy.read_timeout, proxy.retries_post, proxy.closes_upstream) == (None, retries, None)
    assert reading.unread[0].part


def test_a_remark_behind_a_source_is_no_part_of_its_name() -> None:
    report = Report(
        sources=["d/info.json", "http://h:1"],
        nodes=[Told(name="n", sources=["d/info.json", "d/p.log", "http://h:1"])],
        verdicts=[
            Verdict(code="CAP001", state="finding", subject="n", message="m",
                    where=["http://h:1/server_info, pool", "d/info.json, version", "d/info.json: no such option", "d/p.log, line 7, pool"]),
        ],
    )  # fmt: skip
    assert [words.place(where, report) for where in report.verdicts[0].where] == [
        None, ("d/info.json", None), ("d/info.json", None), ("d/p.log", 7),
    ]  # fmt: skip
    (result,) = json.loads(sarif.dump(report))["runs"][0]["results"]
    assert [one["physicalLocation"]["artifactLocation"]["uri"] for one in result["locations"]] == [
        "d/info.json",
        "d/p.log",
    ]
    assert github.dump(report).startswith("::error file=d/p.log,line=7,title=CAP001 ")


def test_what_a_folder_holds_beside_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(9):
        (tmp_path / f"note{number}.txt").write_text("buy milk\n")
    (tmp_path / "node.sh").write_text("vllm serve m --host 127.0.0.1 --port 8000\n")
    assert command.main(Asked(sources=(str(tmp_path),), select=("VLLM008",))) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert lines == ["left out  9 files that are no output or configuration of an engine: note0.txt, note1.txt, note2.txt, note3.txt and 5 more"]  # fmt: skip
    assert "note" not in github.dump(Report(unread=[Unread(source="note", why="", part=True, left_out=True)]))


def test_what_passes_for_another_reason_than_its_title_says_which() -> None:
    (verdict,) = asked("EXP002", Deployment([node("server", "alone", host="127.0.0.1", api_key=False)]))
    assert (verdict.state, verdict.message) == (
        "passed",
        "it listens on 127.0.0.1 alone, so nobody else reaches it",
    )


def test_rules_may_be_named_with_commas(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("vllm serve m --host 127.0.0.1 --port 8000",)
    command.main(Asked(sources=words, select=("EXP002,VLLM",), ignore=("VLLM001, VLLM002",), format="json"))
    codes = {verdict["code"] for verdict in json.loads(capsys.readouterr().out)["verdicts"]}
    assert "EXP002" in codes
    assert not codes & {"VLLM001", "VLLM002", "CAP001"}
