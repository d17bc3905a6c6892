"""What every rule says of real output of SGLang and vLLM. Each cell was derived from the capture, never from the rule's own answer.

F finding, P passed, U unknown, - not asked of this node. Where several nodes or pairs are asked the letters stand in their order.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from check_rules import asked

from hermetic.check import facts
from hermetic.check.deployment import Deployment
from hermetic.check.facts import Sheet
from hermetic.check.readers import engine_files
from hermetic.check.rules import RULES

HERE = Path(__file__).parent / "captures"
LETTERS = {"finding": "F", "passed": "P", "unknown": "U"}


def read(name: str, *files: str) -> Sheet:
    """All that some files say of one node."""
    sheet = Sheet(name=name)
    for file in files:
        path = HERE / file
        reading = (
            engine_files.read_json(file, path.read_bytes()) if path.suffix in (".json", ".http")
            else engine_files.read_metrics(file, path.read_bytes()) if "metrics" in path.name
            else engine_files.read_log(file, path.open("rb"))
        )  # fmt: skip
        assert reading is not None, file
        assert reading.sheets, (file, reading.unread)
        for one in reading.sheets:
            sheet.take(one)
    return sheet


def sglang(version: str, role: str, *more: str) -> Sheet:
    folder = f"sglang-{version}-pd/{role}"
    return read(
        role, *(f"{folder}.{ending}" for ending in ("server_info.json", "metrics.prom", "log", *more))
    )


def deployments() -> dict[str, Deployment]:
    more = ("v1_loads.json", "model_info.json")
    single = [
        f"sglang-0.5.23-single/{file}"
        for file in (
            "server_info.json",
            "metrics.prom",
            "log",
            "v1_loads.json",
            "v1_models.json",
            "model_info.json",
        )
    ]
    vllm = [
        f"vllm-0.32.0-single/{file}"
        for file in ("eager.startup.log", "metrics_idle_eager.txt", "models.http", "version.http")
    ]
    nixl = "vllm-0.32.0-nixl-pd"
    p, d = (
        read("p", f"{nixl}/nixl_p.startup.log"),
        read("d", f"{nixl}/nixl_d.startup.log", f"{nixl}/metrics_nixl_d.txt"),
    )
    return {
        "sglang 0.5.20 pair": Deployment([sglang("0.5.20", "prefill"), sglang("0.5.20", "decode")]),
        "sglang 0.5.23 pair": Deployment(
            [sglang("0.5.23", "prefill", *more), sglang("0.5.23", "decode", *more, "get_server_info.json")]
        ),
        "sglang 0.5.23 single": Deployment([read("server", *single)]),
        "vllm 0.32.0 single": Deployment([read("engine", *vllm)]),
        "vllm 0.32.0 developer": Deployment([read("engine", "vllm-0.32.0-single/server_info_devmode.http")]),
        "vllm 0.32.0 nixl pair": Deployment([p, d]),
    }


CAPTURES = (
    "sglang 0.5.20 pair", "sglang 0.5.23 pair", "sglang 0.5.23 single", "vllm 0.32.0 single", "vllm 0.32.0 developer", "vllm 0.32.0 nixl pair",
)  # fmt: skip

# Nodes of a pair in the order prefill, decode. In the NIXL pair both have kv_role kv_both, so there are two pairs: p -> d and d -> p.
TABLE: dict[str, tuple[str, ...]] = {
    # Prefill's pool is 2,048 and decode's 8,192, the single server's 2,048; context_len is 8,192 everywhere. vLLM has its own rule.
    "CAP001": ("FP", "FP", "F", "-", "-", "-"),
    # 2,048 < 8,192; vLLM's pools are 46,592 and 46,592 tokens for a max_model_len of 4,096.
    "CAP002": ("F", "F", "-", "-", "-", "PP"),
    # max_req_input_len 2,042, page_size 16: 2,031 (single: 2,032) to 2,041 never start. Asked of prefill and of servers that serve alone.
    "CAP003": ("F", "F", "F", "-", "-", "-"),
    # max_req_input_len 8,186, num_reserved_decode_tokens 512: 7,681 to 8,185 are never taken. Asked of decode.
    "CAP004": ("F", "F", "-", "-", "-", "-"),
    # allow_auto_truncate is false.
    "CAP005": ("PP", "PP", "P", "-", "-", "-"),
    # There is no baseline, so nothing has changed.
    "CAP006": ("-", "-", "-", "-", "-", "-"),
    # Version rules are for halves: SGLang alone and vLLM are not asked. 0.5.20 refuses over-long prompts (pd_over_*.json: 400).
    "VER001": ("PP", "PP", "-", "-", "-", "-"),
    # 0.5.20: its log has "Prefill batch, #new-token: 1" after each refusal, a step on the placeholder; 0.5.23 has none.
    "VER002": ("FF", "PP", "-", "-", "-", "-"),
    # 0.5.20's default is off, and nothing in the capture says that it was turned on.
    "VER003": ("FF", "PP", "-", "-", "-", "-"),
    "VER004": ("FF", "PP", "-", "-", "-", "-"),
    # disaggregation_transfer_backend is mooncake.
    "VER005": ("FF", "PP", "-", "-", "-", "-"),
    # enable_hierarchical_cache is false, and there is one rank. Asked of decode.
    "VER006": ("P", "P", "-", "-", "-", "-"),
    # 0.5.20's metrics have no decode_deferred_kv_release_total, 0.5.23's have.
    "VER007": ("F", "P", "-", "-", "-", "-"),
    "VER008": ("P", "P", "-", "-", "-", "PP"),
    # No log says which Mooncake or NIXL is installed, and there is no manifest.
    "VER009": ("U", "U", "-", "-", "-", "UU"),
    # The environment is not in what was captured. 0.5.23's decode has counted two deferred releases, so it is on there.
    "REL001": ("UU", "UP", "-", "-", "-", "-"),
    "REL002": ("U", "U", "-", "-", "-", "-"),
    "REL003": ("U", "U", "-", "-", "-", "-"),
    # 0.5.23: outcome drained 2, and 2 observations in all. Asked of decode.
    "REL004": ("U", "P", "-", "-", "-", "-"),
    # disaggregation_enable_kv_checksum is false in 0.5.23, and is no option of 0.5.20: off in both halves.
    "DET001": ("P", "P", "-", "-", "-", "-"),
    "DET002": ("P", "P", "-", "-", "-", "-"),
    "DET003": ("PP", "PP", "-", "-", "-", "-"),
    "DET004": ("PP", "PP", "-", "-", "-", "-"),
    # kv_canary is none.
    "DET005": ("FF", "FF", "F", "-", "-", "-"),
    "DET006": ("PP", "PP", "P", "-", "-", "-"),
    "DET007": ("PP", "PP", "P", "-", "-", "-"),
    "DET008": ("PP", "PP", "P", "-", "-", "-"),
    "DET009": ("PP", "PP", "-", "-", "-", "-"),
    "DET010": ("F", "F", "-", "-", "-", "-"),
    "DET011": ("P", "P", "-", "-", "-", "-"),  # 0.5.20 has no checksum; in 0.5.23 all ranks agree
    # page_size 16 in both halves. vLLM's logs do not say the block size; only decode's metrics do (128).
    "PAIR001": ("P", "P", "-", "-", "-", "UU"),
    # "KV Cache is allocated. dtype: torch.bfloat16" in both logs. vLLM's kv_cache_dtype is auto, which is the model's.
    "PAIR002": ("P", "P", "-", "-", "-", "UU"),
    "PAIR003": ("P", "P", "-", "-", "-", "PP"),
    # revision is null, and the model is a folder.
    "PAIR004": ("P", "P", "-", "-", "-", "PP"),
    "PAIR005": ("P", "P", "-", "-", "-", "PP"),
    "PAIR006": ("P", "P", "-", "-", "-", "PP"),
    "PAIR007": ("P", "P", "-", "-", "-", "PP"),
    # 93,184 (eager) and 46,592 tokens (the others) for 4,096.
    "VLLM001": ("-", "-", "-", "P", "P", "PP"),
    # kv_load_failure_policy='fail' in both logs, and in developer mode's configuration, whose connector of its own has kv_role kv_both. A server that
    # hands nothing over is not asked.
    "VLLM002": ("-", "-", "-", "-", "P", "PP"),
    # kv_connector_extra_config={}: the lease is 30 s by default. Decode's queue: all requests below 0.8 s; of p there are no metrics.
    "VLLM003": ("-", "-", "-", "-", "-", "PU"),
    # p's log: "Releasing expired KV blocks for request ...", once. d's metrics: nixl_num_kv_expired_reqs_total 0. The developer server's
    # metrics were not captured.
    "VLLM004": ("-", "-", "-", "-", "U", "FP"),
    # p's log: "Potentially invalid KV blocks for unrecognized request ...", once. d's metrics: nixl_num_notifications_after_expiry_total 0.
    "VLLM005": ("-", "-", "-", "-", "U", "FP"),
    # d's metrics: nixl_num_failed_transfers_total 0; of p there are none.
    "VLLM006": ("-", "-", "-", "-", "U", "UP"),
    # VLLM_NIXL_SIDE_CHANNEL_HOST is in no log.
    "VLLM007": ("-", "-", "-", "-", "-", "UU"),
    # The list of routes in each log has none of developer mode; /server_info?config_format=json answers only with it.
    "VLLM008": ("-", "-", "-", "P", "F", "PP"),
    # There is no proxy.
    "PRX001": ("-", "-", "-", "-", "-", "-"),
    "PRX002": ("-", "-", "-", "-", "-", "-"),
    "PRX003": ("-", "-", "-", "-", "-", "-"),
    "PRX004": ("-", "-", "-", "-", "-", "-"),
    "PRX005": ("-", "-", "-", "-", "-", "-"),
    # "CommonKVBootstrapServer started successfully on 127.0.0.1:8998" in prefill's log. vLLM's side channel is in no log.
    "EXP001": ("P", "P", "-", "-", "U", "UU"),
    # No key, and all listen on 127.0.0.1. /server_info of developer mode does not say where it listens.
    "EXP002": ("PP", "PP", "P", "P", "U", "PP"),
    "EXP003": ("PP", "PP", "P", "-", "-", "-"),
    "EXP004": ("PP", "PP", "P", "P", "U", "PP"),
    # trust_remote_code is false.
    "EXP005": ("PP", "PP", "P", "P", "P", "PP"),
    # Neither detector is on.
    "COV001": ("PP", "PP", "P", "-", "-", "-"),
    "COV002": ("P", "P", "-", "-", "-", "-"),
    "HRM001": ("-", "-", "-", "-", "-", "-"),
    "HRM002": ("-", "-", "-", "-", "-", "-"),
    "HRM003": ("-", "-", "-", "-", "-", "-"),
    "HRM004": ("-", "-", "-", "-", "-", "-"),
    "HRM005": ("-", "-", "-", "-", "-", "-"),
    "HRM006": ("-", "-", "-", "-", "-", "-"),
    # All sources of a node are of one start.
    "SRC001": ("PP", "PP", "P", "P", "P", "PP"),
}  # fmt: skip


@pytest.fixture(scope="module")
def read_captures() -> dict[str, Deployment]:
    return deployments()


def cells() -> Iterable[tuple[str, str, str]]:
    return (
        (code, name, letters)
        for code, row in TABLE.items()
        for name, letters in zip(CAPTURES, row, strict=True)
    )


@pytest.mark.parametrize(
    ("code", "name", "expected"), [pytest.param(*cell, id=f"{cell[0]}-{cell[1]}") for cell in cells()]
)
def test_a_rule_says_of_a_capture_what_the_capture_shows(
    code: str, name: str, expected: str, read_captures: dict[str, Deployment]
) -> None:
    verdicts = asked(code, read_captures[name])
    assert "".join(LETTERS[verdict.state] for verdict in verdicts) == expected.replace("-", ""), [
        verdict.message for verdict in verdicts
    ]


def test_every_rule_stands_in_the_table() -> None:
    assert set(TABLE) == set(RULES)


def messages(code: str, deployment: Deployment) -> list[str]:
    return [verdict.message for verdict in asked(code, deployment)]


def test_the_numbers_of_the_captures_stand_in_the_findings(read_captures: dict[str, Deployment]) -> None:
    old, new, single = (read_captures[name] for name in CAPTURES[:3])
    assert "holds 2,048 tokens and the advertised context is 8,192" in messages("CAP001", new)[0]
    for pair in (old, new):
        assert messages("CAP003", pair)[0].startswith("prompts of 2,031 to 2,041 tokens are accepted")
        assert messages("CAP004", pair)[0].startswith("prompts of 7,681 to 8,185 tokens are accepted")
    assert messages("CAP003", single)[0].startswith("prompts of 2,032 to 2,041 tokens are accepted")
    assert messages("VER002", old)[0].startswith("SGLang 0.5.20 takes requests")


def test_a_capture_that_was_read_is_not_asked_for_again(read_captures: dict[str, Deployment]) -> None:
    """The answers, metrics and logs of both halves are there, and no manifest."""
    new = read_captures["sglang 0.5.23 pair"]
    assert messages("REL002", new) == [
        "prefill: how many pages one transfer batch has at most (0: no bound) is not known; its manifest (environment) would say it"
    ]
    old = read_captures["sglang 0.5.20 pair"]
    assert messages("REL004", old) == [
        "decode: how many releases ended by time-out is not known; its /metrics and its log were read and do not say it"
    ]
    assert messages("PAIR001", read_captures["vllm 0.32.0 nixl pair"])[0] == (
        "p: the page size in tokens is not known; its /metrics or its command line or manifest would say it"
    )


def test_with_its_environment_the_023_pair_is_judged_by_what_was_measured(
    read_captures: dict[str, Deployment],
) -> None:
    """2,048 tokens have 0.044 GiB: 23,220 bytes a token. The one transfer took 17.6 ms for 2.46 MiB: 146.8 MB/s. The longest prompt of 2,041 tokens is
    128 pages, 47.6 MB: 0.32 s."""
    prefill, decode = (Sheet(node.name) for node in read_captures["sglang 0.5.23 pair"].nodes)
    for sheet, node in zip((prefill, decode), read_captures["sglang 0.5.23 pair"].nodes, strict=True):
        sheet.take(node)
    prefill.add(facts.BATCH_PAGES, 0, "the manifest")
    decode.add(facts.RELEASE_TIMEOUT, 0.2, "the manifest")
    deployment = Deployment([prefill, decode])
    (verdict,) = asked("REL003", deployment)
    assert (
        verdict.message
        == "a batch of 128 pages (48 MB) takes 0.32 s at the measured 147 MB/s, and decode releases after 0.2 s"
    )
    assert asked("REL002", deployment)[0].state == "finding"
