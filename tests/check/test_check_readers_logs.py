"""Logs: which engine's they are, what they say and on which line; wrapped, packed, cut, endless, or of another program."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hermetic.check import facts
from hermetic.check.facts import FACTS, Sheet
from hermetic.check.readers import engine_files, logs
from hermetic.check.readers.reading import Reading

CAPTURES = Path(__file__).parent / "captures"
MODEL = "/models/smollm2"
PREFILL, DECODE = "sglang-0.5.23-pd/prefill.log", "sglang-0.5.23-pd/decode.log"
VLLM = "vllm-0.32.0-nixl-pd/nixl_p.startup.log"


def capture(path: str) -> bytes:
    return (CAPTURES / path).read_bytes()


def read(content: bytes, name: str = "log") -> Reading:
    return engine_files.read_log(name, io.BytesIO(content))


def one(content: bytes) -> Sheet:
    reading = read(content)
    assert reading.unread == []
    (sheet,) = reading.sheets
    return sheet


def said(sheet: Sheet) -> dict[str, Any]:
    return {name: sheet[FACTS[name]] for name, _ in sheet.facts()}


def line_of(content: bytes, words: bytes) -> int:
    (number,) = [at for at, line in enumerate(content.split(b"\n"), 1) if words in line]
    return number


COMMON = dict(
    engine="sglang", model=MODEL, served=MODEL, context=8192, page=16, reserve=512, truncates=False, kv_dtype="bfloat16", tp=1, pp=1,
    canary="none", host="127.0.0.1", api_key=False, admin_key=False, remote_code=False, started=True,
    checksum_skipped=0, checksum_wrong=0, canary_warm_up=0, canary_wrong=0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "port", "expected"),
    [
        (PREFILL, 31100, dict(role="prefill", pool=2048, memory_fraction=0.719, transport="mooncake", checksum=False, inner_host="127.0.0.1")),
        (DECODE, 31200, dict(role="decode", pool=8192, memory_fraction=0.846, transport="mooncake", checksum=False, restores=False)),
        ("sglang-0.5.20-pd/prefill.log", 31100,
         dict(role="prefill", pool=2048, memory_fraction=0.811, transport="mooncake", inner_host="127.0.0.1")),
        ("sglang-0.5.20-pd/decode.log", 31200, dict(role="decode", pool=8192, memory_fraction=0.811, transport="mooncake", restores=False)),
        ("sglang-0.5.23-single/log", 31000, dict(role="alone", pool=2048, memory_fraction=0.719, checksum=False)),
    ],
)  # fmt: skip
def test_sglangs_log_says_what_a_node_runs_with(path: str, port: int, expected: dict[str, Any]) -> None:
    sheet = one(capture(path))
    assert said(sheet) == COMMON | expected
    assert sheet.address == ("127.0.0.1", port)


VLLM_COMMON = dict(
    engine="vllm", version="0.32.0", model=MODEL, served="smollm2", context=4096, tp=1, pp=1, host="127.0.0.1", remote_code=False,
    developer=False, started=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("path", "port", "expected"),
    [
        # Its last lines: "Releasing expired KV blocks for request ..." and "Potentially invalid KV blocks ...", once each.
        (
            VLLM,
            18211,
            dict(
                role="both",
                pool=46592,
                transport="nixl",
                load_failure="fail",
                lease=30.0,
                expired=1,
                read_late=1,
            ),
        ),
        (
            "vllm-0.32.0-nixl-pd/nixl_d.startup.log",
            18212,
            dict(role="both", pool=46592, transport="nixl", load_failure="fail", lease=30.0),
        ),
        ("vllm-0.32.0-single/eager.startup.log", 18100, dict(role="alone", pool=93184)),
        ("vllm-0.32.0-single/compiled_tuned.startup.log", 18101, dict(role="alone", pool=93184)),
    ],
)
def test_vllms_log_says_what_a_node_runs_with(path: str, port: int, expected: dict[str, Any]) -> None:
    sheet = one(capture(path))
    assert said(sheet) == VLLM_COMMON | expected
    assert sheet.address == ("127.0.0.1", port)


def test_a_fact_says_on_which_line_it_stands() -> None:
    content = capture(PREFILL)
    number = line_of(content, b"] max_total_num_tokens=")
    (sheet,) = read(content, "prefill.log").sheets
    assert sheet.where(facts.POOL) == f"prefill.log, line {number}"


def test_a_route_of_developer_mode_shows_it() -> None:
    content = capture(VLLM).replace(b"Route: /load, Methods: GET", b"Route: /server_info, Methods: GET")
    assert one(content)[facts.DEVELOPER] is True


def test_a_log_that_ends_before_the_start_did_says_so_and_nothing_of_routes() -> None:
    content = capture(VLLM)
    sheet = one(content[: content.index(b"INFO:     Application startup complete.")])
    assert sheet[facts.STARTED] is False
    assert facts.DEVELOPER not in sheet
    content = capture(PREFILL)
    assert (
        one(content[: content.index(b"The server is fired up")].rpartition(b"\n")[0] + b"\n")[facts.STARTED]
        is False
    )


@pytest.mark.parametrize(
    ("extra", "policy", "lease"),
    [
        (b"{'kv_lease_duration': 90}", b"recompute", 90.0),
        (b"{'kv_lease_duration': x}", b"fail", None),
        (
            b"{'connectors': [{'kv_connector': 'NixlConnector', 'kv_connector_extra_config': {'kv_lease_duration': 45}}]}",
            b"fail",
            45.0,
        ),
        (
            b"{'connectors': [{'kv_connector': 'NixlConnector'}, {'kv_connector': 'OffloadingConnector'}]}",
            b"fail",
            30.0,
        ),
        (b"{'connectors': [{'kv_connector': 'OffloadingConnector'}]}", b"fail", None),
    ],
)
def test_vllms_lease_and_policy_are_those_that_are_given(
    extra: bytes, policy: bytes, lease: float | None
) -> None:
    content = capture(VLLM).replace(b"kv_connector_extra_config={}", b"kv_connector_extra_config=" + extra)
    sheet = one(
        content.replace(b"kv_load_failure_policy='fail'", b"kv_load_failure_policy='" + policy + b"'")
    )
    assert sheet[facts.LOAD_FAILURE] == policy.decode()
    assert sheet.values(facts.LEASE) == ([] if lease is None else [lease])


# ------------------------------------------------------------------------------------ detectors

BEGIN = b"[2026-11-29 21:02:43] server_args={'model_path': '/m', 'host': '0.0.0.0', 'port': 30000, 'kv_canary': 'log', 'disaggregation_mode': 'decode'}\n"
READY = b"[2026-11-29 21:03:17] The server is fired up and ready to roll!\n"
VIOLATION = (
    b"[2026-11-29 21:03:18] kv_canary violation: launch_tag=VERIFY fail_reason=chain slot_idx=3 position=7 stored_token=1 "
    b"expected_token=2 stored_chain_hash=0x0 expected_aux=0x0\n"
)
SKIPPED = b"[2026-11-29 21:03:18] KV checksum skipped: prefill layout signature 0x1 differs from this decode's 0x2 (TP width)\n"
MISMATCH = b"[2026-11-29 21:03:18] KV checksum mismatch req=abc bootstrap_room=1 expected=0x1 got=0x2\n"
ELSEWHERE = b"[2026-11-29 21:03:18] KV checksum mismatch on a peer rank req=abc bootstrap_room=1\n"
STATS = b"[2026-11-29 21:04:18] [canary] step=%d protected_tokens=%d sweep_passes=0 violations=0 launch_tags_active=2/6\n"


def test_violations_of_the_warm_up_are_told_apart() -> None:
    sheet = one(BEGIN + VIOLATION * 2 + READY + VIOLATION * 3)
    assert (sheet[facts.CANARY_WARM_UP], sheet[facts.CANARY_WRONG]) == (2, 3)
    assert sheet.where(facts.CANARY_WRONG) == "log, line 5"


def test_violations_in_a_log_that_begins_later_are_not_taken_for_those_of_a_warm_up() -> None:
    sheet = one(VIOLATION * 2)
    assert (sheet[facts.CANARY_WARM_UP], sheet[facts.CANARY_WRONG]) == (0, 2)
    begun_late = one(VIOLATION * 2 + READY + VIOLATION)
    assert (begun_late[facts.CANARY_WARM_UP], begun_late[facts.CANARY_WRONG]) == (2, 1)
    twice = one(VIOLATION * 2 + READY + VIOLATION + READY)
    assert (twice[facts.CANARY_WARM_UP], twice[facts.CANARY_WRONG]) == (2, 1)


def test_what_went_wrong_before_a_restart_is_not_forgotten() -> None:
    sheet = one(BEGIN + READY + VIOLATION + MISMATCH + BEGIN.replace(b"30000", b"30001") + VIOLATION + READY)
    assert (sheet[facts.CANARY_WARM_UP], sheet[facts.CANARY_WRONG], sheet[facts.CHECKSUM_WRONG]) == (1, 1, 1)
    assert sheet.address == ("0.0.0.0", 30001)


def test_lines_of_the_checksum_are_counted() -> None:
    sheet = one(
        BEGIN + READY + SKIPPED + MISMATCH + ELSEWHERE + b"[http_server] Error: KV checksum mismatch\n"
    )
    assert (sheet[facts.CHECKSUM_SKIPPED], sheet[facts.CHECKSUM_WRONG]) == (1, 2)


RELEASED = b"[2026-11-29 21:03:18] Deferred KV release for room %d timed out after 30.0s without a full drain ack from prefill; releasing anyway.\n"


def test_releases_that_ended_by_time_out_are_counted_once_for_all_ranks() -> None:
    sheet = one(BEGIN + READY + RELEASED % 7 + RELEASED % 7 + RELEASED % 8)
    assert sheet[facts.RELEASED_BY_TIMEOUT] == 2
    assert sheet.where(facts.RELEASED_BY_TIMEOUT) == "log, line 3"
    assert facts.RELEASED_BY_TIMEOUT not in one(BEGIN + READY)  # the log may begin later


FREEZE = b"""\
aiohttp==3.12.0
mooncake-transfer-engine==0.3.13.post1
nixl-cu12==1.5.1
%s==0.5.23
torch==2.9.1
"""


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_list_of_packages_says_the_versions_of_engine_and_transports(engine: str) -> None:
    for content in (FREEZE, FREEZE.replace(b"==", b"   ")):
        sheet = one(content % engine.encode())
        assert (sheet[facts.ENGINE], sheet[facts.VERSION]) == (engine, "0.5.23")
        assert sheet.values(facts.TRANSPORT_VERSION) == ["mooncake 0.3.13.post1", "nixl 1.5.1"]


def test_a_list_of_packages_without_an_engine_is_of_nobody() -> None:
    assert read(FREEZE.replace(b"%s==", b"other==")).sheets == []


def test_the_canarys_work_is_read() -> None:
    assert one(BEGIN + READY + STATS % (100, 5120) + STATS % (200, 10240))[facts.CANARY_CHECKED] == 10240
    assert facts.CANARY_CHECKED not in one(BEGIN + READY)


def test_counts_of_two_logs_of_one_node_add_up() -> None:
    first, second = one(BEGIN + READY + VIOLATION * 2), one(VIOLATION * 3)
    first.take(second)
    assert first[facts.CANARY_WRONG] == 5


# ------------------------------------------------------------------------------------ starts


def pool(tokens: int) -> bytes:
    return (
        b"[2026-11-29 21:03:15] max_total_num_tokens=%d, chunked_prefill_size=4096, context_len=8192, available_cpu_mem=15.15 GB\n"
        % tokens
    )


def test_what_a_node_runs_with_is_of_its_last_start() -> None:
    sheet = one(BEGIN + pool(2048) + READY + BEGIN.replace(b"'log'", b"'raise'") + pool(4096) + READY)
    assert (sheet[facts.POOL], sheet[facts.CANARY]) == (4096, "raise")
    content = capture(VLLM)
    again = content + content.replace(b"46,592 tokens", b"11,000 tokens").replace(b"18211", b"18999")
    assert one(again)[facts.POOL] == 11000
    assert one(again)[facts.EXPIRED] == 2  # of both starts
    assert one(again).address == ("127.0.0.1", 18999)
    bare = b"".join(
        line for line in again.splitlines(keepends=True) if b"  version " not in line
    )  # VLLM_DISABLE_LOG_LOGO
    assert one(bare)[facts.POOL] == 11000
    lower_first = bare.replace(b"46,592 tokens", b"9,000 tokens")
    assert one(lower_first)[facts.POOL] == 11000


def test_the_smallest_pool_of_several_ranks_counts() -> None:
    assert one(BEGIN + pool(4096) + pool(2048) + pool(8192) + READY)[facts.POOL] == 2048


def test_the_older_notation_of_the_options_is_read() -> None:
    line = b"[2026-01-01 00:00:00] server_args=ServerArgs(model_path='/m', page_size=64, disaggregation_mode='prefill', api_key='k', host='h', port=1)\n"
    sheet = one(line)
    assert (sheet[facts.PAGE], sheet[facts.ROLE], sheet[facts.API_KEY]) == (64, "prefill", True)
    assert "'k'" not in repr(sheet)


def test_lines_of_two_nodes_without_a_name_before_them_are_given_to_neither() -> None:
    reading = read(capture(PREFILL) + capture(DECODE) + VIOLATION)
    by_role = {sheet[facts.ROLE]: sheet for sheet in reading.sheets}
    assert set(by_role) == {"prefill", "decode"}
    assert all(facts.POOL not in sheet and sheet[facts.PAGE] == 16 for sheet in reading.sheets)
    assert all(sheet[facts.CANARY_WRONG] == 1 for sheet in reading.sheets)
    assert "mixed" in reading.unread[0].why


def test_whose_warm_up_a_violation_in_mixed_lines_was_of_is_not_known() -> None:
    other = BEGIN.replace(b"30000", b"30001").replace(b"'decode'", b"'prefill'")
    reading = read(BEGIN + other + VIOLATION + READY)
    assert [(sheet[facts.CANARY_WARM_UP], sheet[facts.CANARY_WRONG]) for sheet in reading.sheets] == [
        (0, 1),
        (0, 1),
    ]


def test_services_of_docker_compose_are_nodes_of_their_own() -> None:
    lines = [
        name + b"  | " + line
        for pair in zip(capture(PREFILL).splitlines(), capture(DECODE).splitlines(), strict=False)
        for name, line in zip((b"prefill-1", b"decode-1"), pair, strict=True)
    ]
    reading = read(b"\n".join(lines) + b"\n")
    assert {(sheet.name, sheet[facts.POOL]) for sheet in reading.sheets} == {
        ("prefill-1", 2048),
        ("decode-1", 8192),
    }


# ------------------------------------------------------------------------------------ speed


def batch(new: int, pending: int, speed: float, rank: bytes = b"") -> bytes:
    return (
        b"[2026-11-29 21:15:06%s] Prefill batch, #new-seq: 1, #new-token: %d, #cached-token: 0, token usage: 0.98, #running-req: 0, "
        b"#queue-req: 0, #pending-token: %d, cpu graph: False, input throughput (token/s): %.2f\n"
        % (rank, new, pending, speed)
    )


def test_a_throughput_is_a_speed_only_within_one_prompt() -> None:
    # The first chunk's throughput counts from whatever was before it. 4,096 at 1,024/s and 2,048 at 512/s: 6,144 in 8 s.
    work = batch(4096, 6144, 0.05) + batch(4096, 2048, 1024.0) + batch(2048, 0, 512.0) + batch(100, 0, 1.0)
    assert one(BEGIN + READY + work)[facts.PREFILL_SPEED] == 768.0


def test_chunks_of_another_rank_do_not_count_as_the_next() -> None:
    work = batch(4096, 6144, 0.05, b" DP0 TP0") + batch(4096, 0, 99999.0, b" DP1 TP0")
    assert facts.PREFILL_SPEED not in one(BEGIN + READY + work)


def test_an_idle_servers_throughput_is_no_speed() -> None:
    assert facts.PREFILL_SPEED not in one(capture("sglang-0.5.23-single/log"))


# ------------------------------------------------------------------------------------ wrapped and packed


def test_a_packed_log_is_read_by_what_it_is_not_by_its_name() -> None:
    assert said(one(gzip.compress(capture(PREFILL)))) == said(one(capture(PREFILL)))


def test_of_a_packed_log_that_is_cut_what_came_before_is_kept() -> None:
    packed = gzip.compress(capture(PREFILL) + b"a line of other things\n" * 200_000, compresslevel=0)
    reading = read(packed[: len(capture(PREFILL)) + 100_000])
    assert reading.sheets[0][facts.POOL] == 2048
    assert reading.unread[0].part
    assert "cannot be unpacked" in reading.unread[0].why
    nothing = read(gzip.compress(capture(PREFILL))[:40])
    assert nothing.sheets == []
    assert "cannot be unpacked" in nothing.unread[0].why


def docker(content: bytes, most: int) -> bytes:
    """As Docker's json-file writes: lines in parts of so many bytes."""
    parts = [
        line[at : at + most]
        for line in content.decode().splitlines(keepends=True)
        for at in range(0, len(line), most)
    ]
    return b"".join(
        json.dumps({"log": part, "stream": "stderr", "time": "t"}, separators=(",", ":")).encode() + b"\n"
        for part in parts
    )


