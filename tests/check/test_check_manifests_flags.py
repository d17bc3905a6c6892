"""Command lines of nodes and routers become facts; what a shell would have to work out does not."""

from __future__ import annotations

import math
import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.check import facts
from hermetic.check.facts import Fact, Sheet
from hermetic.check.readers import flags
from hermetic.check.readers.reading import Reading


def one(command: str | list[str], environment: dict[str, str] | None = None) -> Sheet:
    reading = flags.read("start.sh", command, environment)
    assert len(reading.sheets) == 1, reading
    return reading.sheets[0]


def in_image(image: str, command: list[str], environment: dict[str, str] | None = None) -> Sheet:
    """As a manifest gives it: with an image and all variables."""
    reading = Reading()
    (run,) = flags.in_image(image, [], command, environment or {}, complete=True)
    sheet = flags.read_run(reading, run, "compose.yaml, service a", "a")
    assert sheet is not None
    return sheet


def said(sheet: Sheet) -> dict[str, object]:
    """All but the image, which has a test of its own."""
    return {name: seen[0].value for name, seen in sheet.facts() if seen and name != facts.IMAGE.name}


SGLANG_PREFILL = """\
#!/bin/bash
set -euo pipefail
# decode runs on the other machine: python -m sglang.launch_server --disaggregation-mode decode
export SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0
export SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES=256
MODEL="/models/DeepSeek V3"
numactl --cpunodebind=0 python3 -u -m sglang.launch_server \\
    --model-path "$MODEL" --host 10.1.0.4 --port 30000 \\
    --tp 8 --page-size=64 --context_length 1048576 --max-total-tokens 681280 \\
    --kv-cache-dtype fp8_e4m3 --mem-fraction-static 0.85 \\
    --disaggregation-mode prefill --disaggregation-transfer-backend mooncake \\
    --disaggregation-bootstrap-port 8998 --disaggregation-enable-kv-checksum \\
    --kv-canary log --api-key s3cret-of-clients --enable-metrics --trust-remote-code > /var/log/prefill.log 2>&1
"""


def test_a_script_that_starts_a_prefill_node_says_all_that_its_options_and_exports_say() -> None:
    sheet = one(SGLANG_PREFILL)
    assert said(sheet) == {
        "engine": "sglang", "model": "/models/DeepSeek V3", "host": "10.1.0.4", "tp": 8, "page": 64, "context": 1_048_576,
        "pool_limit": 681_280, "kv_dtype": "fp8_e4m3", "memory_fraction": 0.85, "role": "prefill", "transport": "mooncake",
        "inner_port": 8998, "checksum": True, "canary": "log", "api_key": True, "metrics": True, "remote_code": True,
        "deferred": False, "batch_pages": 256,
    }  # fmt: skip
    assert sheet.address == ("10.1.0.4", 30000)
    assert sheet.where(facts.PAGE) == "start.sh, --page-size"
    assert sheet.where(facts.DEFERRED) == "start.sh, SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"


def test_a_key_is_never_kept() -> None:
    reading = flags.read("start.sh", SGLANG_PREFILL)
    assert "s3cret" not in repr(reading)


def test_the_most_that_a_pool_may_hold_is_not_what_it_holds() -> None:
    """The incident's pool was smaller than anybody had asked for: memory decides."""
    assert facts.POOL not in one(SGLANG_PREFILL)


def test_vllm_with_its_transfer_config_as_json() -> None:
    sheet = one(
        "VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.5 VLLM_SERVER_DEV_MODE=1 VLLM_API_KEY=abc vllm serve Qwen/Qwen3-8B -tp 4 --max-model-len 32k "
        '--block-size 128 --kv-transfer-config \'{"kv_connector":"NixlConnector","kv_role":"kv_producer",'
        '"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"kv_lease_duration":90}}\' --port 8100'
    )
    assert said(sheet) == {
        "engine": "vllm", "model": "Qwen/Qwen3-8B", "tp": 4, "context": 32_000, "page": 128, "role": "prefill", "transport": "nixl",
        "load_failure": "recompute", "lease": 90.0, "inner_host": "10.0.0.5", "developer": True, "api_key": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "context"), [("8192", 8192), ("1k", 1000), ("1K", 1024), ("25.6k", 25_600), ("2M", 2 * 1024**2)]
)
def test_vllm_lengths_may_have_a_unit(text: str, context: int) -> None:
    assert one(f"vllm serve m --max-model-len {text}")[facts.CONTEXT] == context


