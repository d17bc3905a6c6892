"""A deployment that is well described passes with --strict: nothing is found, and nothing is left unknown.

One for each engine. What each source says is written here; which rules it answers is for the check to show.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hermetic.check.check import CheckOptions, run
from hermetic.check.command import code
from hermetic.check.rules import RULES

# ------------------------------------------------------------------------------------ SGLang, a pair

MODEL, CONTEXT = "/models/m", 8_192
POOLS = {"prefill": 65_536, "decode": 131_072}
PORTS = {"prefill": 30_000, "decode": 30_001}
COMPOSE = """\
services:
  {role}:
    image: lmsysorg/sglang:v{version}
    network_mode: host
    command: >
      python3 -m sglang.launch_server --model-path {model} --host 127.0.0.1 --port {port} --context-length {context} --page-size 16
      --disaggregation-mode {role} --disaggregation-enable-kv-checksum --kv-canary raise --enable-metrics --api-key $$KEY
      --admin-api-key $$ADMIN
    environment:
      SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES: "1024"
"""


def sglang(folder: Path, role: str, version: str) -> None:
    """What a half answers, logs and is started with."""
    options = {
        "model_path": MODEL, "served_model_name": MODEL, "revision": None, "context_length": CONTEXT, "page_size": 16, "tp_size": 1, "pp_size": 1,
        "kv_cache_dtype": "auto", "allow_auto_truncate": False, "num_reserved_decode_tokens": 512, "mem_fraction_static": 0.8, "kv_canary": "raise",
        "disaggregation_mode": role, "disaggregation_transfer_backend": "mooncake", "disaggregation_enable_kv_checksum": True,
        "disaggregation_decode_enable_radix_cache": False, "enable_hierarchical_cache": False, "trust_remote_code": False, "api_key": "<redacted>",
        "admin_api_key": "<redacted>", "host": "127.0.0.1", "port": PORTS[role],
    }  # fmt: skip
    pool = POOLS[role]
    answer = {
        "version": version,
        "max_total_num_tokens": pool,
        "max_req_input_len": CONTEXT - 6,
        "internal_states": [{}],
    }
    (folder / f"{role}.server_info.json").write_text(json.dumps(options | answer))
    (folder / f"{role}.v1_models.json").write_text(json.dumps(
        {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "sglang", "max_model_len": CONTEXT}]}
    ))  # fmt: skip
    (folder / f"{role}.log").write_text(
        f"[2026-11-29 21:02:43] server_args={options!r}\n"
        f"[2026-11-29 21:03:00] KV Cache is allocated. dtype: torch.bfloat16, #tokens: {pool}, K size: 1.00 GB, V size: 1.00 GB\n"
        f"[2026-11-29 21:03:00] max_total_num_tokens={pool}, chunked_prefill_size=2048, context_len={CONTEXT}, available_gpu_mem=2 GB\n"
        "[2026-11-29 21:03:02] CommonKVBootstrapServer started successfully on 127.0.0.1:8998\n"
        "[2026-11-29 21:03:17] The server is fired up and ready to roll!\n"
        "[2026-11-29 21:04:18] [canary] step=100 protected_tokens=4096 sweep_passes=0 violations=0 launch_tags_active=2/6\n"
    )
    labels = f'engine_type="{role}",model_name="{MODEL}"'
    (folder / f"{role}.metrics.prom").write_text(
        f"sglang:max_total_num_tokens{{{labels}}} {pool}.0\n"
        f"sglang:num_requests_total{{{labels}}} 12.0\n"
        f"sglang:kv_cache_memory_usage_gb{{{labels}}} 2.0\n"
        f"sglang:kv_transfer_total_mb_sum{{{labels}}} 1000.0\n"
        f"sglang:kv_transfer_latency_ms_sum{{{labels}}} 1000.0\n"
        f"sglang:kv_transfer_latency_ms_count{{{labels}}} 12.0\n"
        f'sglang:decode_deferred_kv_release_total{{{labels},outcome="drained"}} 2.0\n'
        f"sglang:decode_deferred_kv_release_seconds_count{{{labels}}} 2.0\n"
    )
    (folder / f"{role}.v1_loads.json").write_text(json.dumps({
        "version": version, "loads": [{"dp_rank": 0, "max_total_num_tokens": pool, "total_prefill_uncached_tokens": 100_000,
                                        "total_prefill_busy_us": 10_000_000, "disaggregation": {"mode": role}}],
    }))  # fmt: skip
    (folder / f"{role}.compose.yaml").write_text(
        COMPOSE.format(role=role, version=version, model=MODEL, port=PORTS[role], context=CONTEXT)
    )


NGINX = """\
http {
  upstream front { server 127.0.0.1:30000; }
  server {
    listen 127.0.0.1:8080;
    location / {
      proxy_pass http://front;
      proxy_read_timeout 600s;
      proxy_next_upstream off;
    }
  }
}
"""


def pair_of_sglang(folder: Path, version: str = "0.5.23") -> None:
    sglang(folder, "prefill", version)
    sglang(folder, "decode", version)
    (folder / "nginx.conf").write_text(NGINX)


# ------------------------------------------------------------------------------------ vLLM 0.32.0, a pair over NIXL

VLLM_COMPOSE = """\
services:
  {role}:
    image: vllm/vllm-openai:v0.32.0
    network_mode: host
    command: ["{model}", --host, 127.0.0.1, --port, "{port}", --max-model-len, "{context}", --block-size, "128", --kv-cache-dtype, bfloat16,
              --revision, 1a2b3c, --kv-transfer-config, '{transfer}']