def kubernetes(content: bytes, most: int) -> bytes:
    lines = []
    for line in content.splitlines():
        parts = [line[at : at + most] for at in range(0, len(line), most)] or [b""]
        lines += [
            b"2026-11-29T21:02:40.1Z stderr " + (b"F " if at == len(parts) - 1 else b"P ") + part
            for at, part in enumerate(parts)
        ]
    return b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("wrap", [docker, kubernetes])
@pytest.mark.parametrize("most", [100, 16384])
def test_lines_that_docker_and_kubernetes_wrote_in_parts_are_put_together(wrap: Any, most: int) -> None:
    for path in (PREFILL, VLLM):
        assert said(one(wrap(capture(path), most))) == said(one(capture(path)))


def test_a_line_that_only_looks_like_dockers_is_left_as_it_is() -> None:
    for line in (b'{"log":' + b"[" * 5000, b'{"log":"cut', b'{"log":"x","log":5}'):
        assert [one.text for one in logs.lines(io.BytesIO(line + b"\n"))] == [line]
    deep = b'{"log":"x","y":' + b"[" * 100_000 + b"\n"
    assert [len(one.text) for one in logs.lines(io.BytesIO(deep))] == [len(deep) - 1]


def test_colours_are_no_part_of_a_line() -> None:
    coloured = b"".join(
        b"\x1b[1;36m(APIServer)\x1b[0;0m " + line + b"\x1b[0m\n" for line in capture(VLLM).splitlines()
    )
    assert said(one(coloured)) == said(one(capture(VLLM)))