@pytest.mark.parametrize("text", ["auto", "-1", "1.5K", "long", "$LENGTH", "${LENGTH:-8192}"])
def test_a_length_that_is_not_said_is_no_fact(text: str) -> None:
    assert facts.CONTEXT not in one(f"vllm serve m --max-model-len {text} --block-size 16")


def test_vllm_options_inside_the_json_may_stand_alone() -> None:
    sheet = one(
        "python -m vllm.entrypoints.openai.api_server --model m --kv-transfer-config.kv_connector NixlConnector "
        "--kv_transfer_config.kv_role=kv_consumer --kv-transfer-config.kv_connector_extra_config.kv_lease_duration 45 --block-size 32"
    )
    assert (sheet[facts.ROLE], sheet[facts.LEASE], sheet[facts.PAGE]) == ("decode", 45.0, 32)


@pytest.mark.parametrize(
    ("connector", "role", "transport"),
    [
        ("NixlConnector", "both", "nixl"), ("MooncakeConnector", "both", "mooncake"), ("OffloadingConnector", "alone", None),
    ],
)  # fmt: skip
def test_a_connector_that_keeps_kv_on_the_node_makes_no_half(
    connector: str, role: str, transport: str | None
) -> None:
    config = f'{{"kv_connector":"{connector}","kv_role":"kv_both"}}'
    sheet = one(["vllm", "serve", "m", "--kv-transfer-config", config])
    assert sheet[facts.ROLE] == role
    assert sheet.values(facts.TRANSPORT) == ([] if transport is None else [transport])


def test_the_lease_of_a_connector_inside_a_multi_connector_is_found() -> None:
    config = (
        '{"kv_connector":"MultiConnector","kv_role":"kv_producer","kv_connector_extra_config":{"connectors":['
        '{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_connector_extra_config":{"kv_lease_duration":60}},'
        '{"kv_connector":"OffloadingConnector","kv_role":"kv_both"}]}}'
    )
    sheet = one(["vllm", "serve", "m", "--kv-transfer-config", config])
    assert (sheet[facts.ROLE], sheet[facts.LEASE]) == ("prefill", 60.0)


def test_a_transfer_config_that_is_no_json_is_reported_and_the_rest_is_read() -> None:
    reading = flags.read(
        "start.sh", ["vllm", "serve", "m", "--kv-transfer-config", "{kv_role: x", "-tp", "2"]
    )
    assert reading.sheets[0][facts.TP] == 2
    assert [(unread.why, unread.part) for unread in reading.unread] == [
        ("--kv-transfer-config is no JSON object", True)
    ]


# ------------------------------------------------------------------------------------ what is not known


@pytest.mark.parametrize(
    "value",
    ["$PAGE", "${PAGE}", "${PAGE:-64}", "$(nproc)", "`nproc`", '"$PAGE"', "6$PAGE", "$((2 * 32))", "$1"],
)
def test_a_value_that_a_shell_would_work_out_is_no_fact(value: str) -> None:
    sheet = one(f"sglang serve --model-path m --page-size {value} --tp 2")
    assert facts.PAGE not in sheet
    assert sheet[facts.TP] == 2


def test_a_variable_that_is_given_is_filled_in() -> None:
    sheet = one('sglang serve --page-size ${PAGE:-1} --port "$PORT"', {"PAGE": "64", "PORT": "30001"})
    assert sheet[facts.PAGE] == 64
    assert sheet.address == ("", 30001)


def test_a_variable_set_in_a_branch_is_not_known_behind_it() -> None:
    script = 'PAGE=64\nif [ -n "$BIG" ]; then PAGE=128; fi\nsglang serve --model-path m --page-size $PAGE'
    assert facts.PAGE not in one(script)
    assert one(script.replace("PAGE=128", "true"))[facts.PAGE] == 64


def test_a_variable_set_if_a_test_holds_is_not_known() -> None:
    script = 'PAGE=64\n[ -n "$BIG" ] && PAGE=128\nsglang serve --model-path m --page-size $PAGE'
    assert facts.PAGE not in one(script)


def test_a_variable_of_the_shell_alone_is_not_in_the_environment() -> None:
    name = "SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES"
    assert facts.BATCH_PAGES not in one(f"{name}=128; sglang serve --model-path m")
    assert one(f"{name}=128\nexport {name}\nsglang serve --model-path m")[facts.BATCH_PAGES] == 128


