"""What engines answer and print is read to the values that stand in it: real output of SGLang 0.5.20 and 0.5.23 and vLLM 0.32.0, trimmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hermetic.check import facts
from hermetic.check.facts import FACTS, Sheet
from hermetic.check.readers import engine_files, prometheus, values
from hermetic.check.readers.reading import Reading

CAPTURES = Path(__file__).parent / "captures"
MODEL = "/models/smollm2"


def read(path: str, content: bytes | None = None) -> Reading:
    """As `hermetic check FILE` does."""
    body = (CAPTURES / path).read_bytes() if content is None else content
    for reader in (engine_files.read_json, engine_files.read_metrics):
        if (reading := reader(path, body)) is not None:
            return reading
    raise AssertionError(f"{path} is neither JSON of an engine nor metrics")


def one(reading: Reading) -> Sheet:
    assert reading.unread == []
    (sheet,) = reading.sheets
    return sheet


def said(sheet: Sheet) -> dict[str, Any]:
    """Every fact with its one value."""
    return {name: FACTS[name].several([s.value for s in seen]) if (FACTS[name].several and len(seen) > 1) else sheet[FACTS[name]]
            for name, seen in sheet.facts()}  # fmt: skip


# What stands in both halves' and the single server's answers alike.
OPTIONS = dict(
    engine="sglang", model=MODEL, served=MODEL, page=16, reserve=512, truncates=False, tp=1, pp=1, canary="none",
    host="127.0.0.1", api_key=False, admin_key=False, remote_code=False, checksum=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "port", "expected"),
    [
        ("sglang-0.5.23-pd/prefill.server_info.json", 31100,
         dict(version="0.5.23", role="prefill", pool=2048, longest=2042, memory_fraction=0.719, transport="mooncake")),
        ("sglang-0.5.23-pd/decode.server_info.json", 31200,
         dict(version="0.5.23", role="decode", pool=8192, longest=8186, memory_fraction=0.846, transport="mooncake", restores=False)),
        ("sglang-0.5.23-pd/decode.get_server_info.json", 31200,
         dict(version="0.5.23", role="decode", pool=8192, longest=8186, memory_fraction=0.846, transport="mooncake", restores=False)),
        ("sglang-0.5.20-pd/prefill.server_info.json", 31100,
         dict(version="0.5.20", role="prefill", pool=2048, longest=2042, memory_fraction=0.811, transport="mooncake")),
        ("sglang-0.5.20-pd/decode.server_info.json", 31200,
         dict(version="0.5.20", role="decode", pool=8192, longest=8186, memory_fraction=0.811, transport="mooncake", restores=False)),
        ("sglang-0.5.23-single/server_info.json", 31000,
         dict(version="0.5.23", role="alone", pool=2048, longest=2042, memory_fraction=0.719)),
    ],
)  # fmt: skip
def test_sglangs_server_info_says_what_a_node_runs_with(
    path: str, port: int, expected: dict[str, Any]
) -> None:
    sheet = one(read(path))
    assert said(sheet) == OPTIONS | expected
    assert sheet.address == ("127.0.0.1", port)


def test_a_checksum_that_0_5_20_does_not_have_is_said_to_be_off_for_that_reason() -> None:
    assert "no such option" in one(read("sglang-0.5.20-pd/decode.server_info.json")).where(facts.CHECKSUM)
    other = (
        (CAPTURES / "sglang-0.5.20-pd/decode.server_info.json").read_bytes().replace(b'"0.5.20"', b'"0.5.2"')
    )
    assert facts.CHECKSUM not in one(read("older.json", other))
    patched = other.replace(b'"0.5.2"', b'"0.5.20","disaggregation_enable_kv_checksum":true')
    assert one(read("patched.json", patched))[facts.CHECKSUM] is True


@pytest.mark.parametrize(
    ("radix", "host", "restores"),
    [(b"true", b"true", [True]), (b"true", b"false", [False]), (b"false", b"null", [False]), (b"true", b"null", [])],
)  # fmt: skip
def test_whether_decode_restores_from_the_host_takes_both_of_its_options(
    radix: bytes, host: bytes, restores: list[bool]
) -> None:
    body = (CAPTURES / "sglang-0.5.23-pd/decode.server_info.json").read_bytes()
    radix_was = b'"disaggregation_decode_enable_radix_cache":false'
    assert radix_was in body
    both = b'"disaggregation_decode_enable_radix_cache":%s,"enable_hierarchical_cache":%s' % (radix, host)
    body = body.replace(radix_was, both)
    assert one(read("info.json", body)).values(facts.RESTORES) == restores


def test_mooncake_over_tcp_is_told_as_mooncake() -> None:
    body = (CAPTURES / "sglang-0.5.23-pd/decode.server_info.json").read_bytes()
    changed = body.replace(b'"mooncake"', b'"mooncake_tcp"')
    assert changed != body
    assert one(read("info.json", changed))[facts.TRANSPORT] == "mooncake"


def test_the_smallest_pool_of_several_ranks_counts() -> None:
    body = (CAPTURES / "sglang-0.5.23-pd/decode.server_info.json").read_bytes()
    changed = body.replace(b'"token_capacity":8192', b'"token_capacity":4096')
    assert changed != body
    assert one(read("info.json", changed))[facts.POOL] == 4096


def test_a_key_is_known_to_be_set_and_its_value_is_nowhere() -> None:
    body = (CAPTURES / "sglang-0.5.23-pd/decode.server_info.json").read_bytes()
    sheet = one(read("info.json", body.replace(b'"api_key":null', b'"api_key":"sk-secret"')))
    assert sheet[facts.API_KEY] is True
    assert "sk-secret" not in repr(sheet)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("sglang-0.5.23-pd/prefill.v1_loads.json", dict(engine="sglang", version="0.5.23", role="prefill", pool=2048)),
        ("sglang-0.5.23-pd/decode.v1_loads.json", dict(engine="sglang", version="0.5.23", role="decode", pool=8192)),
        ("sglang-0.5.23-single/v1_loads.json", dict(engine="sglang", version="0.5.23", role="alone", pool=2048)),
        ("sglang-0.5.23-pd/prefill.model_info.json", dict(engine="sglang", model=MODEL, served=MODEL, role="prefill")),
        ("sglang-0.5.23-pd/decode.model_info.json", dict(engine="sglang", model=MODEL, served=MODEL, role="decode")),
        ("sglang-0.5.23-single/model_info.json", dict(engine="sglang", model=MODEL, served=MODEL, role="alone")),
        ("sglang-0.5.23-single/v1_models.json", dict(engine="sglang", served=MODEL, context=8192)),
        ("vllm-0.32.0-single/models.http", dict(engine="vllm", served="smollm2", model=MODEL, context=4096)),
        ("vllm-0.32.0-single/version.http", dict(version="0.32.0")),
    ],
)  # fmt: skip
def test_the_smaller_answers_say_what_stands_in_them(path: str, expected: dict[str, Any]) -> None:
    assert said(one(read(path))) == expected


def test_the_speed_of_a_warm_up_is_no_speed_and_that_of_work_is() -> None:
    # 104 tokens in 362,389 microseconds, most of them the first request's: not said. 2,000,000 in 250 s: 8,000 a second.
    body = (CAPTURES / "sglang-0.5.23-pd/prefill.v1_loads.json").read_bytes()
    busy = body.replace(b'"total_prefill_uncached_tokens":104', b'"total_prefill_uncached_tokens":2000000')
    busy = busy.replace(b'"total_prefill_busy_us":362389', b'"total_prefill_busy_us":250000000')
    busy = busy.replace(b'"kv_transfer_speed_gb_s":0.0', b'"kv_transfer_speed_gb_s":1.5')
    sheet = one(read("loads.json", busy))
    assert sheet[facts.PREFILL_SPEED] == 8000.0
    assert sheet[facts.TRANSFER_SPEED] == 1.5 * 1024**3


# 23,040 bytes a token: 30 layers, K and V, 3 heads of 64 values of 2 bytes; the pool and one page of 16 more.
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("sglang-0.5.23-pd/prefill.metrics.prom", dict(role="prefill", pool=2048, kv_bytes=2064 * 23040, served_requests=5)),
        ("sglang-0.5.23-pd/decode.metrics.prom",
         dict(role="decode", pool=8192, kv_bytes=8208 * 23040, failed_transfers=2, released=2, released_by_timeout=0, served_requests=4)),
        ("sglang-0.5.20-pd/prefill.metrics.prom", dict(role="prefill", pool=2048, kv_bytes=2064 * 23040, served_requests=5)),
        ("sglang-0.5.20-pd/decode.metrics.prom", dict(role="decode", pool=8192, kv_bytes=8208 * 23040, failed_transfers=3, served_requests=5)),
        ("sglang-0.5.23-single/metrics.prom", dict(role="alone", pool=2048, kv_bytes=2064 * 23040, served_requests=6 + 2)),
    ],
)  # fmt: skip
def test_sglangs_metrics_say_pool_context_and_what_became_of_transfers(
    path: str, expected: dict[str, Any]
) -> None:
    told = said(one(read(path)))
    told.pop("transfer_speed", None)
    assert told == dict(engine="sglang", context=8192, page=16) | expected


@pytest.mark.parametrize(
    ("version", "gib_a_second"), [("0.5.23", 0.1367172566810857), ("0.5.20", 0.01179618650624551)]
)
def test_the_speed_of_transfers_is_what_its_own_histogram_says(version: str, gib_a_second: float) -> None:
    # One transfer, so that sglang:kv_transfer_speed_gb_s_sum, which is not read, is the speed.
    sheet = one(read(f"sglang-{version}-pd/prefill.metrics.prom"))
    assert sheet[facts.TRANSFER_SPEED] == pytest.approx(gib_a_second * 1024**3, rel=1e-9)


def test_without_transfers_there_is_no_speed_of_them() -> None:
    for size in (0.0, 5.0):
        numbers = {"total_mb_sum": size, "latency_ms_sum": 0.0, "latency_ms_count": 0.0}
        body = "".join(
            f'sglang:kv_transfer_{name}{{engine_type="prefill"}} {value}\n' for name, value in numbers.items()
        )
        assert said(one(read("m.prom", body.encode()))) == dict(engine="sglang", role="prefill")


def test_a_metric_without_the_labels_of_the_others_is_the_same_nodes() -> None:
    body = b'sglang:max_total_num_tokens{engine_type="decode"} 5.0\nsglang:context_len 7.0\n'
    assert said(one(read("m.prom", body))) == dict(engine="sglang", role="decode", pool=5, context=7)
    both = read("m.prom", body + b'sglang:page_size{engine_type="prefill"} 1.0\n')  # whose it is is not known
    assert [sheet.values(facts.CONTEXT) for sheet in both.sheets] == [[], [7], []]


def test_an_instance_that_a_collector_adds_is_the_nodes_address() -> None:
    body = (
        b'sglang:page_size{instance="10.0.0.1:30000"} 1.0\nsglang:page_size{instance="10.0.0.2:30000"} 64.0\n'
    )
    reading = read("federated", body)
    assert {(sheet.address, sheet[facts.PAGE]) for sheet in reading.sheets} == {
        (("10.0.0.1", 30000), 1),
        (("10.0.0.2", 30000), 64),
    }


DECODE = "sglang-0.5.23-pd/decode.metrics.prom"
OUTCOME = (
    b'sglang:decode_deferred_kv_release_total{engine_type="decode",model_name="m",moe_ep_rank="0",outcome="timeout",pp_rank="0",'
    b'tp_rank="0"} 3.0\n'
)


def test_releases_that_ended_by_time_out_are_counted() -> None:
    body = (CAPTURES / DECODE).read_bytes() + OUTCOME
    sheet = one(read("m.prom", body))
    assert sheet[facts.RELEASED_BY_TIMEOUT] == 3


def test_no_time_out_is_only_said_where_all_releases_are_accounted_for() -> None:
    # Three releases in the histogram and two by outcome: the third's line is missing.
    body = (CAPTURES / DECODE).read_bytes()
    parts = body.split(b"sglang:decode_deferred_kv_release_seconds_count", 1)
    changed = (
        parts[0]
        + b"sglang:decode_deferred_kv_release_seconds_count"
        + parts[1].replace(b" 2.0\n", b" 3.0\n", 1)
    )
    sheet = one(read("m.prom", changed))
    assert facts.RELEASED not in sheet
    assert facts.RELEASED_BY_TIMEOUT not in sheet


def test_metrics_of_both_halves_in_one_file_are_two_nodes() -> None:
    both = (CAPTURES / "sglang-0.5.23-pd/prefill.metrics.prom").read_bytes() + (
        CAPTURES / DECODE
    ).read_bytes()
    reading = read("both.prom", both)
    assert {(sheet[facts.ROLE], sheet[facts.POOL]) for sheet in reading.sheets} == {
        ("prefill", 2048),
        ("decode", 8192),
    }


NIXL = dict(
    engine="vllm", page=128, pool=46592, waited=0.8, transfers=2, failed_transfers=0, expired=0, read_late=0, transfer_speed=1.769472e07 / 0.021829,
)  # fmt: skip


def test_vllms_metrics_say_pool_waiting_and_transfers() -> None:
    assert said(one(read("vllm-0.32.0-nixl-pd/metrics_nixl_d.txt"))) == pytest.approx(NIXL)


@pytest.mark.parametrize(
    ("path", "waited", "tokens", "seconds"),
    [
        # The five requests of the idle server waited at most 0.3 s, the first bound; 181 of 181 at most 10 s, 164 at most 5 s.
        ("vllm-0.32.0-single/metrics_idle_eager.txt", 0.3, 4207, 55.199335607999956),
        ("vllm-0.32.0-single/metrics_after_load_compiled.txt", 10.0, 56192, 502.7919113789976),
    ],
)
def test_vllms_queue_and_prefill_times_are_read(
    path: str, waited: float, tokens: int, seconds: float
) -> None:
    told = said(one(read(path)))
    assert told == dict(engine="vllm", page=128, pool=93184, waited=waited, prefill_speed=tokens / seconds)


def test_prompts_that_came_from_another_node_or_are_few_are_no_measure_of_prefill() -> None:
    came = (CAPTURES / "vllm-0.32.0-nixl-pd/metrics_nixl_d.txt").read_bytes()
    more = came.replace(
        b'kv_computed_tokens_sum{engine="0",model_name="smollm2"} 748.0',
        b'kv_computed_tokens_sum{engine="0",model_name="smollm2"} 7480.0',
    )
    few = (CAPTURES / "vllm-0.32.0-single/metrics_idle_eager.txt").read_bytes()
    fewer = few.replace(
        b'kv_computed_tokens_sum{engine="0",model_name="smollm2"} 4207.0',
        b'kv_computed_tokens_sum{engine="0",model_name="smollm2"} 420.0',
    )
    assert more != came
    assert fewer != few
    for body in (more, fewer):
        assert facts.PREFILL_SPEED not in one(read("m.txt", body))


def test_a_histogram_without_its_last_part_says_no_longest_wait() -> None:
    body = (CAPTURES / "vllm-0.32.0-single/metrics_idle_eager.txt").read_bytes()
    lines = [
        line
        for line in body.splitlines(keepends=True)
        if b"queue_time_seconds_bucket" not in line or b"+Inf" not in line
    ]
    assert facts.WAITED not in one(read("m.txt", b"".join(lines)))


def test_of_a_wait_beyond_the_histogram_only_its_end_is_known() -> None:
    body = (CAPTURES / "vllm-0.32.0-single/metrics_idle_eager.txt").read_bytes()
    longer = body.replace(b'le="+Inf",model_name="smollm2"} 5.0', b'le="+Inf",model_name="smollm2"} 6.0')
    assert one(read("m.txt", longer))[facts.WAITED] == 7680.0


def test_a_read_after_the_pages_expired_is_told_from_pages_that_expired() -> None:
    body = (CAPTURES / "vllm-0.32.0-nixl-pd/metrics_nixl_d.txt").read_bytes()
    late = body.replace(
        b'nixl_num_notifications_after_expiry_total{engine="0",model_name="smollm2"} 0.0',
        b'nixl_num_notifications_after_expiry_total{engine="0",model_name="smollm2"} 2.0',
    )
    assert late != body
    assert one(read("m.txt", late))[facts.READ_LATE] == 2
    assert one(read("m.txt", late))[facts.EXPIRED] == 0


def test_without_the_tokens_a_pool_is_blocks_times_their_size() -> None:
    body = b'vllm:cache_config_info{block_size="16",cache_dtype="fp8_e5m2",num_gpu_blocks="4096"} 1.0\n'
    sheet = one(read("m.txt", body))
    assert (sheet[facts.POOL], sheet[facts.PAGE], sheet[facts.KV_DTYPE]) == (65536, 16, "fp8_e5m2")


DEVELOPER = dict(
    engine="vllm", version="0.32.0", developer=True, model=MODEL, served="smollm2", context=4096, tp=1, pp=1, remote_code=False,
)  # fmt: skip


def test_vllms_server_info_shows_developer_mode_and_the_whole_configuration() -> None:
    assert said(one(read("vllm-0.32.0-single/server_info_devmode.http"))) == DEVELOPER | dict(
        page=128, pool=46592, role="both", transport="myconn", load_failure="fail"
    )


def test_vllms_server_info_as_text_says_the_same_but_less() -> None:
    assert said(one(read("vllm-0.32.0-single/server_info_text.json"))) == DEVELOPER


@pytest.mark.parametrize(
    ("extra", "expected"),
    [(b"{}", (30.0, "default of 0.32.0")), (b'{"kv_lease_duration":120}', (120.0, "kv_lease_duration"))],
)
def test_the_lease_is_what_is_given_or_the_default_of_the_version_that_was_read(
    extra: bytes, expected: tuple[float, str]
) -> None:
    body = (
        (CAPTURES / "vllm-0.32.0-single/server_info_devmode.http")
        .read_bytes()
        .replace(b"MyConn", b"NixlConnector")
    )
    sheet = one(
        read(
            "info.json",
            body.replace(b'"kv_connector_extra_config":{}', b'"kv_connector_extra_config":' + extra),
        )
    )
    assert sheet[facts.LEASE] == expected[0]
    assert expected[1] in sheet.where(facts.LEASE)
    assert sheet[facts.INNER_HOST] == "localhost"
    unknown = body.replace(b'"vllm_version":"0.32.0"', b'"vllm_version":"0.40.0"')
    assert facts.LEASE not in one(read("info.json", unknown))


HERMETIC_MODELS = b"""{"object": "list", "data": [{"id": "smollm2", "object": "model", "created": 1, "owned_by": "hermetic", "root": "smollm2",
 "parent": null, "max_model_len": 256, "hermetic": {"window": 8192, "page_size": 16, "pool_tokens": {"prefill-0": 256, "decode-0": 512},
 "mode": "disaggregated", "fingerprint": "f", "numeric": "weights=bf16 compute=bf16 kv=bf16", "verify": "landing", "page_bytes": 4096,
 "kv_bytes_per_token": 256}}]}"""


def test_hermetics_model_list_says_its_pools_and_what_it_verifies() -> None:
    assert said(one(read("models.json", HERMETIC_MODELS))) == dict(
        engine="hermetic",
        remote_code=False,
        served="smollm2",
        context=256,
        role="both",
        page=16,
        pool=256,
        verify="landing",
        kv_dtype="bfloat16",
    )


def test_a_pool_that_is_not_said_for_every_worker_is_not_known() -> None:
    unknown = HERMETIC_MODELS.replace(b'"decode-0": 512', b'"decode-0": null')
    assert facts.POOL not in one(read("models.json", unknown))


HERMETIC_METRICS = b"""# HELP hermetic_requests_total Generation requests by how they ended
# TYPE hermetic_requests_total counter
hermetic_requests_total{endpoint="/v1/completions",outcome="completed",tenant="local"} 2.0
hermetic_requests_total{endpoint="/v1/completions",outcome="completed",tenant="alice"} 3.0
hermetic_requests_total{endpoint="/v1/completions",outcome="failed",tenant="local"} 4.0
hermetic_requests_verified_total{level="landing",worker="decode-0"} 4.0
hermetic_requests_verified_total{level="landing",worker="decode-1"} 1.0
hermetic_requests_verified_total{level="read",worker="decode-0"} 2.0
hermetic_pages{state="free",worker="decode-0"} 12.0
hermetic_pages{state="quarantined",worker="decode-0"} 1.0
hermetic_pages{state="quarantined",worker="prefill-0"} 2.0
hermetic_releases_total{outcome="drained",worker="decode-0"} 7.0
hermetic_releases_total{outcome="fenced",worker="decode-0"} 1.0
hermetic_releases_total{outcome="quarantined",worker="decode-0"} 9.0
hermetic_context_advertised_tokens 256.0
hermetic_disabled 1.0
hermetic_integrity_failures_total 3.0
"""


def test_hermetics_metrics_say_what_was_verified_and_what_went_wrong() -> None:
    assert said(one(read("metrics", HERMETIC_METRICS))) == dict(
        engine="hermetic",
        remote_code=False,
        served_requests=5,
        verified=5,
        quarantined=3,
        released=8,
        context=256,
        disabled=True,
        integrity_failures=3,
    )


# ------------------------------------------------------------------------------------ what cannot be read


def test_a_cut_line_of_metrics_costs_itself_and_is_named() -> None:
    whole = (CAPTURES / DECODE).read_bytes()
    at = whole.index(b"sglang:page_size{")
    cut = whole[: whole.index(b"} 16.0", at) + 4]  # "... 1" of 16.0
    reading = read("m.prom", cut)
    assert facts.PAGE not in reading.sheets[0]
    assert reading.sheets[0][facts.POOL] == 8192
    (unread,) = reading.unread
    assert unread.part
    assert f"line {cut.count(bytes([10])) + 1} " in unread.why


@pytest.mark.parametrize(
    "line",
    [
        b'sglang:page_size{engine_type="decode} 16.0\n',
        b"sglang:page_size 1_6\n",
        b"\x00\xff\n",
        b"<html>\n",
        b'node_load1{host="x" 5\n',
    ],
)
def test_a_damaged_line_in_the_middle_costs_only_itself(line: bytes) -> None:
    whole = (CAPTURES / DECODE).read_bytes()
    reading = read("m.prom", whole[: whole.index(b"\n") + 1] + line + whole[whole.index(b"\n") + 1 :])
    assert said(reading.sheets[0]) == said(one(read("m.prom", whole)))
    assert [unread.part for unread in reading.unread] == [True]
    assert "line 2 " in reading.unread[0].why


def test_words_with_numbers_after_them_are_no_metrics() -> None:
    assert engine_files.read_metrics("x", b"total 5\nfree 7\n") is None


def test_metrics_of_another_program_are_not_an_engines() -> None:
    reading = read(
        "node.prom", b"# HELP node_load1 1m load average.\n# TYPE node_load1 gauge\nnode_load1 0.21\n"
    )
    assert reading.sheets == []
    assert "no metric of SGLang" in reading.unread[0].why


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("vllm-0.32.0-single/server_info_get.http", "status 404"),
        ("vllm-0.32.0-single/err_overlen.http", "status 400"),
        ("sglang-0.5.23-single/weight_version.json", "Not Found"),
    ],
)
def test_an_answer_that_says_nothing_of_the_node_is_named_so(path: str, word: str) -> None:
    reading = read(path)
    assert reading.sheets == []
    assert word in reading.unread[0].why


def test_json_that_is_no_engines_is_left_to_others() -> None:
    for content in (
        b'{"services": {}}',
        b"[1]",
        b"{",
        b"not json",
        b"",
        (CAPTURES / "sglang-0.5.23-single/gen_ok.json").read_bytes(),
    ):
        assert engine_files.read_json("x", content) is None
    assert engine_files.read_json("x", (CAPTURES / "vllm-0.32.0-single/chat.http").read_bytes()) is None


def test_a_model_list_of_another_engine_is_named_so() -> None:
    reading = read("m.json", b'{"object":"list","data":[{"id":"x","owned_by":"llamacpp","max_model_len":5}]}')
    assert reading.sheets == []
    assert "llamacpp" in reading.unread[0].why


def test_an_adapter_is_not_the_model() -> None:
    body = (
        b'{"object":"list","data":[{"id":"lora","owned_by":"vllm","parent":"base","max_model_len":1},'
        b'{"id":"base","owned_by":"vllm","parent":null,"max_model_len":4096}]}'
    )
    assert one(read("m.json", body))[facts.SERVED] == "base"


def test_headers_after_a_redirect_are_skipped_too() -> None:
    body = (
        b"HTTP/1.1 307 Temporary Redirect\r\nlocation: /version\r\n\r\nHTTP/2 200 \r\n\r\n"
        + b'{"version":"0.32.0"}'
    )
    assert one(read("v.http", body))[facts.VERSION] == "0.32.0"


def test_deeply_nested_json_is_no_crash() -> None:
    assert engine_files.read_json("x", b'{"loads":' + b"[" * 100_000) is not None


# ------------------------------------------------------------------------------------ values


def test_pythons_notation_is_read_at_its_top_level_only() -> None:
    assert values.fields("{'a': 1, 'b': {'a': 2, 'c': '}'}, 'd': \"it's, = :\"} and more") == {
        "a": "1", "b": "{'a': 2, 'c': '}'}", "d": "\"it's, = :\"",
    }  # fmt: skip
    assert values.fields("{'a': 1, 'a': 2}") == {"a": "1"}
    assert values.fields("ServerArgs(model_path='x', tp_size=2)") == {"model_path": "'x'", "tp_size": "2"}
    assert values.fields("model='x', mode=<A.B: 0>, size=4") == {
        "model": "'x'",
        "mode": "<A.B: 0>",
        "size": "4",
    }


@pytest.mark.parametrize("cut", ["{'a': 1, 'b': 2", "ServerArgs(a=1", "a=1, b='x", "a=[1, b=2", "a=1) b=2"])
def test_what_is_cut_in_pythons_notation_is_not_read_at_all(cut: str) -> None:
    assert values.fields(cut) is None


def test_only_plain_values_are_values() -> None:
    assert values.literals({"a": "None", "b": "True", "c": "0.7", "d": "'x'", "e": "[1]", "f": "1+1", "g": "exit()", "h": "512"}) == {
        "a": None, "b": True, "c": 0.7, "d": "x", "h": 512,
    }  # fmt: skip
    assert values.literal("-" * 4000 + "1") is ...
    assert values.literal("'a\\m'") is ...
    assert values.nested("{'a': [{'b': 1}]}") == {"a": [{"b": 1}]}
    assert values.literal(None) is ...


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2048, 2048),
        ("46,592", 46592),
        (8192.0, 8192),
        (0.5, None),
        (True, None),
        (-1, None),
        ("x", None),
        (2**60, None),
        ("9" * 5000, None),
    ],
)
def test_a_count_is_a_whole_number_or_nothing(value: object, expected: int | None) -> None:
    assert values.whole(value) == expected


def test_dtypes_have_one_spelling_and_formats_stay_apart() -> None:
    assert values.kv_dtype("torch.bfloat16") == values.kv_dtype("bf16") == "bfloat16"
    assert values.kv_dtype("torch.float8_e4m3fn") == values.kv_dtype("fp8_e4m3") == "fp8_e4m3"
    assert values.kv_dtype("torch.float8_e4m3fnuz") == "float8_e4m3fnuz"
    assert values.kv_dtype("auto") is None


def test_a_connector_that_only_offloads_moves_nothing_to_another_node() -> None:
    assert [values.transport(f"{name}Connector") for name in ("Nixl", "NixlPull", "Mooncake", "P2pNccl", "Offloading")] == [
        "nixl", "nixl", "mooncake", "p2pnccl", None,
    ]  # fmt: skip
    assert values.transport("LMCacheConnectorV1") == "lmcache"


def test_addresses_are_read_with_and_without_a_scheme() -> None:
    assert values.address("http://[::1]:8000/v1") == ("::1", 8000)
    assert values.address("127.0.0.1:8998") == ("127.0.0.1", 8998)
    for nothing in ("http://host", "http://h:99999", "", None, 5, "http://[::1"):
        assert values.address(nothing) is None


def test_samples_are_summed_over_ranks_and_the_smallest_is_found() -> None:
    found = prometheus.read(b'm{r="0"} 5\nm{r="1"} 3\nm{r="2"} NaN\nother 9\n', {"m"})
    assert (
        found.least("m"),
        found.most("m"),
        found.total("m"),
        found.total("m", r="1"),
        found.total("x"),
    ) == (3, 5, 8, 3, None)
    assert found.why == ""


def test_a_line_of_blanks_is_read_in_one_pass() -> None:
    """Where blanks may stand in two places beside each other, each way to part them was tried: 100 lines took half an hour."""
    line = b"sglang:context_len" + b" " * 16_000 + b"x\n"
    found = prometheus.read(line * 100, {"sglang:context_len"})
    assert found.lines_broken == 100
    assert not prometheus.looks_like(line)


def test_samples_without_end_are_read_up_to_a_bound_and_it_is_said() -> None:
    """A server may send 16 MiB of them, for which the parser needs a minute, and all other nodes would wait."""
    line = b'sglang:context_len{tp_rank="0"} 8192\n'
    found = prometheus.read(line * (2 * 1024**2 // len(line)), {"sglang:context_len"})
    assert len(found.samples) == 1024**2 // (len(line) - 1)
    assert "and more than 1,048,576 characters of samples" in found.why
