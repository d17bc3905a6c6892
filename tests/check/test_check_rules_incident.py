"""The deployment of the incident: the first line of the report is the one that would have stopped it."""

from __future__ import annotations

import json
from pathlib import Path

from hermetic.check.check import CheckOptions, run
from hermetic.check.output import words

CONTEXT, PREFILL, DECODE = 1_048_576, 681_280, 2_097_152


def server_info(role: str, port: int, pool: int) -> str:
    """The fields that matter of what SGLang 0.5.19 answers. Its limit is min(context, pool) - 6."""
    told = {
        "version": "0.5.19", "disaggregation_mode": role, "disaggregation_transfer_backend": "mooncake", "model_path": "/models/glm",
        "context_length": CONTEXT, "max_total_num_tokens": pool, "max_req_input_len": min(CONTEXT, pool) - 6, "page_size": 64,
        "num_reserved_decode_tokens": 512, "allow_auto_truncate": False, "kv_cache_dtype": "fp8_e4m3", "tp_size": 32, "pp_size": 1,
        "kv_canary": "none", "host": f"10.0.0.{port % 10}", "port": port, "api_key": None, "internal_states": [{}],
    }  # fmt: skip
    return json.dumps(told)


def test_the_first_line_is_prefills_pool_below_the_context(tmp_path: Path) -> None:
    (tmp_path / "decode.server_info.json").write_text(server_info("decode", 30_002, DECODE))
    (tmp_path / "prefill.server_info.json").write_text(server_info("prefill", 30_001, PREFILL))
    report = run(CheckOptions((str(tmp_path),)))
    first = report.verdicts[0]
    assert (first.code, first.state, first.severity) == ("CAP001", "finding", "error")
    assert words.message(first).endswith(
        "the KV pool holds 681,280 tokens and the advertised context is 1,048,576: a prompt of more than 681,280 tokens can never be computed here"
    )
    assert words.message(first).startswith("prefill")

    found = {(verdict.code, verdict.subject): verdict.message for verdict in report.of("finding")}
    codes = {code for code, _ in found}
    assert {"CAP002", "VER001", "VER002", "VER003", "VER004", "VER005", "VER007", "REL002"} <= codes
    # 681,280 - 64 - 1 = 681,215; the limit of the front check is 681,274
    (stuck,) = (message for (code, _), message in found.items() if code == "CAP003")
    assert stuck.startswith("prompts of 681,215 to 681,273 tokens")
    # decode's pool holds the context and the reserve
    assert "CAP004" not in codes


def test_with_the_pool_at_the_context_the_first_line_is_the_version(tmp_path: Path) -> None:
    for role, port in (("prefill", 30_001), ("decode", 30_002)):
        (tmp_path / f"{role}.server_info.json").write_text(server_info(role, port, DECODE))
    first = run(CheckOptions((str(tmp_path),))).verdicts[0]
    assert (first.code, first.severity) == ("VER001", "error")