def test_options_in_a_list_of_the_shell_are_read() -> None:
    script = (
        'ARGS=(--model-path m\n  --tp 4 "--page-size" 32)\nARGS+=(--host ::1)\nexec sglang serve "${ARGS[@]}"'
    )
    sheet = one(script)
    assert (sheet[facts.TP], sheet[facts.PAGE], sheet[facts.HOST]) == (4, 32, "::1")


def test_options_in_a_variable_without_quotes_are_words_of_their_own() -> None:
    assert one("OPTS='--tp 4  --page-size 32'\nsglang serve m $OPTS --host h")[facts.PAGE] == 32


def test_options_that_a_variable_holds_are_said_to_be_missing() -> None:
    reading = flags.read("start.sh", "sglang serve m $EXTRA --tp 4")
    assert reading.sheets[0][facts.TP] == 4
    assert [unread.why for unread in reading.unread] == [
        "has options that a variable or a file holds, which are not read"
    ]


def test_a_value_that_is_none_is_reported_with_its_option() -> None:
    reading = flags.read("start.sh", "sglang serve m --page-size sixteen --tp 2 --kv-canary maybe --port")
    assert [unread.why for unread in reading.unread] == [
        "--port has no value",
        "--page-size is 'sixteen', which is no number of things",
        "--kv-canary is 'maybe'; known are none, log, raise",
    ]
    assert said(reading.sheets[0]) == {"engine": "sglang", "model": "m", "tp": 2}


def test_an_environment_variable_that_a_shell_would_work_out_is_no_fact() -> None:
    sheet = one("VLLM_NIXL_SIDE_CHANNEL_HOST=$(hostname -i) vllm serve m -tp 2")
    assert said(sheet) == {"engine": "vllm", "model": "m", "tp": 2}


def test_a_variable_that_the_engine_cannot_read_is_no_fact() -> None:
    """SGLang takes its default for it and warns."""
    reading = flags.read("start.sh", "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=off sglang serve m")
    assert facts.DEFERRED not in reading.sheets[0]
    assert "neither true nor false" in reading.unread[0].why


def test_of_two_values_the_last_counts() -> None:
    assert one("sglang serve m --tp 2 --tensor-parallel-size 4").values(facts.TP) == [4]


# ------------------------------------------------------------------------------------ what stands before


@pytest.mark.parametrize(
    "command",
    [
        "python -m sglang.launch_server --tp 2",
        "python3.11 -u -X dev -m sglang.launch_server --tp 2",
        "/opt/venv/bin/python /opt/venv/lib/python3.11/site-packages/sglang/launch_server.py --tp 2",
        "sglang serve --tp 2",
        "exec /opt/venv/bin/sglang serve --tp 2",
        "env -u X A=B sglang serve --tp 2",
        "sudo -E -u serve nohup nice -n 5 sglang serve --tp 2 &",
        "tini -g -- sglang serve --tp 2",
        "bash -lc 'cd /srv && exec sglang serve --tp 2'",
        "sh -c \"exec bash -ec 'sglang serve --tp 2'\"",
        "pip install -U sglang && sglang serve --tp 2 || exit 1",
        "torchrun --nproc_per_node 1 -m sglang.launch_server --tp 2",
        "docker run --gpus all --rm -it -p30000:30000 -e A=B --shm-size 32g lmsysorg/sglang:latest sglang serve --tp 2",
        "docker run --entrypoint sglang lmsysorg/sglang:latest serve --tp 2",
        "podman run -d --name=x img bash -c 'sglang serve --tp 2'",
        "( sglang serve --tp 2 ) > log 2>&1",
        "while true; do sglang serve --tp 2; sleep 5; done",
        "cat <<EOF\nsglang serve --tp 8\nEOF\nsglang serve --tp 2",
    ],
)
def test_an_engine_is_found_behind_what_starts_it(command: str) -> None:
    assert said(one(command))["tp"] == 2


@pytest.mark.parametrize(
    "command",
    [
        "echo sglang serve --tp 2",
        "pkill -f 'sglang serve'",
        "# sglang serve --tp 2",
        "curl http://localhost:30000/server_info",
        "docker pull lmsysorg/sglang:v0.5.19",
        "grep -r vllm serve",
        "",
    ],
)
def test_what_only_names_an_engine_starts_none(command: str) -> None:
    assert not flags.looks_like("a", command)
    reading = flags.read("a", command)
    assert reading.sheets == []
    assert [unread.why for unread in reading.unread] == ["starts no engine or router that is known here"]