"""


def vllm(folder: Path, role: str, kv_role: str) -> None:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_connector_extra_config": {"kv_lease_duration": 120},
    }
    port = PORTS[role]
    (folder / f"{role}.log").write_text(
        "(APIServer pid=7) INFO 11-29 20:49:39 [api_utils.py:347]   version 0.32.0\n"
        f"(APIServer pid=7) INFO 11-29 20:49:39 [api_utils.py:286] non-default args: {{'model': '{MODEL}', 'host': '127.0.0.1', 'port': {port}, "
        f"'max_model_len': {CONTEXT}, 'revision': '1a2b3c', 'block_size': 128, 'kv_cache_dtype': 'bfloat16', 'kv_transfer_config': "
        f"KVTransferConfig(kv_connector='NixlConnector', kv_role='{kv_role}', kv_load_failure_policy='fail', "
        "kv_connector_extra_config={'kv_lease_duration': 120})}\n"
        f"(EngineCore pid=9) INFO 11-29 20:50:05 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='{MODEL}', revision='1a2b3c', "
        f"trust_remote_code=False, dtype=torch.bfloat16, max_seq_len={CONTEXT}, tensor_parallel_size=1, pipeline_parallel_size=1, "
        "kv_cache_dtype=bfloat16, served_model_name=m\n"
        "(EngineCore pid=9) INFO 11-29 20:50:34 [kv_cache_utils.py:2327] GPU KV cache size: 65,536 tokens, Maximum concurrency for 8,192: 8.00x\n"
        f"(APIServer pid=7) INFO 11-29 20:50:59 [entry.py:140] Starting vLLM server on http://127.0.0.1:{port}\n"
        "(APIServer pid=7) INFO 11-29 20:50:59 [launcher.py:190] Available routes are:\n"
        "(APIServer pid=7) INFO 11-29 20:50:59 [launcher.py:195] Route: /v1/models, Methods: GET\n"
        "(APIServer pid=7) INFO:     Application startup complete.\n"
    )
    (folder / f"{role}.metrics.prom").write_text(
        'vllm:cache_config_info{block_size="128",cache_dtype="bfloat16",engine="0",kv_cache_size_tokens="65536",num_gpu_blocks="512"} 1.0\n'
        'vllm:request_queue_time_seconds_bucket{engine="0",le="0.3"} 5.0\n'
        'vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf"} 5.0\n'
        'vllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n'
        'vllm:nixl_num_kv_expired_reqs_total{engine="0"} 0.0\n'
        'vllm:nixl_num_notifications_after_expiry_total{engine="0"} 0.0\n'
    )
    (folder / f"{role}.compose.yaml").write_text(
        VLLM_COMPOSE.format(role=role, model=MODEL, port=port, context=CONTEXT, transfer=json.dumps(transfer))
    )


def pair_of_vllm(folder: Path) -> None:
    vllm(folder, "prefill", "kv_producer")
    vllm(folder, "decode", "kv_consumer")


# ------------------------------------------------------------------------------------ Hermetic, both halves behind one gateway


def hermetic(folder: Path) -> None:
    (folder / "gateway.log").write_text(
        "ready http://127.0.0.1:8000  model m, context 2,048 tokens (measured: prefill-0 2,048 tokens, decode-0 4,096 tokens; model window 8,192), "
        "pages of 16, verify landing, disaggregated\n"
    )
    own = {
        "window": 8192,
        "page_size": 16,
        "pool_tokens": {"prefill-0": 2048, "decode-0": 4096},
        "mode": "disaggregated",
        "verify": "landing",
    }
    entry = {
        "id": "m",
        "object": "model",
        "owned_by": "hermetic",
        "parent": None,
        "max_model_len": 2048,
        "hermetic": own,
    }
    (folder / "gateway.v1_models.json").write_text(json.dumps({"object": "list", "data": [entry]}))
    (folder / "gateway.metrics.prom").write_text(
        'hermetic_requests_total{endpoint="/v1/completions",outcome="completed",tenant="local"} 2.0\n'
        'hermetic_requests_verified_total{level="landing",worker="decode-0"} 2.0\n'
        'hermetic_pages{state="quarantined",worker="decode-0"} 0.0\n'
        "hermetic_context_advertised_tokens 2048.0\n"
        "hermetic_disabled 0.0\n"
        "hermetic_integrity_failures_total 0.0\n"
    )


# ------------------------------------------------------------------------------------ the test

# Which families answer of each, so that what passes is no deployment of which nothing is asked.
DEPLOYMENTS: dict[str, tuple[Callable[[Path], None], int, set[str]]] = {
    "sglang": (pair_of_sglang, 2, {"CAP", "VER", "REL", "DET", "PAIR", "PRX", "EXP", "COV", "SRC"}),
    "sglang 0.5.22": (
        partial(pair_of_sglang, version="0.5.22"),
        2,
        {"CAP", "VER", "REL", "DET", "PAIR", "PRX", "EXP", "COV", "SRC"},
    ),
    "vllm": (pair_of_vllm, 2, {"CAP", "VER", "PAIR", "VLLM", "EXP", "SRC"}),
    "hermetic": (hermetic, 1, {"EXP", "HRM", "SRC"}),
}


@pytest.mark.parametrize("engine", DEPLOYMENTS)
def test_a_deployment_that_is_well_described_passes_under_strict(engine: str, tmp_path: Path) -> None:
    write, nodes, families = DEPLOYMENTS[engine]
    write(tmp_path)
    report = run(CheckOptions((str(tmp_path),)))
    assert [(one.code, one.subject, one.message) for one in report.verdicts if one.state != "passed"] == []
    assert report.unread == []
    assert code(report, strict=True) == 0
    assert len(report.nodes) == nodes
    asked = {one.code for one in report.verdicts}
    assert {RULES[one].family for one in asked} == families
    mine = {rule.code for rule in RULES.values() if engine.partition(" ")[0] in rule.engines}
    assert mine <= asked


@pytest.mark.parametrize(
    "missing",
    [
        "prefill.compose.yaml",
        "decode.compose.yaml",
        "decode.log",
        "decode.metrics.prom",
        "prefill.v1_loads.json",
    ],
)
def test_without_one_of_its_sources_something_is_unknown_and_strict_says_so(
    missing: str, tmp_path: Path
) -> None:
    pair_of_sglang(tmp_path)
    (tmp_path / missing).unlink()
    report = run(CheckOptions((str(tmp_path),)))
    assert report.of("finding") == []
    assert report.of("unknown")
    assert (code(report), code(report, strict=True)) == (0, 1)
