"""Containers that start an engine by something that no manifest says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermetic.check import facts
from hermetic.check.check import CheckOptions, run
from hermetic.check.command import code
from hermetic.check.output.words import headline
from hermetic.check.readers import manifests
from hermetic.check.readers.hidden import started
from hermetic.check.readers.reading import Reading

DECODE = """\
  decode:
    image: lmsysorg/sglang:v0.5.22
    command: python3 -m sglang.launch_server --model-path /m --disaggregation-mode decode --host 10.0.0.8 --port 30000
"""


def compose(service: str, others: str = "") -> Reading:
    return manifests.read("c.yml", f"services:\n  prefill:\n{service}{others}")


def kubernetes(kind: str, container: str) -> Reading:
    spec = f"spec: {{template: {{spec: {{containers: [{container}]}}}}}}"
    return manifests.read("k.yml", f"apiVersion: x/v1\nkind: {kind}\nmetadata: {{name: prefill}}\n{spec}\n")


def test_a_node_that_a_script_starts_is_a_node_of_which_the_engine_is_known() -> None:
    """Left out, its half would be missing without a word, as if the manifest had none."""
    reading = compose('    image: lmsysorg/sglang:v0.5.22\n    command: ["/opt/start-prefill.sh"]\n', DECODE)
    hidden, decode = reading.sheets
    assert (hidden.name, hidden[facts.ENGINE], list(hidden.facts())[1:]) == ("prefill", "sglang", [])
    assert decode[facts.ROLE] == "decode"
    (part,) = reading.unread
    assert (part.source, part.part) == ("c.yml, line 3, service prefill", True)
    assert part.why.startswith("/opt/start-prefill.sh starts it, which is not read")


def test_what_is_not_known_of_it_counts_with_strict(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    file.write_text("services:\n  p: {image: corp/vllm:1, command: bash /start.sh}\n")
    report = run(CheckOptions((str(file),)))
    assert (code(report), code(report, strict=True)) == (0, 1)
    assert headline(report, strict=False).startswith("Clean, as far as it is known")


def test_a_pod_that_a_script_starts_is_a_node_and_a_job_is_none() -> None:
    container = '{name: a, image: "corp/sglang:7", command: [bash, -c], args: ["set -e; source /e.sh; exec /s/run.sh"]}'
    reading = kubernetes("Deployment", container)
    (sheet,) = reading.sheets
    assert (sheet.name, sheet.sources) == ("prefill", ["k.yml, line 4, Deployment/prefill, container a"])
    assert reading.unread[0].why.startswith("/s/run.sh starts it")
    for kind in ("Job", "CronJob"):
        assert not kubernetes(kind, container).sheets


@pytest.mark.parametrize(
    ("image", "entry", "command", "engine", "by"),
    [
        ("lmsysorg/sglang", [], ["/opt/start.sh"], "sglang", "/opt/start.sh"),
        ("registry:5000/lmsysorg/sglang", ["bash", "/opt/start.sh"], [], "sglang", "/opt/start.sh"),
        ("vllm/vllm-openai", ["tini", "--", "/run.bash"], [], "vllm", "/run.bash"),
        ("corp/vllm-decode", ["sh", "-ec"], ["cd /x && ./go.sh"], "vllm", "./go.sh"),
        ("corp/sglang", ["bash", "-c", "$START"], [], "sglang", "a command that a variable holds"),
        ("corp/sglang-prefill", [], [], "sglang", "the image's own entry point"),
        ("corp/sglang", [], ["--model-path", "/m"], "sglang", "the image's own entry point"),
    ],
)
def test_what_starts_it_is_named(
    image: str, entry: list[str], command: list[str], engine: str, by: str
) -> None:
    assert started(image, entry, command) == (engine, by)


@pytest.mark.parametrize(
    ("image", "entry", "command"),
    [
        ("lmsysorg/sglang", [], []),  # a shell, which does nothing by itself
        ("lmsysorg/sglang", [], ["sleep", "infinity"]),
        ("lmsysorg/sglang", [], ["python3", "-m", "sglang.bench_serving"]),
        ("corp/sglang", ["bash", "-c", "source /env.sh; sleep 9"], []),
        ("corp/vllm-exporter", [], ["/start.sh"]),
        ("corp/vllm-router", [], []),
        ("nginx", [], ["/start.sh"]),
    ],
)
def test_what_does_something_else_is_no_node(image: str, entry: list[str], command: list[str]) -> None:
    assert started(image, entry, command) is None


def test_the_image_of_the_gateway_starts_the_router_by_itself() -> None:
    """docker/gateway.Dockerfile: ENTRYPOINT ["python3", "-m", "sglang_router.launch_router"]"""
    words = '["--pd-disaggregation", "--prefill", "http://p:30000", "8998", "--decode", "http://d:30001"]'
    for service in (f"    command: {words}\n", f'    command: {words[:-1]}, "--disable-retries"]\n'):
        (proxy,) = compose(f"    image: lmsysorg/sgl-model-gateway:v0.3.2\n{service}").proxies
        assert (proxy.kind, proxy.pairs) == ("sglang-router", True)
        assert proxy.retries_post is ("--disable-retries" not in service)  # 0.3.2 asks up to five times