def test_a_log_that_quotes_its_command_line_is_no_command_line() -> None:
    log = "sglang serve --tp 2\n[2026-11-30 10:00:00] server_args=ServerArgs(model_path='m')\n"
    assert flags.looks_like("a", log.splitlines()[0])
    assert not flags.looks_like("a", log)
    assert not flags.looks_like("a", "INFO 11-30 10:00:00 [api_server.py:1] vLLM\nvllm serve m")
    assert not flags.looks_like("a", "(APIServer pid=7) INFO 11-30 10:00:00 x\nvllm serve m")


def test_two_commands_are_two_nodes() -> None:
    reading = flags.read(
        "pair.sh",
        "sglang serve m --disaggregation-mode prefill &\nsglang serve m --disaggregation-mode decode",
    )
    assert [sheet[facts.ROLE] for sheet in reading.sheets] == ["prefill", "decode"]
    assert [sheet.sources for sheet in reading.sheets] == [["pair.sh, command 1"], ["pair.sh, command 2"]]


def test_a_container_has_the_variables_that_it_is_given_and_no_others() -> None:
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
    image = "lmsysorg/sglang:v0.5.21"
    assert one(f"export {name}=0; docker run -e {name}=1 {image} sglang serve m")[facts.DEFERRED] is True
    outside = one(f"export {name}=0; docker run {image} sglang serve m")
    assert outside.where(facts.DEFERRED) == "start.sh, default of 0.5.21"
    assert facts.DEFERRED not in one(f"docker run -e {name} {image} sglang serve m")
    assert facts.DEFERRED not in one(f"docker run --env-file e {image} sglang serve m")


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sglang serve m --nnodes 2 --node-rank 1 --tp 16", "has --node-rank 1, so it answers no requests"),
        ("vllm serve m --headless --data-parallel-size 4", "has --headless, so it answers no requests"),
    ],
)
def test_what_only_computes_for_another_process_is_no_node(command: str, why: str) -> None:
    reading = flags.read("start.sh", f"{command} &\nsglang serve m --node-rank 0 --tp 4")
    assert [sheet[facts.TP] for sheet in reading.sheets] == [4]
    (unread,) = reading.unread
    assert unread.why.startswith(why)
    assert unread.part


def test_a_rank_that_is_not_said_leaves_the_node() -> None:
    assert one("sglang serve m --node-rank $LWS_WORKER_INDEX --tp 4")[facts.TP] == 4


def test_what_is_installed_when_a_container_starts_is_not_what_its_tag_says() -> None:
    script = "pip install -U sglang==0.5.23 && sglang serve m --port 30000"
    sheet = in_image("lmsysorg/sglang:v0.5.19", ["bash", "-c", script])
    assert facts.VERSION not in sheet
    assert facts.CHECKSUM not in sheet
    assert facts.VERSION in in_image("lmsysorg/sglang:v0.5.19", ["bash", "-c", script.partition("&& ")[2]])


# ------------------------------------------------------------------------------------ prose

README = """\
# Our servers

You can run
vllm serve and it will answer, or
sglang serve with other options --tp 9 in a sentence that begins so is read.

```yaml
sglang serve a --tp 1
```

```bash
# the real one
$ python -m sglang.launch_server --model-path b \\
    --tp 2
```

Or without a fence:

    python -m vllm.entrypoints.openai.api_server --model c \\
      --tensor-parallel-size 3

~~~python
sglang = vllm
~~~
"""


def test_of_prose_the_commands_of_a_shell_are_read_and_lines_that_start_an_engine_with_options() -> None:
    assert flags.looks_like("docs/README.md", README)
    reading = flags.read("docs/README.md", README)
    assert [(sheet[facts.MODEL], sheet[facts.TP]) for sheet in reading.sheets] == [
        ("with", 9),
        ("b", 2),
        ("c", 3),
    ]


@pytest.mark.parametrize("name", ["README.md", "notes.rst", "page.MDX"])
def test_a_sentence_starts_no_engine(name: str) -> None:
    text = "Start it so:\nvllm serve is what we use\nsglang serve does the same\n"
    assert flags.looks_like("start.sh", text)
    assert not flags.looks_like(name, text)


