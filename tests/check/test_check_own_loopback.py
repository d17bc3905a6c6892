"""A side channel at localhost, where each half has a localhost of its own; and variables that are values, not options."""

from __future__ import annotations

from pathlib import Path

import pytest

from hermetic.check import facts
from hermetic.check.check import CheckOptions, run
from hermetic.check.readers import flags
from hermetic.check.readers.reading import Reading

CONNECTOR = '\'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\''
POD = """\
apiVersion: apps/v1
kind: StatefulSet
metadata: {{name: {name}}}
spec:
  template:
    spec:
      {network}
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.32.0
        args: ["--model", "m", "--port", "8100", "--kv-transfer-config", {connector}]
        env: [{{name: X, value: "1"}}{host}]
---
"""
OTHER = ", {name: VLLM_NIXL_SIDE_CHANNEL_HOST, value: 10.0.0.7}"


def states(folder: Path, text: str) -> set[str]:
    file = folder / "m.yaml"
    file.write_text(text)
    return {one.state for one in run(CheckOptions((str(file),), select=("VLLM007",))).verdicts}


def pods(network: str = "", host: str = "") -> str:
    return "".join(
        POD.format(name=name, network=network, connector=CONNECTOR, host=host) for name in ("p", "d")
    )


def test_two_pods_do_not_share_localhost(tmp_path: Path) -> None:
    """envs.py of vLLM 0.32: VLLM_NIXL_SIDE_CHANNEL_HOST is localhost where it is not set; each pod is a network namespace of its own."""
    assert states(tmp_path, pods()) == states(tmp_path, pods("hostNetwork: false")) == {"finding"}
    assert states(tmp_path, pods(host=OTHER)) == {"passed"}


def test_pods_on_the_network_of_their_host_may_share_it(tmp_path: Path) -> None:
    assert states(tmp_path, pods("hostNetwork: true")) == {"unknown"}


def test_two_containers_of_one_pod_share_it(tmp_path: Path) -> None:
    """Where they serve is not known all the same."""
    one = POD.format(name="p", network="", connector=CONNECTOR, host="").removesuffix("---\n")
    container = one[one.index("      - name: vllm") :]
    assert states(tmp_path, one + container.replace("name: vllm", "name: other")) == {"unknown"}


def service(name: str, more: str = "") -> str:
    words = f"--model m --port 8100 --kv-transfer-config {CONNECTOR}"
    return f"  {name}:\n    image: vllm/vllm-openai:v0.32.0\n    command: >\n      {words}\n{more}"


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ("", "finding"),
        ("    network_mode: host\n", "unknown"),
        ("    network_mode: service:p\n", "unknown"),
    ],
)
def test_two_containers_of_compose_share_it_only_if_they_are_told_to(
    tmp_path: Path, more: str, state: str
) -> None:
    assert states(tmp_path, f"services:\n{service('p')}{service('d', more)}") == {state}


# ------------------------------------------------------------------------------------ variables


LEADER = (
    "python3 -m sglang.launch_server --model-path m --disaggregation-mode decode --nnodes $NODES --node-rank 0 "
    "--dist-init-addr $LWS_LEADER_ADDRESS:20000 --tp 16"
)


def test_a_variable_behind_an_option_that_takes_a_value_is_its_value_and_hides_no_option() -> None:
    """As the manifests of LeaderWorkerSets start it: what is not said has its default."""
    reading = Reading()
    (leader,) = flags.in_image("lmsysorg/sglang:v0.5.22", ("bash", "-c"), [LEADER], {}, complete=True)
    flags.read_run(reading, leader, "c", "leader")
    (sheet,) = reading.sheets
    assert (sheet[facts.TP], sheet[facts.TRANSPORT], reading.unread) == (16, "mooncake", [])
    assert not flags.read("c", "vllm serve m --data-parallel-address $LEADER --max-num-seqs $N").unread


def test_a_variable_behind_a_switch_may_be_any_option() -> None:
    (part,) = flags.read("c", f"{LEADER} --enable-metrics $EXTRA").unread
    assert part.why == "has options that a variable or a file holds, which are not read"
