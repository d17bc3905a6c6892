"""Each rule finds what it is about, passes what is right, and says unknown where nobody says. Numbers are worked out by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import pytest
from check_rules import all_asked, alone, asked, behind, decode, hermetic, node, pair, prefill, vllm
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.check.deployment import Deployment, Proxy
from hermetic.check.facts import Sheet
from hermetic.check.rules import RULES

NEW, OLD, AT_REST = "0.5.23", "0.5.19", {"prefill_speed": 1_000.0}
SERVED = node("prefill", longest=40_001, prefill_speed=1_000.0)  # 40,000 tokens take 40 s


def cases() -> Iterator[tuple[str, str, Deployment, str]]:
    """(code, how it must end, what is known, a part of what it must say)"""
    yield (
        "CAP001",
        "finding",
        prefill(pool=681_280, context=1_048_576),
        "the KV pool holds 681,280 tokens and the advertised context is 1,048,576",
    )
    yield "CAP001", "passed", decode(pool=8_192, context=8_192), ""
    yield "CAP001", "unknown", prefill(pool=681_280), "the advertised context in tokens is not known"
    yield (
        "CAP001",
        "unknown",
        prefill(pool=[2_048, 4_096], context=8_192),
        "2048 (prefill.json); 4096 (prefill.1.json)",
    )

    known = {"pool": 8_192, "context": 8_192}
    yield (
        "CAP002",
        "finding",
        pair({"pool": 2_048, "context": 2_048}, known),
        "up to 8,192 tokens are advertised, and the smaller pool of the two holds 2,048",
    )
    yield (
        "CAP002",
        "finding",
        pair({"pool": 2_048}, known),
        "8,192 tokens are advertised",
    )  # whatever prefill advertises
    yield "CAP002", "passed", pair(known, known), ""
    yield (
        "CAP002",
        "unknown",
        pair({"context": 2_048}, known),
        "prefill: how many tokens the KV pool holds is not known",
    )

    stuck = {"pool": 2_048, "page": 16, "longest": 2_042, "version": NEW}
    yield "CAP003", "finding", alone(**stuck), "prompts of 2,032 to 2,041 tokens"
    yield "CAP003", "finding", prefill(**stuck), "prompts of 2,031 to 2,041 tokens"
    # a limit above the pool, as tensor parallel nodes had; halves refuse what is over the pool
    yield "CAP003", "finding", alone(**{**stuck, "longest": 10_001}), "prompts of 2,032 to 10,000 tokens"
    yield "CAP003", "finding", prefill(**{**stuck, "longest": 10_001}), "prompts of 2,031 to 2,048 tokens"
    yield "CAP003", "finding", alone(**{**stuck, "version": OLD}), "prompts of 2,032 to 2,041 tokens"
    yield "CAP003", "passed", alone(**{**stuck, "page": 1}), ""
    yield "CAP003", "unknown", alone(**{**stuck, "version": "0.5.24"}), "is known for 0.5.19 to 0.5.23 only"
    yield (
        "CAP003",
        "unknown",
        alone(pool=2_048, longest=2_042, version=NEW),
        "the page size in tokens is not known",
    )

    # a manifest: whatever memory allows up to 8,192, the pool is not above the context
    allowed = {"pool_limit": 8_192, "context": 8_192, "page": 16, "version": NEW}
    yield "CAP003", "finding", alone(**allowed), "that leave less than a page of 16 of the pool free"
    # P = 70, p = 7: 63 is accepted and stuck. P = 72, p = 6: up to 65 are accepted; alone 66 would be stuck, on prefill 65 is. P = 70, p = 5 on prefill:
    # up to 63 are accepted, 64 would be stuck.
    yield "CAP003", "finding", alone(**{**allowed, "page": 7}), "a page of 7"
    yield "CAP003", "unknown", alone(**{**allowed, "page": 6}), "how many tokens the KV pool holds"
    yield "CAP003", "finding", prefill(**{**allowed, "page": 6}), "a page of 6"
    yield "CAP003", "unknown", prefill(**{**allowed, "page": 5}), "how many tokens the KV pool holds"
    yield "CAP003", "unknown", alone(**{**allowed, "context": 8_191}), "how many tokens the KV pool holds"

    # 8,192 - 512 = 7,680 is 480 whole pages
    tight = {"pool": 8_192, "page": 16, "longest": 8_186, "reserve": 512, "version": NEW}
    yield "CAP004", "finding", decode(**tight), "prompts of 7,681 to 8,185 tokens"
    yield "CAP004", "finding", decode(**{**tight, "longest": 7_682}), "prompts of 7,681 to 7,681 tokens"
    yield "CAP004", "passed", decode(**{**tight, "longest": 7_681}), ""
    # 8,192 - 500 = 7,692; whole pages of 16 are 7,680, and 0.5.21 does not round
    yield "CAP004", "finding", decode(**{**tight, "reserve": 500}), "prompts of 7,681 to 8,185 tokens"
    yield (
        "CAP004",
        "finding",
        decode(**{**tight, "reserve": 500, "version": "0.5.21"}),
        "prompts of 7,693 to 8,185 tokens",
    )
    yield (
        "CAP004",
        "unknown",
        decode(pool=8_192, page=16, longest=8_186, version=NEW),
        "how many tokens decode reserves",
    )

    # a manifest: at most 8,192, of which 512 are kept free, so 7,681 and more are never taken
    limited = {"pool_limit": 8_192, "context": 8_192, "reserve": 512, "version": NEW}
    yield "CAP004", "finding", decode(**limited), "more than 7,680 tokens, or fewer where memory allows less"
    # context 7,688: the front check accepts up to 7,681; 7,687: up to 7,680, which a pool of 8,192 takes and a smaller one may not
    yield (
        "CAP004",
        "finding",
        decode(**{**limited, "context": 7_688}),
        "allows the KV pool 8,192 tokens at most",
    )
    yield "CAP004", "unknown", decode(**{**limited, "context": 7_687}), "how many tokens the KV pool holds"
    yield "CAP004", "unknown", decode(**{**limited, "reserve": None}), "how many tokens decode reserves"
    yield (
        "CAP004",
        "unknown",
        decode(**{**limited, "version": "0.5.24"}),
        "is known for 0.5.19 to 0.5.23 only",
    )

    yield "CAP005", "finding", alone(truncates=True), "cut and answered with HTTP 200"
    yield "CAP005", "passed", alone(truncates=False), ""
    yield "CAP005", "unknown", alone(), "whether prompts that are too long are cut is not known"

    yield (
        "CAP006",
        "finding",
        since({"pool": 681_280}, {"pool": 1_100_000}),
        "the KV pool holds 681,280 tokens (was 1,100,000)",
    )
    yield "CAP006", "passed", since({"pool": 681_280}, {"pool": 681_280}), ""
    yield "CAP006", "unknown", since({}, {"pool": 681_280}), "how many tokens the KV pool holds is not known"
    yield (
        "CAP006",
        "unknown",
        since({"pool": 681_280}, {"pool": 681_280, "tp": 8}),
        "the tensor parallel width is not known",
    )

    yield (
        "VER001",
        "finding",
        prefill(version=OLD),
        "SGLang 0.5.19 answers prompts over prefill's limit from other requests' KV cache",
    )
    yield "VER001", "passed", prefill(version="0.5.20"), ""
    yield "VER001", "unknown", decode(version="0.5.20rc1"), "built before 0.5.20 was released"
    yield (
        "VER002",
        "finding",
        prefill(version="0.5.20"),
        "SGLang 0.5.20 takes requests that it has refused into the handoff",
    )
    yield "VER002", "passed", prefill(version="0.5.21"), ""
    yield "VER002", "unknown", prefill(), "the version is not known"
    yield "VER003", "finding", decode(version="0.5.20"), "does not wait for a transfer"
    yield "VER003", "passed", decode(version="0.5.21"), ""
    yield "VER003", "passed", decode(version="0.5.20", deferred=True), ""
    yield "VER003", "unknown", decode(version="main"), "'main' is no version"
    # 0.5.18 does not know the variable, so it does not help
    yield (
        "VER003",
        "finding",
        decode(version="0.5.18", deferred=True),
        "SGLang 0.5.18 has no deferred release",
    )
    yield "VER003", "finding", decode(version="0.5.20", deferred=False), "unless it is told to"
    yield "VER003", "unknown", decode(version="0.5.20", deferred=[True, False]), "the sources disagree"
    yield "VER004", "finding", prefill(version="0.5.21"), "does not tag its answers to aborts"
    yield "VER004", "passed", prefill(version="0.5.22"), ""
    yield "VER004", "unknown", prefill(version="0.0.0.dev0"), "is no version that can be compared"
    yield (
        "VER005",
        "finding",
        prefill(version="0.5.21", transport="mooncake"),
        "reports a Mooncake send that failed as drained",
    )
    yield "VER005", "passed", prefill(version="0.5.21", transport="nixl"), ""
    yield "VER005", "passed", prefill(version="0.5.22"), ""
    yield "VER005", "unknown", prefill(version="0.5.21"), "what moves KV between the halves is not known"
    yield (
        "VER006",
        "finding",
        decode(version="0.5.21", tp=8, pp=1, restores=True),
        "with 8 x 1 ranks may take KV for restored",
    )
    yield "VER006", "passed", decode(version="0.5.21", tp=1, pp=1), ""
    yield "VER006", "passed", decode(version="0.5.21", tp=8, pp=1, restores=False), ""
    yield "VER006", "passed", decode(version="0.5.22", tp=8, pp=1, restores=True), ""
    yield (
        "VER006",
        "unknown",
        decode(version="0.5.21", tp=8, pp=1),
        "whether decode restores KV from host memory",
    )
    yield "VER006", "unknown", decode(version="0.5.21", tp=1), "the pipeline parallel depth is not known"
    yield "VER007", "finding", decode(version="0.5.21"), "does not count how deferred releases end"
    yield "VER007", "passed", decode(version="0.5.22.post1"), ""
    yield "VER007", "unknown", decode(), "the version is not known"
    yield (
        "VER008",
        "finding",
        pair({"version": "0.5.23"}, {"version": "0.5.22"}),
        "prefill runs 0.5.23 and decode 0.5.22",
    )
    yield "VER008", "passed", pair({"version": "v0.5.23"}, {"version": "0.5.23"}), ""
    yield "VER008", "passed", pair({"version": "0.32.0"}, {"version": "0.32.0+cpu"}), ""  # a tag and a log
    yield "VER008", "finding", pair({"version": "0.32.0+cu129"}, {"version": "0.32.0+cpu"}), "prefill runs"
    yield "VER008", "unknown", pair({"version": "0.5.23"}, {}), "decode: the version is not known"
    cake = {"transport": "mooncake"}
    yield (
        "VER009",
        "finding",
        pair(
            {**cake, "transport_version": "mooncake 0.3.13"}, {**cake, "transport_version": "mooncake 0.3.9"}
        ),
        "prefill has mooncake 0.3.13 and decode mooncake 0.3.9",
    )
    both = {"transport": "nixl", "transport_version": ["nixl 1.5.1", "mooncake 0.3.9"]}
    # only what moves KV counts
    yield "VER009", "passed", pair(both, {"transport": "nixl", "transport_version": "nixl 1.5.1"}), ""
    yield (
        "VER009",
        "unknown",
        pair(both, {"transport": "nixl", "transport_version": "mooncake 0.3.9"}),
        "the version of nixl",
    )
    yield "VER009", "unknown", pair(both, {"transport_version": "nixl 1.5.1"}), "what moves KV"
    image = {"image": "lmsysorg/sglang:v0.5.23"}
    yield "VER009", "passed", pair(image, image), "both halves run lmsysorg/sglang:v0.5.23"
    yield (
        "VER009",
        "unknown",
        pair(image, {"image": "lmsysorg/sglang:v0.5.22"}),
        "the version of the transfer engine",
    )
    yield (
        "VER009",
        "unknown",
        pair(image, {"image": ["lmsysorg/sglang:v0.5.23", "other:v1.0"]}),
        "the version of the transfer",
    )
    yield (
        "VER009",
        "unknown",
        pair({}, {"transport_version": "nixl 1.5.1"}),
        "the version of the transfer engine is not known",
    )

    yield (
        "REL001",
        "finding",
        decode(transport="mooncake", deferred=False, version=NEW),
        "deferred release is off",
    )
    yield (
        "REL001",
        "finding",
        prefill(transport="mori", deferred=True, version="0.5.21"),
        "mori answers aborts since",
    )
    yield "REL001", "passed", prefill(transport="mooncake", deferred=True, version=NEW), ""
    yield "REL001", "passed", prefill(transport="mooncake", deferred=True, version=OLD), ""
    yield "REL001", "passed", decode(transport="mooncake", released=2, version=NEW), ""  # it has waited twice
    yield "REL001", "passed", decode(transport="fake", version=NEW, deferred=True), ""
    yield "REL001", "unknown", decode(transport="fake", version=NEW), "whether decode waits"
    yield "REL001", "finding", decode(transport="mooncake", deferred=True, version="0.5.18"), "SGLang 0.5.18 has no deferred release"  # fmt: skip
    yield (
        "REL001",
        "finding",
        decode(transport="mooncake", version="0.5.9"),
        "SGLang 0.5.9 has no deferred release",
    )
    yield "REL001", "unknown", decode(transport="mooncake", deferred=True), "the version is not known"
    yield (
        "REL001",
        "unknown",
        prefill(transport="mooncake", version=NEW),
        "whether decode waits for the transfer",
    )
    yield (
        "REL001",
        "unknown",
        prefill(transport="other", deferred=True, version=NEW),
        "whether other answers aborts is not known",
    )
    yield "REL002", "finding", prefill(transport="mooncake", batch_pages=0), "is not set"
    yield "REL002", "passed", prefill(transport="mooncake", batch_pages=1_024, version=NEW), ""
    yield "REL002", "unknown", prefill(transport="mooncake", batch_pages=1_024), "the version is not known"
    yield "REL002", "passed", prefill(transport="nixl"), ""
    yield (
        "REL002",
        "finding",
        prefill(transport="mooncake", batch_pages=1_024, version=OLD),
        "SGLang 0.5.19 sends everything",
    )
    yield (
        "REL002",
        "unknown",
        prefill(transport="mooncake", version=NEW),
        "how many pages one transfer batch has at most",
    )

    # 1,024 pages of 64 tokens x 100 kB a token are 6,553.6 MB; at 200 MB/s that is 32.8 s, at 400 MB/s 16.4 s
    batch = {
        "transport": "mooncake",
        "page": 64,
        "pool": 1_000_000,
        "kv_bytes": 1e11,
        "longest": 1_000_000,
        "version": NEW,
    }
    slow, fast = {**batch, "transfer_speed": 2e8}, {**batch, "transfer_speed": 4e8}
    yield (
        "REL003",
        "finding",
        pair({**slow, "batch_pages": 1_024}, {"release_timeout": 30.0}),
        "a batch of 1,024 pages (6,554 MB) takes 33 s at the measured 200 MB/s, and decode releases after 30 s",
    )
    # 0.5.19 knows no bound, whether one is set or not
    yield (
        "REL003",
        "finding",
        pair({**fast, "version": OLD}, {"release_timeout": 30.0}),
        "a batch of 15,625 pages (100,000 MB) takes 250 s",
    )
    yield (
        "REL003",
        "finding",
        pair({**fast, "batch_pages": 1_024, "version": OLD}, {"release_timeout": 30.0}),
        "a batch of 15,625 pages",
    )
    # without a bound the longest prompt counts: 999,999 tokens are 15,625 pages, 100,000 MB, 250 s
    yield (
        "REL003",
        "finding",
        pair({**fast, "batch_pages": 0}, {"release_timeout": 30.0}),
        "a batch of 15,625 pages (100,000 MB) takes 250 s",
    )
    yield "REL003", "passed", pair({**fast, "batch_pages": 1_024}, {"release_timeout": 30.0}), ""
    yield "REL003", "passed", pair({**slow, "batch_pages": 1_024}, {"release_timeout": 60.0}), ""
    yield "REL003", "passed", pair({**slow, "batch_pages": 1_024}, {"release_timeout": 32.768}), ""
    yield "REL003", "passed", pair({"transport": "nixl"}, {}), ""
    yield (
        "REL003",
        "unknown",
        pair({**batch, "batch_pages": 1_024}, {"release_timeout": 30.0}),
        "the speed of transfers in bytes a second is not known",
    )
    yield (
        "REL003",
        "unknown",
        pair({**slow, "batch_pages": 1_024}, {}),
        "how long decode waits before it releases anyway",
    )
    yield (
        "REL003",
        "unknown",
        pair({**batch, "transfer_speed": 0.0, "batch_pages": 1_024}, {"release_timeout": 30.0}),
        "no transfer was measured",
    )
    yield (
        "REL004",
        "finding",
        decode(released=9, released_by_timeout=2),
        "2 of 9 deferred releases ended by time-out",
    )
    yield "REL004", "finding", decode(released=1, released_by_timeout=2), "2 deferred releases ended"
    yield "REL004", "passed", decode(released=9, released_by_timeout=0), ""
    yield "REL004", "unknown", decode(), "how many releases ended by time-out is not known"

    on, off = {"checksum": True}, {"checksum": False}
    yield "DET001", "finding", pair(on, off), "is on in prefill and off in decode"
    yield "DET001", "passed", pair(on, on), ""
    yield "DET001", "unknown", pair(on, {}), "decode: whether transferred KV is checked is not known"
    layout = {"checksum": True, "tp": 4, "pp": 1, "page": 64, "kv_dtype": "bfloat16"}
    yield (
        "DET002",
        "finding",
        pair(layout, {**layout, "tp": 8}),
        "they differ in the tensor parallel width: 4 and 8",
    )
    yield (
        "DET002",
        "finding",
        pair(layout, {"checksum": True, "page": 16}),
        "the page size in tokens: 64 and 16",
    )  # whatever else is not known
    old = {**layout, "version": "0.5.22"}
    yield (
        "DET002",
        "finding",
        pair(old, {**old, "tp": 8}),
        "and requests are ended as damaged, because they differ",
    )
    new = {**layout, "version": NEW}
    yield (
        "DET002",
        "finding",
        pair(new, {**new, "tp": 8}),
        "and requests are taken unverified, because they differ",
    )
    yield "DET002", "finding", pair(layout, {**layout, "tp": 8}), "(before 0.5.23: ended as damaged)"
    yield "DET002", "passed", pair(layout, layout), ""
    yield "DET002", "passed", pair(layout, {"checksum": False, "tp": 8}), ""
    yield "DET002", "passed", pair({"checksum": False, "tp": 8}, layout), ""
    yield (
        "DET002",
        "unknown",
        pair(layout, {**layout, "kv_dtype": None}),
        "decode: the dtype of the KV cache is not known",
    )
    yield (
        "DET003",
        "finding",
        decode(checksum=True, checksum_skipped=1),
        "the log says once that a layout is not compared",
    )
    yield "DET003", "passed", decode(checksum=True, checksum_skipped=0), ""
    yield "DET003", "passed", decode(checksum=False), ""
    yield "DET003", "passed", decode(checksum=True, version="0.5.22"), "SGLang 0.5.22 skips no layout"
    yield (
        "DET003",
        "unknown",
        decode(checksum=True, version=NEW),
        "log lines that say that a layout is not checked",
    )
    yield "DET003", "unknown", decode(checksum=True), "log lines that say that a layout is not checked"
    yield (
        "DET004",
        "finding",
        decode(checksum=True, checksum_wrong=3),
        "the log says 3 times that transferred KV was not what prefill had sent",
    )
    yield "DET004", "passed", decode(checksum=True, checksum_wrong=0), ""
    yield "DET004", "passed", decode(checksum=False), ""
    yield "DET004", "finding", decode(checksum=False, checksum_wrong=1), "the log says once"
    yield "DET004", "unknown", decode(checksum=True), "log lines that say that transferred KV"
    yield "DET005", "finding", alone(canary="none"), "--kv-canary is none"
    yield "DET005", "passed", alone(canary="raise"), ""
    yield "DET005", "unknown", alone(), "the mode of the KV canary is not known"
    yield "DET006", "finding", alone(canary="log"), "the answer still goes out"
    yield "DET006", "passed", alone(canary="none"), ""
    yield "DET006", "unknown", alone(), "the mode of the KV canary is not known"
    yield (
        "DET007",
        "finding",
        alone(canary="log", canary_wrong=1),
        "the log has 1 violation of the KV canary after the warm-up",
    )
    yield "DET007", "passed", alone(canary="log", canary_wrong=0, canary_warm_up=4), ""
    yield "DET007", "passed", alone(canary="none"), ""
    yield "DET007", "unknown", alone(canary="log"), "violations of the canary in the log after the warm-up"
    yield (
        "DET008",
        "finding",
        alone(canary="log", canary_warm_up=4),
        "4 violations of the KV canary, all before the server was ready",
    )
    yield "DET008", "passed", alone(canary="log", canary_warm_up=0, canary_wrong=2), ""
    yield "DET008", "passed", alone(canary="none"), ""
    yield "DET008", "finding", alone(canary="none", canary_warm_up=1), "1 violation of"
    yield "DET008", "unknown", alone(canary="log"), "during the warm-up"
    yield "DET009", "finding", decode(transport="fake"), "no KV is moved"
    yield "DET009", "passed", decode(transport="mooncake"), ""
    yield "DET009", "unknown", decode(), "what moves KV between the halves is not known"
    yield "DET010", "finding", pair(off, off), "off in both halves"
    yield (
        "DET010",
        "finding",
        pair({"version": "0.5.20"}, {"version": "0.5.20"}),
        "off in both halves",
    )  # it has none
    yield "DET010", "passed", pair(off, on), ""  # DET001
    yield "DET010", "unknown", pair(off, {}), "decode: whether transferred KV is checked is not known"
    yield "DET011", "finding", decode(version="0.5.21", checksum=True, tp=8), "with 8 ranks drops a damaged"
    yield "DET011", "passed", decode(version="0.5.22", checksum=True, tp=1), ""
    yield "DET011", "passed", decode(version="0.5.22", checksum=False, tp=8), ""
    yield "DET011", "passed", decode(version="0.5.20", tp=8), ""  # it has no checksum
    yield "DET011", "passed", decode(version="0.5.23", checksum=True, tp=8), ""
    yield "DET011", "unknown", decode(version="0.5.22", checksum=True), "the tensor parallel width"
    yield "DET011", "unknown", decode(version="0.5.22", tp=8), "whether transferred KV is checked"
    yield "DET011", "unknown", decode(checksum=True, tp=8), "the version is not known"

    for code, fact, one, other, says in (
        ("PAIR001", "page", 16, 64, "prefill has pages of 16 tokens and decode pages of 64 tokens"),
        (
            "PAIR002",
            "kv_dtype",
            "bfloat16",
            "fp8_e4m3",
            "prefill has KV in bfloat16 and decode KV in fp8_e4m3",
        ),
        ("PAIR003", "model", "/models/a", "/models/b", "prefill has /models/a and decode /models/b"),
        (
            "PAIR005",
            "context",
            4_096,
            8_192,
            "prefill has a context of 4,096 tokens and decode a context of 8,192 tokens",
        ),
        ("PAIR006", "tp", 1, 4, "prefill has a width of 1 and decode a width of 4"),
        ("PAIR007", "transport", "mooncake", "nixl", "prefill has mooncake and decode nixl"),
    ):
        yield code, "finding", pair({fact: one}, {fact: other}), says
        yield code, "passed", pair({fact: one}, {fact: one}), ""
        yield code, "unknown", pair({fact: one}, {}), "is not known"
    one, other, folder = (
        {"model": "org/a", "revision": "1a2b"},
        {"model": "org/a", "revision": "3c4d"},
        {"model": "/models/a"},
    )
    yield "PAIR004", "finding", pair(one, other), "prefill has revision 1a2b and decode revision 3c4d"
    yield "PAIR004", "passed", pair(one, one), ""
    yield "PAIR004", "passed", pair(folder, {"model": "./a"}), ""
    yield "PAIR004", "unknown", pair({"model": "org/a"}, folder), "prefill: the model's revision is not known"
    yield "PAIR004", "unknown", pair(folder, {"model": "org/a"}), "prefill: the model's revision is not known"
    yield "PAIR004", "unknown", pair({"revision": "1a2b"}, one), "prefill: the model path is not known"

    # 46,592 tokens in blocks of 128 for 4,096: 11 times as much as is needed
    yield "VLLM001", "passed", vllm(pool=46_592, context=4_096), ""
    yield "VLLM001", "passed", vllm(pool=8_192, context=4_096), ""
    # 32 blocks are needed and one more that is never given out: 33 x 4,096 / 32 = 4,224
    yield (
        "VLLM001",
        "finding",
        vllm(pool=4_096, context=4_096, page=128),
        "a prompt of max_model_len (4,096) needs a pool of 4,224",
    )
    yield "VLLM001", "passed", vllm(pool=4_224, context=4_096, page=128), ""
    # 4,000 tokens need 32 blocks as well; 33 blocks are shown as int(33 / 32 x 4,000) = 4,125
    yield "VLLM001", "finding", vllm(pool=4_124, context=4_000, page=128), "needs a pool of 4,125"
    yield "VLLM001", "passed", vllm(pool=4_125, context=4_000, page=128), ""
    yield (
        "VLLM001",
        "finding",
        vllm(pool=4_000, context=8_192),
        "the KV pool holds 4,000 tokens and max_model_len is 8,192",
    )
    yield "VLLM001", "unknown", vllm(pool=4_200, context=4_096), "the page size in tokens is not known"
    yield "VLLM002", "finding", vllm(load_failure="recompute"), 'kv_load_failure_policy is "recompute"'
    yield "VLLM002", "passed", vllm(load_failure="fail"), ""
    yield "VLLM002", "unknown", vllm(), "what becomes of a request whose KV could not be loaded"
    yield (
        "VLLM003",
        "finding",
        pair({"lease": 30.0}, {"waited": 40.0}, "vllm"),
        "up to 40 s for decode, and prefill keeps their pages for 30 s",
    )
    yield "VLLM003", "passed", pair({"lease": 30.0}, {"waited": 0.8}, "vllm"), ""
    for there, here, state in ((5, 0, "passed"), (0, 0, "finding"), (5, 1, "finding"), (0, 5, "finding")):
        waits = pair({"lease": 30.0, "transfers": there}, {"waited": 40.0, "transfers": here}, "vllm")
        yield "VLLM003", state, waits, "the other way only" if state == "passed" else "up to 40 s"
    yield "VLLM003", "finding", pair({"lease": 30.0}, {"waited": 30.0}, "vllm"), "up to 30 s"
    yield (
        "VLLM003",
        "unknown",
        pair({"lease": 30.0}, {}, "vllm"),
        "the longest time that requests were seen to wait",
    )
    yield (
        "VLLM004",
        "finding",
        vllm(expired=1),
        "the pages of one request expired before decode had read them",
    )
    yield "VLLM004", "passed", vllm(expired=0), ""
    yield "VLLM004", "unknown", vllm("prefill"), "how many requests' pages expired"
    yield (
        "VLLM005",
        "finding",
        vllm(read_late=8),
        "decode read the pages of 8 requests after they had expired",
    )
    yield "VLLM005", "passed", vllm(read_late=0), ""
    yield "VLLM005", "unknown", vllm(), "decode read after they had expired is not known"
    yield "VLLM006", "finding", vllm("decode", failed_transfers=2), "2 transfers failed"
    yield "VLLM006", "passed", vllm("decode", failed_transfers=0), ""
    yield "VLLM006", "unknown", vllm("decode"), "how many transfers failed is not known"
    there, elsewhere = {"address": ("10.0.0.1", 8_000)}, {"address": ("10.0.0.2", 8_000)}
    yield (
        "VLLM007",
        "finding",
        pair({"inner_host": "localhost", **there}, elsewhere, "vllm"),
        "prefill at 10.0.0.1 names localhost as its side channel, and decode is at 10.0.0.2",
    )
    yield "VLLM007", "passed", pair({"inner_host": "localhost", **there}, there, "vllm"), ""
    yield "VLLM007", "passed", pair({"inner_host": "10.0.0.1", **there}, elsewhere, "vllm"), ""
    for itself in ("127.0.1.1", "127.1", "LocalHost", "ip6-localhost", "::ffff:127.0.0.1", "0"):
        yield (
            "VLLM007",
            "finding",
            pair({"inner_host": itself, **there}, elsewhere, "vllm"),
            f"names {itself} as",
        )
    loop = {"inner_host": "localhost", "address": ("127.0.0.1", 8_000)}
    yield "VLLM007", "passed", pair(loop, {"address": ("localhost", 8_001)}, "vllm"), ""
    yield "VLLM007", "finding", pair(loop, elsewhere, "vllm"), "prefill at 127.0.0.1 names localhost"
    yield (
        "VLLM007",
        "finding",
        pair({"inner_host": "::1", **there}, {"address": ("localhost", 8_001)}, "vllm"),
        "decode is at localhost",
    )
    yield (
        "VLLM007",
        "unknown",
        pair({"inner_host": "::1", "address": ("0.0.0.0", 8_000)}, elsewhere, "vllm"),
        "prefill: where it serves is not known",
    )
    yield (
        "VLLM007",
        "unknown",
        pair(there, elsewhere, "vllm"),
        "the address of its bootstrap or side channel is not known",
    )
    yield (
        "VLLM007",
        "unknown",
        pair({"inner_host": "localhost"}, elsewhere, "vllm"),
        "prefill: where it serves is not known",
    )
    yield "VLLM008", "finding", vllm("alone", developer=True), "VLLM_SERVER_DEV_MODE is on"
    yield "VLLM008", "passed", vllm("alone", developer=False), ""
    yield "VLLM008", "unknown", vllm("alone"), "whether developer mode is on is not known"

    yield (
        "PRX001",
        "finding",
        behind({"read_timeout": 30.0}, SERVED),
        "it waits 30 s for an answer, and prefill needs 40 s for a prompt of 40,000 tokens at the measured 1,000 a second",
    )
    yield (
        "PRX001",
        "finding",
        behind({"read_timeout": 30.0}, SERVED, node("other", "prefill")),
        "prefill needs 40 s",
    )  # the other cannot make it better
    yield "PRX001", "passed", behind({"read_timeout": 60.0}, SERVED, node("decode")), ""
    yield "PRX001", "passed", behind({"read_timeout": 40.0}, SERVED), ""
    quick = node("quick", "prefill", longest=40_001, prefill_speed=4_000.0)
    yield "PRX001", "finding", behind({"read_timeout": 30.0}, SERVED, quick), "prefill needs 40 s"
    yield "PRX001", "finding", behind({"read_timeout": 5.0}, quick, SERVED), "prefill needs 40 s"
    # 4,096 tokens at 100 a second; min(2,048, 8,192) - 7 = 2,041 tokens at 10 a second
    yield (
        "PRX001",
        "finding",
        behind(
            {"read_timeout": 30.0}, node("v", "both", "vllm", pool=46_592, context=4_096, prefill_speed=100.0)
        ),
        "v needs 41 s for a prompt of 4,096 tokens",
    )
    yield (
        "PRX001",
        "finding",
        behind(
            {"read_timeout": 30.0},
            node("s", "alone", pool=2_048, context=8_192, version=NEW, prefill_speed=10.0),
        ),
        "s needs 204 s for a prompt of 2,041 tokens",
    )
    yield (
        "PRX001",
        "unknown",
        behind({"read_timeout": 60.0}, node("s", "alone", longest=100, prefill_speed=0.0)),
        "no prefill was measured yet",
    )
    yield "PRX001", "unknown", behind({"read_timeout": 60.0}, SERVED, node("other", "prefill")), "other: "
    yield "PRX001", "unknown", behind({}, SERVED), "front: how long it waits for an answer is not known"
    yield "PRX001", "unknown", behind({"read_timeout": 60.0}), "no node that prefills was read"
    yield "PRX002", "finding", behind({"retries_post": True}), "it sends a POST again"
    yield "PRX002", "passed", behind({"retries_post": False}), ""
    yield "PRX002", "unknown", behind({}), "whether it sends POST requests again is not known"
    sure, unsure, at_once = (
        node("prefill", deferred=True, version=NEW), node("prefill"), node("decode", deferred=False),
    )  # fmt: skip
    yield (
        "PRX003",
        "finding",
        behind({"closes_upstream": True}, sure, node("decode", deferred=True, version="0.5.18")),
        "and decode releases pages",
    )
    yield (
        "PRX003",
        "unknown",
        behind({"closes_upstream": True}, node("decode", deferred=True)),
        "the version is not known",
    )
    yield (
        "PRX003",
        "finding",
        behind({"closes_upstream": True}, sure, at_once),
        "and decode releases pages while a transfer may still write",
    )
    yield "PRX003", "finding", behind({"closes_upstream": True}, unsure, at_once), "and decode releases pages"
    yield (
        "PRX003",
        "finding",
        behind({"closes_upstream": True}, node("decode", deferred=False, released=3)),
        "and decode releases pages",
    )
    yield "PRX003", "passed", behind({"closes_upstream": True}, sure, node("decode", released=1)), ""
    yield "PRX003", "passed", behind({"closes_upstream": False}, sure, at_once), ""
    yield (
        "PRX003",
        "unknown",
        behind({"closes_upstream": True}, unsure),
        "prefill: whether decode waits for the transfer",
    )
    told_nothing = node("node", role="", deferred=False)
    yield (
        "PRX003",
        "unknown",
        behind({"closes_upstream": True}, told_nothing),
        "the role in the deployment is not known",
    )
    nobody = node("decode", engine=None, deferred=False)
    yield "PRX003", "unknown", behind({"closes_upstream": True}, nobody), "which engine this is is not known"
    for other in (
        node("node", role="", deferred=True, version=NEW),
        node("server", "alone", deferred=False),
        node("decode", engine="vllm"),
    ):
        yield "PRX003", "passed", behind({"closes_upstream": True}, sure, other), ""
    yield "PRX003", "unknown", behind({"closes_upstream": True}), "no node was read"
    yield "PRX003", "unknown", behind({}, at_once), "whether it closes the connection"
    yield (
        "PRX004",
        "finding",
        behind({"pairs": True, "cancels_both": False}, kind="sglang-router"),
        "when one half fails it waits for the other",
    )
    yield "PRX004", "passed", behind({"cancels_both": True}, kind="vllm-router"), ""
    yield "PRX004", "passed", behind({"pairs": False}, kind="vllm-router"), "there is no other half"
    yield "PRX004", "unknown", behind({"pairs": True}, kind="sglang-router"), "sgl-model-gateway:v0.3.2"

    yield "PRX005", "finding", behind({"copies": "/shadow"}), "it sends copies of requests to /shadow"
    yield "PRX005", "passed", behind({"copies": ""}), ""
    yield "PRX005", "unknown", behind({}), "whether it sends copies of requests elsewhere is not known"

    yield "EXP001", "finding", prefill(inner_host="0.0.0.0"), "listens on all interfaces (0.0.0.0)"
    yield "EXP001", "passed", prefill(inner_host="10.0.0.1"), ""
    for everywhere in ("::", "[::]", "*", "0", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0", "0.0"):
        yield "EXP001", "finding", prefill(inner_host=everywhere), f"listens on all interfaces ({everywhere})"
    yield "EXP001", "unknown", prefill(), "the address of its bootstrap or side channel is not known"
    yield (
        "EXP002",
        "finding",
        alone(host="0.0.0.0", api_key=False),
        "it listens on 0.0.0.0 and asks for no API key",
    )
    yield "EXP002", "passed", alone(host="127.0.0.1", api_key=False), ""
    yield "EXP002", "passed", alone(api_key=True), ""
    yield "EXP002", "unknown", alone(api_key=False), "the address that it listens on is not known"
    yield "EXP002", "unknown", alone(host="0.0.0.0"), "whether an API key is asked for is not known"
    yield "EXP003", "finding", alone(host="10.0.0.1", admin_key=False), "has no admin key"
    yield "EXP003", "passed", alone(host="127.0.0.1", admin_key=False), ""
    yield "EXP003", "passed", alone(admin_key=True), ""
    yield "EXP003", "unknown", alone(host="10.0.0.1"), "whether an admin key is asked for is not known"
    yield "EXP004", "finding", alone(host="0.0.0.0", metrics_open=True), "/metrics answers without a key"
    yield "EXP004", "passed", alone(host="0.0.0.0", metrics_open=False), ""
    yield "EXP004", "passed", alone(host="127.0.0.1"), ""
    yield "EXP004", "passed", alone(host="0.0.0.0", metrics=False), ""
    yield "EXP004", "unknown", alone(host="0.0.0.0"), "whether /metrics answers without a key is not known"
    yield "EXP004", "unknown", alone(metrics_open=True), "the address that it listens on is not known"
    # found at another address than loopback, wherever it says that it listens
    yield "EXP002", "finding", alone(api_key=False, address=("10.0.0.7", 8_000)), "it listens on 10.0.0.7"
    yield "EXP002", "finding", alone(host="127.0.0.1", api_key=False, address=("10.0.0.7", 1)), "on 10.0.0.7"
    yield (
        "EXP002",
        "unknown",
        alone(api_key=False, address=("127.0.0.1", 8_000)),
        "the address that it listens on is not known",
    )
    yield "EXP005", "finding", vllm(remote_code=True), "--trust-remote-code"
    yield "EXP005", "passed", vllm(remote_code=False), ""
    yield "EXP005", "unknown", vllm(), "whether code from the model's repository runs is not known"

    yield (
        "COV001",
        "finding",
        alone(canary="log", canary_checked=0, served_requests=12),
        "12 requests were served, and it has checked no token",
    )
    yield "COV001", "passed", alone(canary="log", canary_checked=4_096), ""
    yield "COV001", "passed", alone(canary="log", canary_checked=0, served_requests=0), ""
    yield "COV001", "passed", alone(canary="none"), ""
    yield "COV001", "unknown", alone(canary="raise"), "how many tokens the canary has checked is not known"
    on = {"checksum": True, "version": NEW}
    logged = {**on, "started": True, "checksum_skipped": 0}
    yield (
        "COV002",
        "finding",
        pair(on, {**on, "checksum_skipped": 2}),
        "of 2 layouts that requests are taken unverified",
    )
    yield "COV002", "passed", pair({"checksum": False}, on), "the KV checksum is off in a half"
    yield "COV002", "passed", pair(on, {"checksum": False}), "the KV checksum is off in a half"
    yield "COV002", "passed", pair(on, logged), ""
    # 0.5.22 skips no layout: what does not match is ended
    yield "COV002", "passed", pair(on, {**on, "version": "0.5.22"}), ""
    yield "COV002", "unknown", pair(on, on), "whether the log reaches the end of the start is not known"
    yield (
        "COV002",
        "unknown",
        pair(on, {**logged, "started": False}),
        "its log from the start on would say it",
    )
    yield (
        "COV002",
        "unknown",
        pair(on, {**logged, "version": "0.5.24"}),
        "when SGLang 0.5.24 skips a checksum",
    )
    yield "COV002", "unknown", pair({}, logged), "prefill: whether transferred KV is checked is not known"

    yield (
        "HRM001",
        "finding",
        hermetic(context=4_096, pool=2_048),
        "a context of 4,096 tokens is advertised and a pool holds 2,048",
    )
    yield "HRM001", "passed", hermetic(context=2_048, pool=2_048), ""
    yield "HRM001", "unknown", hermetic(context=2_048), "how many tokens the KV pool holds is not known"
    yield "HRM002", "finding", hermetic(verify="tags"), "--verify is tags"
    yield "HRM002", "passed", hermetic(verify="read"), ""
    yield "HRM002", "unknown", hermetic(), "what is verified of pages before they are read is not known"
    yield "HRM003", "finding", hermetic(disabled=True), "the model is disabled"
    yield "HRM003", "passed", hermetic(disabled=False), ""
    yield "HRM003", "unknown", hermetic(), "whether the model is disabled is not known"
    yield "HRM004", "finding", hermetic(quarantined=1), "1 page is in quarantine"
    yield "HRM004", "passed", hermetic(quarantined=0), ""
    yield "HRM004", "unknown", hermetic(), "how many pages are in quarantine is not known"
    yield (
        "HRM005",
        "finding",
        hermetic(integrity_failures=2),
        "2 requests met a page that was not their own, and were ended",
    )
    yield "HRM005", "passed", hermetic(integrity_failures=0), ""
    yield "HRM005", "unknown", hermetic(), "how many requests met a page that was not their own is not known"
    yield (
        "HRM006",
        "finding",
        hermetic(served_requests=3, verified=0),
        "3 requests were served and none was verified",
    )
    yield "HRM006", "passed", hermetic(served_requests=3, verified=3), ""
    yield "HRM006", "passed", hermetic(served_requests=0, verified=0), ""
    yield "HRM006", "unknown", hermetic(served_requests=3), "how many requests were verified is not known"

    yield (
        "SRC001",
        "finding",
        prefill(pool=[2_048, 4_096]),
        "how many tokens the KV pool holds: 2048 (prefill.json), 4096 (prefill.1.json)",
    )
    yield "SRC001", "passed", prefill(pool=[2_048, 2_048]), ""
    yield "SRC001", "passed", prefill(transfer_speed=[1e9, 2e9]), ""  # measured twice


def since(now: dict[str, object], then: dict[str, object]) -> Deployment:
    return Deployment([node("prefill", **now)], baseline={"prefill": node("prefill", **then)})


CASES = list(cases())


@pytest.mark.parametrize(
    ("code", "state", "deployment", "says"),
    CASES,
    ids=[f"{code}-{number}" for number, (code, *_) in enumerate(CASES)],
)
def test_a_rule_ends_as_worked_out_by_hand(code: str, state: str, deployment: Deployment, says: str) -> None:
    (verdict,) = asked(code, deployment)
    assert verdict.state == state, verdict.message
    assert says in verdict.message
    assert verdict.severity == RULES[code].severity


def test_every_rule_has_a_finding_a_pass_and_an_unknown() -> None:
    states = defaultdict(set)
    for code, state, *_ in CASES:
        states[code].add(state)
    assert set(states) == set(RULES)
    assert {code for code in RULES if states[code] != {"finding", "passed", "unknown"}} == {
        "SRC001"
    }  # it needs nothing to be known


@pytest.mark.parametrize(
    "code", [code for code, rule in RULES.items() if rule.per in ("node", "pair") and code != "SRC001"]
)
def test_a_rule_knows_nothing_of_nodes_of_which_nothing_is_known(code: str) -> None:
    rule = RULES[code]
    nodes = [Sheet(name="prefill"), Sheet(name="decode")]
    for sheet in nodes if rule.per == "pair" else []:
        sheet.take(node(sheet.name, engine=None))
    assert {verdict.state for verdict in asked(code, Deployment(nodes))} == {"unknown"}


def test_of_many_disagreements_some_are_named() -> None:
    """Seven facts, five of them by name."""
    twice = {
        "pool": [1, 2],
        "page": [1, 2],
        "context": [1, 2],
        "tp": [1, 2],
        "pp": [1, 2],
        "reserve": [1, 2],
        "model": ["a", "b"],
    }
    (verdict,) = asked("SRC001", prefill(**twice))
    assert verdict.message.endswith(
        "the pipeline parallel depth: 1 (prefill.json), 2 (prefill.1.json); and 2 more"
    )
    (verdict,) = asked(
        "SRC001", prefill(**{name: twice[name] for name in ("pool", "page", "context", "tp", "pp")})
    )
    assert "more" not in verdict.message


# ------------------------------------------------------------------------------------ patches, engines, roles


@pytest.mark.parametrize(("patch", "state"), [(38_935, "attested"), (36_988, "attested"), (1, "finding")])
def test_a_patch_that_is_attested_is_said_to_be_and_not_passed(patch: int, state: str) -> None:
    deployment = prefill(version=OLD)
    deployment.patches = frozenset({patch})
    (verdict,) = asked("VER001", deployment)
    assert verdict.state == state
    assert ("is attested" in verdict.message) == (state == "attested")


def test_rules_for_another_engine_or_role_are_not_asked() -> None:
    assert asked("CAP001", vllm(pool=1, context=2)) == []
    assert asked("CAP003", decode(pool=2_048)) == []
    assert asked("DET001", pair({"checksum": True}, {"checksum": False}, "vllm")) == []


def test_a_server_that_serves_alone_has_no_pair() -> None:
    assert asked("PAIR001", alone(page=16)) == []


# ------------------------------------------------------------------------------------ which prompts


@pytest.mark.parametrize(
    ("page", "context", "first", "last"),
    [
        (16, 8_192, 2_032, 2_041),  # 2,048 - 16; the limit is min(8,192, 2,048) - 6 = 2,042
        (64, 8_192, 1_984, 2_041),
        (16, 2_043, 2_032, 2_036),  # the limit is 2,037
        (16, 2_039, 2_032, 2_032),
        (16, 2_038, None, None),  # the limit is 2,032, so 2,031 is the longest, and is placed
        (1, 8_192, None, None),
    ],
)
def test_the_prompts_that_are_never_placed_follow_from_pool_page_and_context(
    page: int, context: int, first: int | None, last: int | None
) -> None:
    (verdict,) = asked("CAP003", alone(pool=2_048, page=page, context=context, version=NEW))
    if first is None:
        assert verdict.state == "passed"
    else:
        assert verdict.state == "finding"
        assert f"prompts of {first:,} to {last:,} tokens" in verdict.message


def placed(prompt: int, wanted: int, pool: int, page: int, context: int, prefill: bool) -> bool | None:
    """Whether an idle SGLang 0.5.23 starts a prompt, step by step as its source does; None if it refuses it."""
    longest_request = min(context - 1, pool - 1)
    new = max(0, min(wanted, longest_request - prompt - 1))
    new = max(0, min(new, pool - -(-prompt // page) * page - page - 1))
    if prompt >= longest_request - 5:
        return None
    return prompt + (1 if prefill else new) + page < pool


@pytest.mark.parametrize("prefill_node", [False, True])
@pytest.mark.parametrize(
    ("pool", "page", "context"),
    [(2_048, 16, 8_192), (512, 64, 8_192), (512, 8, 508), (512, 4, 8_192), (256, 1, 300)],
)
def test_exactly_those_prompts_that_the_scheduler_never_starts_are_named(
    pool: int, page: int, context: int, prefill_node: bool
) -> None:
    never = [
        prompt
        for prompt in range(1, context)
        if placed(prompt, 1 << 30, pool, page, context, prefill_node) is False
    ]
    said = {"pool": pool, "page": page, "context": context, "version": NEW}
    (verdict,) = asked("CAP003", prefill(**said) if prefill_node else alone(**said))
    if never:
        assert never == list(range(never[0], never[-1] + 1))
        assert f"prompts of {never[0]:,} to {never[-1]:,} tokens" in verdict.message
    else:
        assert verdict.state == "passed"


def test_a_decode_node_whose_reserve_is_its_pool_takes_nothing() -> None:
    (verdict,) = asked("CAP004", decode(pool=512, page=16, longest=506, reserve=512, version=NEW))
    assert "prompts of 1 to 505 tokens" in verdict.message


# ------------------------------------------------------------------------------------ the baseline


def test_a_new_kv_dtype_is_told_also_where_the_pool_is_what_it_was() -> None:
    was = {"pool": 681_280, "kv_dtype": "fp8_e4m3", "tp": 8, "memory_fraction": 0.88}
    (verdict,) = asked("CAP006", since({**was, "kv_dtype": "bfloat16"}, was))
    assert verdict.message == "prefill: the dtype of the KV cache is bfloat16 (was fp8_e4m3)"


def test_what_else_changed_stands_beside_a_pool_that_changed() -> None:
    (verdict,) = asked(
        "CAP006",
        since({"pool": 2_048, "version": "0.5.23", "tp": 2}, {"pool": 4_096, "version": "0.5.22", "tp": 4}),
    )
    assert verdict.message == (
        "prefill: the KV pool holds 2,048 tokens (was 4,096), the tensor parallel width is 2 (was 4), the version is 0.5.23 (was 0.5.22)"
    )


def test_a_new_version_alone_is_no_change_of_a_pool_and_of_a_node_that_is_new_it_is_not_known() -> None:
    assert (
        asked("CAP006", since({"pool": 2_048, "version": "0.5.23"}, {"pool": 2_048, "version": "0.5.22"}))[
            0
        ].state
        == "passed"
    )
    new = Deployment([node("decode", pool=1)], baseline={"prefill": node("prefill", pool=2)})
    (verdict,) = asked("CAP006", new)
    assert verdict.state == "unknown"
    assert "decode: it is not in the baseline" in verdict.message


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"context": 8_192, "pool_limit": 2_048}, "finding"), ({"context": 8_192, "pool_limit": 8_192}, "unknown"),
        ({"context": 8_192}, "unknown"), ({"context": 8_192, "pool_limit": 2_048, "pool": 8_192}, "passed"),
    ],
)  # fmt: skip
def test_a_limit_of_the_pool_may_be_too_small_and_is_never_enough(
    said: dict[str, object], state: str
) -> None:
    assert asked("CAP001", prefill(**said))[0].state == state


def test_only_a_router_is_asked_whether_it_cancels_both_halves() -> None:
    assert asked("PRX004", behind({}, kind="nginx")) == []


def test_without_a_baseline_nobody_asks_what_has_changed() -> None:
    assert asked("CAP006", Deployment([node("decode", pool=1)])) == []


# ------------------------------------------------------------------------------------ less that is known

COUNTS = st.sampled_from([1, 16, 64, 681_280, 1_048_576])
SAID: dict[str, st.SearchStrategy[object]] = {
    "version": st.sampled_from(["0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23", "main", "0.5.22rc1"]),
    "model": st.sampled_from(["/a", "/b", "org/a"]), "revision": st.sampled_from(["1", "2"]),
    "context": COUNTS, "pool": COUNTS, "page": st.sampled_from([1, 16, 64]), "reserve": st.sampled_from([0, 512]),
    "truncates": st.booleans(), "memory_fraction": st.sampled_from([0.5, 0.9]), "kv_bytes": st.sampled_from([0.0, 1e9]),
    "kv_dtype": st.sampled_from(["bfloat16", "fp8_e4m3"]), "tp": st.sampled_from([1, 8]), "pp": st.sampled_from([1, 2]),
    "transport": st.sampled_from(["mooncake", "nixl", "mori", "fake", "other"]), "transport_version": st.sampled_from(["mooncake 1", "mooncake 2", "nixl 1"]),
    "deferred": st.booleans(), "release_timeout": st.sampled_from([0.0, 30.0]), "batch_pages": st.sampled_from([0, 1_024]),
    "transfer_speed": st.sampled_from([0.0, 1e6, 1e10]), "released_by_timeout": st.sampled_from([0, 3]), "checksum": st.booleans(),
    "canary": st.sampled_from(["none", "log", "raise"]), "canary_checked": st.sampled_from([0, 9]), "prefill_speed": st.sampled_from([0.0, 1.0, 1e6]),
    "host": st.sampled_from(["0.0.0.0", "127.0.0.1", "10.0.0.1"]), "inner_host": st.sampled_from(["0.0.0.0", "localhost", "10.0.0.1"]),
    "api_key": st.booleans(), "admin_key": st.booleans(), "metrics_open": st.booleans(), "remote_code": st.booleans(),
    "load_failure": st.sampled_from(["fail", "recompute"]), "lease": st.sampled_from([1.0, 30.0]), "waited": st.sampled_from([0.3, 40.0]),
    "expired": st.sampled_from([0, 1]), "read_late": st.sampled_from([0, 1]), "failed_transfers": st.sampled_from([0, 1]), "developer": st.booleans(),
    "verify": st.sampled_from(["tags", "landing"]), "verified": st.sampled_from([0, 1]), "disabled": st.booleans(), "quarantined": st.sampled_from([0, 1]),
    "integrity_failures": st.sampled_from([0, 1]), "served_requests": st.sampled_from([0, 5]),
}  # fmt: skip
WHOLE = st.fixed_dictionaries(SAID)
NAMES = st.sets(st.sampled_from(sorted(SAID)))


def deployed(
    engine: str, role: str, said: Sequence[Mapping[str, object]], left_out: Sequence[set[str]]
) -> Deployment:
    """Two nodes and a proxy. What was left out of the first's sources is not known of it."""
    nodes = []
    for name, whole, less in zip(("prefill", "decode"), said, left_out, strict=True):
        known = {fact: value for fact, value in whole.items() if fact not in less}
        nodes.append(node(name, name if role == "halves" else role, engine, **known))
    proxy = Proxy(
        "front",
        "sglang-router",
        "a",
        read_timeout=30.0,
        retries_post=False,
        closes_upstream=True,
        cancels_both=True,
    )
    return Deployment(nodes, [proxy], baseline={"prefill": node("prefill", **said[1])})


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["sglang", "vllm", "hermetic"]),
    st.sampled_from(["halves", "both", "alone"]),
    st.tuples(WHOLE, WHOLE),
    st.tuples(NAMES, NAMES),
)
def test_what_is_found_never_passes_when_less_is_known(
    engine: str, role: str, said: tuple[dict[str, object], dict[str, object]], less: tuple[set[str], set[str]]
) -> None:
    """It stays found, or it is unknown."""
    for one in said:
        if one["version"] not in ("0.5.21", "0.5.22", "0.5.23"):
            one["checksum"] = False  # earlier versions have none
    all_known = all_asked(deployed(engine, role, said, (set(), set())))
    part = {
        (verdict.code, verdict.subject): verdict for verdict in all_asked(deployed(engine, role, said, less))
    }
    assert all_known
    for verdict in all_known:
        now = part[verdict.code, verdict.subject]
        assert (verdict.state, now.state) != ("finding", "passed"), (verdict, now)
        # what is off by default is found by the version, until something says that it is on
        assert (verdict.state, now.state) != ("passed", "finding") or verdict.code == "VER003", (verdict, now)