# ------------------------------------------------------------------------------------ versions and defaults


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("lmsysorg/sglang:v0.5.19-cu126", ("sglang", "0.5.19")),
        ("registry.internal:5000/mirror/lmsysorg/sglang:v0.5.5.post3", ("sglang", "0.5.5.post3")),
        ("docker.io/lmsysorg/sglang:v0.5.4rc1-rocm700-mi35x@sha256:abc", ("sglang", "0.5.4rc1")),
        ("vllm/vllm-openai:v0.32.0", ("vllm", "0.32.0")),
        ("vllm/vllm-openai-rocm:v0.32.0", ("vllm", "0.32.0")),
        ("lmsysorg/sglang:latest", None),
        ("lmsysorg/sglang", None),
        ("lmsysorg/sglang:dev-cu12", None),
        ("registry.internal:5000/lmsysorg/sglang", None),
        ("ours/llm-server:v1.2.3", None),
        ("", None),
    ],
)
def test_the_tag_of_a_published_image_says_the_version(image: str, version: tuple[str, str] | None) -> None:
    assert flags.image_version(image) == version


def test_the_place_of_a_version_says_that_it_is_a_tag() -> None:
    sheet = in_image("lmsysorg/sglang:v0.5.19-cu126", ["sglang", "serve", "m"])
    assert sheet[facts.VERSION] == "0.5.19"
    assert sheet.where(facts.VERSION) == "compose.yaml, service a, image tag"


# By hand from server_args.py and environ.py of 0.5.19, and from arg_groups/fields and environ.py of the later ones.
BY_DEFAULT: dict[str, object] = {
    "role": "alone", "checksum": False, "reserve": 512, "truncates": False, "canary": "none", "tp": 1, "pp": 1, "api_key": False, "admin_key": False,
    "remote_code": False, "metrics": False, "host": "127.0.0.1", "release_timeout": 30.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "own"),
    [
        ("0.5.19", {"deferred": False}),  # and no bound of a transfer batch: it has no such variable
        ("0.5.20", {"deferred": False, "batch_pages": 0}),
        ("0.5.21", {"deferred": True, "batch_pages": 0}),
        ("0.5.22", {"deferred": True, "batch_pages": 0}),
        ("0.5.23", {"deferred": True, "batch_pages": 0}),
    ],
)
def test_defaults_are_those_of_the_release_whose_source_was_read(
    version: str, own: dict[str, object]
) -> None:
    sheet = in_image(f"lmsysorg/sglang:v{version}-cu126", ["sglang", "serve", "m"])
    assert said(sheet) == {"engine": "sglang", "version": version, "model": "m", **BY_DEFAULT, **own}
    assert sheet.where(facts.RESERVE) == f"compose.yaml, service a, default of {version}"
    checksum = f"{version} has no such option" if version < "0.5.21" else f"default of {version}"
    assert sheet.where(facts.CHECKSUM) == f"compose.yaml, service a, {checksum}"


@pytest.mark.parametrize("version", ["0.5.18", "0.5.22.post1", "0.5.23rc1", "0.5.24"])
def test_of_a_release_that_was_not_read_no_default_is_known(version: str) -> None:
    sheet = in_image(
        f"lmsysorg/sglang:v{version}", ["sglang", "serve", "m", "--disaggregation-mode", "prefill"]
    )
    assert said(sheet) == {"engine": "sglang", "version": version, "model": "m", "role": "prefill"}
    sheet = in_image(
        f"lmsysorg/sglang:v{version}", ["sglang", "serve", "m", "--disaggregation-mode", "decode"]
    )
    assert said(sheet) == {"engine": "sglang", "version": version, "model": "m", "role": "decode"}


@pytest.mark.parametrize(
    ("options", "restores"),
    [
        ([], False),
        (["--enable-hierarchical-cache"], False),
        (["--disaggregation-decode-enable-radix-cache"], False),
        (["--disaggregation-decode-enable-radix-cache", "--enable-hierarchical-cache"], True),
        (["--disaggregation-decode-enable-radix-cache", "--enable-hicache"], True),
        (["--enable-hierarchical-cache", "\0"], None),
    ],
)
def test_decode_restores_from_the_host_only_with_both_options(
    options: list[str], restores: bool | None
) -> None:
    command = ["sglang", "serve", "m", "--disaggregation-mode", "decode", *options]
    sheet = in_image("lmsysorg/sglang:v0.5.21", command)
    assert sheet.values(facts.RESTORES) == ([] if restores is None else [restores])