def test_levels_before_a_bar_are_no_services() -> None:
    assert [line.stream for line in logs.lines(io.BytesIO(b"INFO     | text\nprefill-1 | text\n"))] == [
        "",
        "prefill-1",
    ]


# ------------------------------------------------------------------------------------ cut, endless, foreign


def test_a_last_line_without_an_end_is_not_read_and_said() -> None:
    content = capture(PREFILL)
    at = content.index(b"] max_total_num_tokens=2048") + len(
        b"] max_total_num_tokens=2048, chunked_prefill_size=4096, context_len=81"
    )
    reading = read(content[:at])
    assert facts.POOL not in reading.sheets[0]
    assert reading.unread[0].part
    assert "is cut" in reading.unread[0].why


@pytest.mark.parametrize(
    ("last", "fact"),
    [
        (b"[2026-11-29 21:04:00] KV checksum mismatch req=abc", facts.CHECKSUM_WRONG), (b"[2026-11-29 21:04:00 TP0] KV checksum skipped for", facts.CHECKSUM_SKIPPED),
        (b"RuntimeError: kv_canary violation: launch_tag=", facts.CANARY_WRONG),
    ],
)  # fmt: skip
def test_what_the_last_line_says_of_something_wrong_counts_without_its_end(last: bytes, fact: facts.Fact[int]) -> None:  # fmt: skip
    assert read(BEGIN + READY + last).sheets[0][fact] == 1