def test_mooncake_over_tcp_is_mooncake_as_the_node_itself_says() -> None:
    command = "sglang serve m --disaggregation-mode decode --disaggregation-transfer-backend mooncake_tcp"
    assert one(command)[facts.TRANSPORT] == "mooncake"


def test_a_default_is_not_taken_where_something_else_may_be_said() -> None:
    image = "lmsysorg/sglang:v0.5.23"
    given_unknown = in_image(image, ["sglang", "serve", "m", "--kv-canary", "\0"])
    assert facts.CANARY not in given_unknown
    more = in_image(image, ["sglang", "serve", "m", "\0"])
    assert facts.CANARY not in more
    assert facts.ROLE not in more
    shortened = in_image(image, ["sglang", "serve", "m", "--disaggregation-mod", "prefill"])
    assert facts.ROLE not in shortened  # argparse takes it; what it means is left open here
    assert shortened[facts.CANARY] == "none"


@pytest.mark.parametrize("version", ["0.5.19", "0.5.23"])
def test_a_prefill_node_moves_kv_by_mooncake_and_its_bootstrap_server_listens_where_the_api_does(
    version: str,
) -> None:
    command = ["sglang", "serve", "m", "--host", "0.0.0.0", "--disaggregation-mode", "prefill"]
    sheet = in_image(f"lmsysorg/sglang:v{version}", command)
    assert (sheet[facts.TRANSPORT], sheet[facts.INNER_HOST]) == ("mooncake", "0.0.0.0")
    assert facts.INNER_HOST not in in_image("lmsysorg/sglang:v0.5.18", command)


def test_vllm_0_32_0_by_default() -> None:
    """Read in config/, envs.py and the NIXL connector of 0.32.0. Without --host it listens everywhere."""
    config = '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'
    sheet = in_image("vllm/vllm-openai:v0.32.0", ["--model", "m", "--kv-transfer-config", config])
    assert said(sheet) == {
        "engine": "vllm", "version": "0.32.0", "model": "m", "tp": 1, "pp": 1, "remote_code": False, "host": "0.0.0.0", "role": "decode",
        "transport": "nixl", "lease": 30.0, "load_failure": "fail", "inner_host": "localhost", "developer": False, "api_key": False,
    }  # fmt: skip
    assert in_image("vllm/vllm-openai:v0.32.0", ["m"])[facts.ROLE] == "alone"
    other = in_image("vllm/vllm-openai:v0.31.0", ["--model", "m", "--kv-transfer-config", config])
    assert said(other) == {
        "engine": "vllm", "version": "0.31.0", "model": "m", "role": "decode", "transport": "nixl",
    }  # fmt: skip


def test_no_key_is_said_of_vllm_only_where_no_variable_may_hold_one() -> None:
    run = flags.Run("vllm", "serve", ("m",), {}, "vllm/vllm-openai:v0.32.0", complete=False)
    sheet = flags.read_run(Reading(), run, "unit", "a")
    assert sheet is not None
    assert facts.API_KEY not in sheet
    assert facts.DEVELOPER not in sheet


# ------------------------------------------------------------------------------------ files that are named


def test_a_configuration_file_beside_it_is_read_and_the_command_line_counts_before_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "node.yaml").write_text(
        "model-path: /m\ntp-size: 4\npage-size: 16\nenable-metrics: true\ntrust-remote-code: false\n"
    )
    script = tmp_path / "start.sh"
    script.write_text("sglang serve --config node.yaml --page-size 64")
    sheet = flags.read(str(script), script.read_text()).sheets[0]
    assert said(sheet) == {"engine": "sglang", "model": "/m", "tp": 4, "page": 64, "metrics": True}


def test_a_configuration_file_that_is_not_there_is_reported() -> None:
    reading = flags.read("start.sh", "vllm serve m --config node.yaml")
    assert [unread.why for unread in reading.unread] == [
        "--config node.yaml is not read: it is not here",
        "has options that a variable or a file holds, which are not read",
    ]


CLUSTER = """
model = "smollm2"
page_size = 16
verify = "read"
transport = "mooncake"
keys = "cluster.keys"
[gateway]
control = "10.0.0.1:7000"
http = "10.0.0.1:8000"
api_keys = "tenants.toml"
context_length = 4096
[workers.prefill-a]
role = "prefill"
listen = "10.0.0.2:7001"
[workers.decode-a]
role = "decode"
listen = "10.0.0.3:7001"
"""