@pytest.mark.parametrize(
    ("last", "unknown"),
    [
        (b"[2026-11-29 21:04:00] KV checksum mis", ["checksum_skipped", "checksum_wrong"]), (b"RuntimeError: kv_canary viol", ["canary_warm_up", "canary_wrong"]),
        (b"[2026-11-29 21:04:00] Decode batch, #running-req", []),
    ],
)  # fmt: skip
def test_where_the_last_line_breaks_off_within_such_words_they_are_no_zero(last: bytes, unknown: list[str]) -> None:  # fmt: skip
    (sheet,) = read(BEGIN + READY + last).sheets
    assert [name for name in ("checksum_skipped", "checksum_wrong", "canary_warm_up", "canary_wrong") if FACTS[name] not in sheet] == unknown  # fmt: skip


def test_what_vllms_last_line_says_of_pages_that_were_read_late_counts_without_its_end() -> None:
    last = b"(EngineCore pid=1) WARNING 11-29 20:50:00 [scheduler.py:1] Potentially invalid KV blocks for"
    assert read(capture(VLLM) + last).sheets[0][facts.READ_LATE] == 2  # one stands in it already


@pytest.mark.parametrize(
    "line",
    [
        b"Prefill batch, #new-seq: 1, " + b"#new-token: 1, " * 20_000 + b"#pending-token: 1, " * 20_000, b"max_total_num_tokens=1, " * 40_000,
    ],
    ids=["batch", "pool"],
)  # fmt: skip
def test_a_line_that_says_the_beginning_of_something_again_and_again_is_read_in_one_pass(line: bytes) -> None:
    """Every beginning with every middle would be 400,000,000 ways to read it: whoever waits for this test waits for that."""
    assert facts.POOL not in read(BEGIN + READY + line + b"\n").sheets[0]


def test_options_that_are_cut_in_the_middle_of_a_log_are_said() -> None:
    content = capture(PREFILL).replace(b"'kv_canary': 'none'", b"\n", 1)
    reading = read(content)
    assert facts.PAGE not in reading.sheets[0]
    assert reading.sheets[0][facts.POOL] == 2048
    assert "lists the options and is cut" in reading.unread[0].why


class _Endless(io.RawIOBase):
    """So many bytes of one letter, and then a log."""

    def __init__(self, length: int, end: bytes) -> None:
        self._left, self._end = length, io.BytesIO(end)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            return self._end.readinto(buffer)
        size = min(len(buffer), self._left)
        buffer[:size] = b"x" * size
        self._left -= size
        return size


def test_a_line_without_end_takes_no_memory_and_what_follows_is_read() -> None:
    tracemalloc.start()
    try:
        reading = engine_files.read_log(
            "log", io.BufferedReader(_Endless(64 * 1024**2, b"\n" + capture(PREFILL)))
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (
        reading.sheets[0].where(facts.POOL)
        == f"log, line {line_of(capture(PREFILL), b'] max_total_num_tokens=') + 1}"
    )
    assert peak < 16 * 1024**2


def test_a_line_that_is_too_long_keeps_its_beginning_and_the_count_goes_on() -> None:
    read_lines = list(logs.lines(io.BytesIO(b"a\n" + b"b" * (logs.MOST_LINE + 5) + b"\nc\nd")))
    assert [(line.number, len(line.text), line.whole) for line in read_lines] == [
        (1, 1, True), (2, logs.MOST_LINE, False), (3, 1, True), (4, 1, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [
        b"Nov 30 15:00:00 host sshd[1]: Accepted publickey for root\n" * 50,
        b"INFO:     Started server process [1]\nINFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)\n",
        b"<html><body>502 Bad Gateway</body></html>\n",
        b"\x00\x01\x02\xff" * 1000,
        b"",
    ],
)
def test_a_log_of_another_program_is_named_so(content: bytes) -> None:
    reading = read(content)
    assert reading.sheets == []
    assert [unread.part for unread in reading.unread] == [False]
    assert "is not a log of SGLang, vLLM or Hermetic" in reading.unread[0].why


# ------------------------------------------------------------------------------------ Hermetic


def test_hermetics_own_start_is_read() -> None:
    content = (
        b"decode-0: reading weights\n"
        b"ready http://127.0.0.1:8000  model smollm2, context 2,048 tokens (measured: prefill-0 2,048 tokens, decode-0 4,096 tokens; "
        b"model window 8,192), pages of 16, verify landing, disaggregated\n"
        b"12:03:04.123 INFO  gateway request request_id=r method=POST path=/v1/completions status=200 ms=8 tenant=local\n"
    )
    sheet = one(content)
    assert said(sheet) == dict(
        engine="hermetic",
        started=True,
        host="127.0.0.1",
        served="smollm2",
        context=2048,
        pool=2048,
        page=16,
        verify="landing",
        role="both",
        remote_code=False,
    )
    assert sheet.address == ("127.0.0.1", 8000)


def test_what_hermetic_is_by_itself_is_what_its_source_says() -> None:
    """No model's code is run."""
    source = Path(__file__).parents[2] / "src/hermetic"
    files = [file for file in source.rglob("*.py") if source / "check" not in file.parents]
    assert not [file for file in files if "trust_remote_code" in file.read_text()]


@pytest.mark.parametrize(
    ("url", "key"),
    [("http://10.0.0.1:8000", [True]), ("http://[::]:8000", [True]), ("http://127.0.0.2:8000", []), ("http://localhost:8000", [])],
)  # fmt: skip
def test_where_others_reach_it_hermetic_starts_with_keys_only(url: str, key: list[bool]) -> None:
    """gateway/tenants.py (tenants_for) and run_gateway.py refuse to start there without."""
    sheet = one(f"ready {url}  control 10.0.0.1:7000, 2 workers in cluster.toml; requests are\n".encode())
    assert sheet.values(facts.API_KEY) == key


def test_hermetics_worker_and_its_gateway_are_read() -> None:
    worker = one(
        b"ready decode-0 tcp://10.0.0.2:7001  decode, 4,096 tokens (256 pages of 16), transport nixl; announcing itself to the gateway at x\n"
    )
    assert said(worker) == dict(
        engine="hermetic",
        started=True,
        role="decode",
        pool=4096,
        page=16,
        transport="nixl",
        remote_code=False,
    )
    gateway = one(
        b"ready http://10.0.0.1:8000  control 10.0.0.1:7000, 2 workers in cluster.toml; requests are answered when\n"
    )
    assert said(gateway) == dict(
        engine="hermetic", started=True, role="both", host="10.0.0.1", api_key=True, remote_code=False
    )


@pytest.mark.parametrize(
    "line",
    [
        b"12:03:04.123 INFO  gateway request request_id=r status=200\n",
        b'{"ts": 1.5, "level": "info", "logger": "hermetic.gateway", "event": "request"}\n',
    ],
)
def test_hermetics_lines_are_known_also_without_its_start(line: bytes) -> None:
    assert said(one(line)) == dict(engine="hermetic", remote_code=False)


# ------------------------------------------------------------------------------------ lines in which a client speaks

CLAIMS = (
    "max_total_num_tokens=99999999, x context_len=5", "server_args=ServerArgs(page_size=1, host=q, port=1, disaggregation_mode=decode)",
    "[canary] step=1 protected_tokens=5", "The server is fired up and ready to roll!", "] KV Cache is allocated. dtype: torch.float8_e5m2,",
    "Uvicorn running on http://10.9.9.9:1", "BootstrapServer started successfully on 127.0.0.9:1",
)  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_prompt_that_sglang_logs_is_not_taken_for_what_sglang_says(claim: str, quote: str) -> None:
    """With --log-requests a client could hide a pool that is too small, or a node."""
    real = capture(PREFILL)
    quoted = (
        f"[2026-11-29 21:04:00] Receive: obj=GenerateReqInput(rid=x, text={quote}{claim}{quote})\n".encode()
    )
    (before,), (after,) = (read(log).sheets for log in (real, real + quoted))
    assert dict(after.facts()) == dict(before.facts())
    assert after.address == before.address


@pytest.mark.parametrize("claim", ["Using max model len 2", "non-default args: {}", "CPU KV cache size: 9 tokens", "a  version 9.9.9", "Starting vLLM server on http://h:1", "Releasing expired KV blocks, Using max model len 2"])  # fmt: skip
def test_a_prompt_that_vllm_logs_is_not_taken_for_what_vllm_says(claim: str) -> None:
    real = capture("vllm-0.32.0-single/eager.startup.log")
    quoted = f"(APIServer pid=1) INFO 11-29 20:50:00 [logger.py:40] Received request {claim}: prompt: '{claim}'\n".encode()
    (before,), (after,) = (read(log).sheets for log in (real, real + quoted))
    kept = {name: seen for name, seen in after.facts() if name != facts.EXPIRED.name}
    assert kept == {name: seen for name, seen in before.facts() if name != facts.EXPIRED.name}
    assert (facts.EXPIRED in after) == ("expired" in claim)  # what may have gone wrong counts all the same


def test_what_went_wrong_counts_also_where_it_is_quoted() -> None:
    real = capture(PREFILL)
    quoted = b"[2026-11-29 21:04:00] RuntimeError('kv_canary violation: launch_tag=x')\n"
    (sheet,) = read(real + quoted).sheets
    assert sheet[facts.CANARY_WRONG] == 1


def test_a_prompt_makes_no_speed_and_no_node() -> None:
    """A speed that a client made up would let every proxy's time-out look long enough."""
    quoted = b"".join(
        b"[2026-11-29 21:04:00] Receive: obj=GenerateReqInput(text='%s')\n" % batch(9 * 10**11, pending, 9e11).strip()
        for pending in (1, 0)
    )  # fmt: skip
    work = batch(4096, 2048, 1.0) + batch(2048, 0, 512.0)
    assert one(BEGIN + READY + work + quoted)[facts.PREFILL_SPEED] == 512.0
    assert read(quoted).sheets == []


def test_a_prompt_makes_no_node_of_another_engine() -> None:
    claim = "ready a b  prefill, 5 tokens (1 pages of 5), transport shm; announcing itself, LLM engine (v0.32.0) with config: "
    quoted = f"[2026-11-29 21:04:00] Receive: obj=GenerateReqInput(text='{claim}')\n".encode()
    (sheet,) = read(capture(PREFILL) + quoted).sheets
    assert sheet[facts.ENGINE] == "sglang"