def test_hermetic_nodes_are_read_with_their_cluster_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    script = tmp_path / "start.sh"
    script.write_text(
        "hermetic gateway --cluster cluster.toml\nhermetic prefill --cluster cluster.toml\nhermetic decode --cluster cluster.toml --name decode-a"
    )
    gateway, prefill, decode = flags.read(str(script), script.read_text()).sheets
    shared = {
        "engine": "hermetic", "model": "smollm2", "page": 16, "verify": "read", "transport": "mooncake", "remote_code": False,
    }  # fmt: skip
    assert said(gateway) == shared | {"context": 4096, "api_key": True, "host": "10.0.0.1", "role": "both"}
    assert gateway.address == ("10.0.0.1", 8000)
    assert said(prefill) == shared | {"role": "prefill"}
    assert said(decode) == shared | {"role": "decode"}


def test_hermetic_serve_says_its_own_options_and_no_defaults() -> None:
    sheet = one(
        "hermetic serve --model smollm2 --verify read --page-size 32 --host 0.0.0.0 --port 8000 --api-keys k.toml"
    )
    assert said(sheet) == {
        "engine": "hermetic", "model": "smollm2", "verify": "read", "page": 32, "host": "0.0.0.0", "api_key": True,
        "remote_code": False,
    }  # fmt: skip
    assert one("hermetic serve --mode unified")[facts.ROLE] == "alone"
    assert one("hermetic serve --mode disaggregated")[facts.ROLE] == "both"


def test_a_decode_worker_without_its_cluster_file_has_no_role() -> None:
    """A unified worker is started by `hermetic decode` too."""
    reading = flags.read("start.sh", "hermetic decode --cluster cluster.toml")
    assert facts.ROLE not in reading.sheets[0]
    assert "cluster file cluster.toml is not read" in reading.unread[0].why


# ------------------------------------------------------------------------------------ routers


def test_the_options_of_sglangs_router_are_a_proxy() -> None:
    reading = flags.read(
        "router.sh",
        "python -m sglang_router.launch_router --pd-disaggregation --prefill http://10.0.0.1:30000 8998 --prefill http://10.0.0.2:30000 "
        "--decode http://10.0.0.3:30000 --request-timeout-secs 120 --retry-max-retries 3 --host 0.0.0.0 --port 8000",
    )
    (proxy,) = reading.proxies
    assert reading.sheets == []
    assert (proxy.kind, proxy.read_timeout, proxy.retries_post) == ("sglang-router", 120.0, True)
    assert (proxy.closes_upstream, proxy.cancels_both) == (None, None)
    assert (
        proxy.routes
        == "prefill http://10.0.0.1:30000, prefill http://10.0.0.2:30000, decode http://10.0.0.3:30000"
    )


PAIRS = ["--pd-disaggregation", "--prefill", "http://p:1", "--decode", "http://d:1"]


def router(image: str, command: list[str]) -> tuple[float | None, bool | None, bool | None, bool | None]:
    """Its time-out, whether it asks again, whether it serves pairs, and whether it cancels both halves."""
    reading = Reading()
    (run,) = flags.in_image(image, [], ["sglang-router", *command], {}, complete=True)
    assert flags.read_run(reading, run, "pod", "r") is None
    (proxy,) = reading.proxies
    return proxy.read_timeout, proxy.retries_post, proxy.pairs, proxy.cancels_both


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (PAIRS, (1800.0, True, True, False)),
        ([*PAIRS, "--disable-retries", "--request-timeout-secs", "60"], (60.0, False, True, False)),
        ([*PAIRS, "--mini-lb"], (1800.0, True, True, None)),
        (["--worker-urls", "http://a:1"], (1800.0, True, False, None)),
        (["--enable-igw", "--port", "1"], (1800.0, True, None, None)),
        (["--policy", "random", "\0"], (None, None, None, None)),
    ],
)
def test_what_sglangs_router_does_by_itself_is_known_of_0_3_2(
    options: list[str], expected: tuple[float | None, bool | None, bool | None, bool | None]
) -> None:
    """Read in router_args.py, src/core/retry.rs and src/routers/http/pd_router.rs of 0.3.2."""
    assert router("lmsysorg/sgl-model-gateway:v0.3.2", options) == expected


def test_of_another_router_nothing_is_taken_for_granted() -> None:
    assert router("lmsysorg/sgl-model-gateway:v0.3.3", PAIRS) == (None, None, True, None)
    assert router("ours/router:v0.3.2", PAIRS) == (None, None, True, None)


@pytest.mark.parametrize(
    ("image", "kept"),
    [
        ("lmsysorg/sglang:v0.5.23-cu126", True), ("ours/server:1.2", True), ("ours/server:latest@sha256:0abc", True),
        ("lmsysorg/sglang:latest", False), ("lmsysorg/sglang", False), ("lmsysorg/sglang:v0.5.23-\0", False),
    ],
)  # fmt: skip
def test_an_image_is_one_that_a_tag_with_a_version_or_a_digest_names(image: str, kept: bool) -> None:
    assert in_image(image, ["sglang", "serve", "m"]).values(facts.IMAGE) == ([image] if kept else [])


@pytest.mark.parametrize(
    ("options", "retries"),
    [
        ("--disable-retries", False),
        ("--retry-max-retries 1", False),
        ("--retry-max-retries=2", True),
        ("", None),
    ],
)
def test_whether_a_router_retries_is_known_where_it_is_said(options: str, retries: bool | None) -> None:
    reading = flags.read("r", f"vllm-router --vllm-pd-disaggregation --decode http://d:1 {options}")
    assert [(proxy.kind, proxy.retries_post, proxy.read_timeout) for proxy in reading.proxies] == [
        ("vllm-router", retries, None)
    ]


def test_a_server_that_starts_its_router_is_a_node_and_a_proxy() -> None:
    reading = flags.read(
        "s",
        "python -m sglang_router.launch_server --model-path m --dp-size 2 --router-request-timeout-secs 60",
    )
    assert reading.sheets[0][facts.MODEL] == "m"
    assert reading.proxies[0].read_timeout == 60.0
    assert not math.isinf(reading.proxies[0].read_timeout)


# ------------------------------------------------------------------------------------ properties

WORDS = st.lists(
    st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20), max_size=12
)
OPTIONS = st.lists(
    st.sampled_from([
        ["--tp", "4"], ["--page-size=64"], ["--host", "a b"], ["--enable-metrics"], ["--kv-canary", "log"], ["--model-path", "it's \"x\" $y `z`"],
        ["--disaggregation-mode", "decode"], ["--port", "30000"], ["--revision", "\\#;&|"],
    ])
)  # fmt: skip


@given(WORDS, OPTIONS)
@settings(deadline=None)
def test_words_are_read_the_same_as_a_list_and_as_a_quoted_line(
    words: list[str], options: list[list[str]]
) -> None:
    command = [
        "python",
        "-m",
        "sglang.launch_server",
        *(word for option in options for word in option),
        *words,
    ]
    as_list, as_text = flags.read("s", command), flags.read("s", shlex.join(command))
    assert [said(sheet) for sheet in as_list.sheets] == [said(sheet) for sheet in as_text.sheets]
    assert [sheet.address for sheet in as_list.sheets] == [sheet.address for sheet in as_text.sheets]
    assert as_list.unread == as_text.unread


@given(st.data())
@settings(deadline=None)
def test_no_damaged_script_ends_the_reader(data: st.DataObject) -> None:
    text = (
        SGLANG_PREFILL
        + 'A=(x "$y")\ncase $A in a) vllm serve "${A[@]}" ;; esac\nf() { sglang serve $(f); }\n'
    )
    cut = data.draw(st.integers(0, len(text)))
    at = data.draw(st.integers(0, len(text)))
    junk = data.draw(st.text(st.sampled_from("'\"\\$`(){}[]<>|&;#= \n\0\r!~a-"), max_size=12))
    damaged = (text[:at] + junk + text[at:])[: cut + len(junk)]
    flags.looks_like("s", damaged)
    for sheet in flags.read("s", damaged).sheets:
        for name, seen in sheet.facts():
            assert name in facts.FACTS
            assert all("\0" not in str(one_seen.value) for one_seen in seen), name


def test_every_fact_that_the_reader_adds_is_one_that_there_is() -> None:
    for table in (flags._FACTS, flags._VARIABLES):
        for values in table.values():
            assert all(isinstance(fact, Fact) for fact, _ in values.values())
