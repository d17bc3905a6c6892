"""Compose files, Kubernetes manifests and systemd units, as operators write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.check import facts
from hermetic.check.facts import Sheet
from hermetic.check.readers import beside, flags, manifests, proxies, systemd, yaml_text
from hermetic.check.readers.reading import Reading

CAPTURES = Path(__file__).parent / "captures"

COMPOSE = """\
# The incident's deployment, as it was started
x-node: &node
  image: lmsysorg/sglang:v0.5.19-cu126
  ipc: host
  restart: unless-stopped
  environment: &env
    NCCL_DEBUG: WARN
    SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES: 512

services:
  prefill:
    <<: *node
    command: >
      python3 -m sglang.launch_server --model-path /models/base --host 0.0.0.0 --port 30000
      --tp 8 --page-size 64 --context-length 1048576 --disaggregation-mode prefill
    ports: ["31000:30000", "8998:8998"]
    environment:
      <<: *env
      SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE: "1"
  decode:
    <<: *node
    entrypoint: ["bash", "-c"]
    command:
      - |
        exec python3 -m sglang.launch_server --model-path /models/base --disaggregation-mode decode \\
          --port $$PORT --page-size ${PAGE:-64} --kv-cache-dtype fp8_e4m3
    environment:
      - PORT=30001
      - API_KEY
      - SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES=512
    ports:
      - target: 30001
        published: 31001
        host_ip: 127.0.0.1
  router:
    image: lmsysorg/sgl-model-gateway:v0.3.2
    command: ["sglang-router", "--pd-disaggregation", "--prefill", "http://prefill:30000", "8998", "--decode",
              "http://decode:30001", "--request-timeout-secs", "30"]
  prometheus:
    image: prom/prometheus
"""


def said(sheet: Sheet) -> dict[str, object]:
    """All but the image, which has a test of its own."""
    return {name: seen[0].value for name, seen in sheet.facts() if seen and name != facts.IMAGE.name}


def by_name(reading: Reading) -> dict[str, Sheet]:
    return {sheet.name: sheet for sheet in reading.sheets}


# ------------------------------------------------------------------------------------ compose


def test_a_compose_file_gives_a_node_for_each_service_that_starts_an_engine() -> None:
    reading = manifests.read("compose.yaml", COMPOSE)
    nodes = by_name(reading)
    assert list(nodes) == ["prefill", "decode"]
    assert said(nodes["prefill"]) == {
        "engine": "sglang", "version": "0.5.19", "model": "/models/base", "host": "0.0.0.0", "tp": 8, "page": 64, "context": 1_048_576,
        "role": "prefill", "batch_pages": 512, "deferred": True, "checksum": False, "reserve": 512, "truncates": False, "canary": "none", "pp": 1,
        "api_key": False, "admin_key": False, "remote_code": False, "metrics": False, "release_timeout": 30.0, "transport": "mooncake",
        "inner_host": "0.0.0.0",
    }  # fmt: skip
    assert nodes["prefill"].where(facts.CONTEXT) == "compose.yaml, line 12, service prefill, --context-length"
    assert nodes["prefill"].address == ("0.0.0.0", 31000)
    assert [(proxy.name, proxy.read_timeout) for proxy in reading.proxies] == [("router", 30.0)]


def test_what_the_shell_that_runs_compose_would_fill_in_is_no_fact() -> None:
    decode = by_name(manifests.read("compose.yaml", COMPOSE))["decode"]
    assert said(decode) == {
        "engine": "sglang", "version": "0.5.19", "model": "/models/base", "role": "decode", "kv_dtype": "fp8_e4m3", "batch_pages": 512,
        "deferred": False, "checksum": False, "reserve": 512, "truncates": False, "canary": "none", "pp": 1, "tp": 1, "api_key": False,
        "admin_key": False, "remote_code": False, "metrics": False, "release_timeout": 30.0, "transport": "mooncake", "host": "127.0.0.1",
        "restores": False,
    }  # fmt: skip
    assert decode.where(facts.DEFERRED) == "compose.yaml, line 21, service decode, default of 0.5.19"
    assert decode.address == ("127.0.0.1", 31001)


def test_dot_env_beside_the_file_fills_it_in(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("# sizes\nPAGE=128\n")
    file = tmp_path / "compose.yaml"
    file.write_text(COMPOSE)
    assert by_name(manifests.read(str(file), COMPOSE))["decode"][facts.PAGE] == 128


ENV_FILE = """\
services:
  vllm:
    image: vllm/vllm-openai:v0.32.0
    command: --model Qwen/Qwen3-8B --max-model-len 32768
    env_file: [node.env]
    network_mode: host
"""


def test_an_env_file_that_is_not_here_is_reported_and_no_default_taken_for_its_variables() -> None:
    reading = manifests.read("compose.yaml", ENV_FILE)
    (node,) = reading.sheets
    assert (node[facts.ENGINE], node[facts.CONTEXT], node[facts.ROLE]) == ("vllm", 32_768, "alone")
    assert facts.DEVELOPER not in node
    assert facts.API_KEY not in node
    assert [(unread.source, unread.why, unread.part) for unread in reading.unread] == [
        ("compose.yaml, line 3, service vllm", "env_file node.env is not read: it is not here", True)
    ]


def test_an_env_file_beside_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "node.env").write_text("VLLM_SERVER_DEV_MODE=1\nexport VLLM_API_KEY='k' \n#X=1\nnonsense\n")
    file = tmp_path / "compose.yaml"
    file.write_text(ENV_FILE)
    reading = manifests.read(str(file), ENV_FILE)
    assert reading.unread == []
    assert reading.sheets[0][facts.DEVELOPER] is True
    assert reading.sheets[0][facts.API_KEY] is True


def test_a_compose_file_as_json_is_the_same() -> None:
    document = {
        "services": {
            "a": {
                "image": "lmsysorg/sglang:v0.5.21",
                "command": ["sglang", "serve", "m", "--tp", "2"],
                "environment": {"X": None},
            }
        }
    }
    text = json.dumps(document, indent=1)
    assert manifests.looks_like("a", text)
    assert manifests.read("a", text).sheets[0][facts.TP] == 2


def test_yes_and_no_stay_what_was_written() -> None:
    """YAML 1.1 reads them as booleans; the engine gets the letters."""
    text = COMPOSE.replace('"1"', "no")
    assert by_name(manifests.read("c", text))["prefill"][facts.DEFERRED] is False


# ------------------------------------------------------------------------------------ Kubernetes

KUBERNETES = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: sglang-env}
data:
  SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE: "true"
  page: "64"
---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: prefill
spec:
  replicas: 2
  template:
    spec:
      initContainers:
      - {name: wait, image: busybox, command: [sh, -c, "python -m sglang.launch_server --tp 9"]}
      containers:
      - name: exporter
        image: prom/node-exporter
      - name: sglang
        image: lmsysorg/sglang:v0.5.23
        command: [python3, -m, sglang.launch_server]
        args:
        - --model-path=$(MODEL)
        - --page-size
        - $(PAGE)
        - --host
        - $(POD_IP)
        - --api-key
        - $(KEY)
        - --served-model-name
        - $$(NOT)/$(NOBODY)
        - --disaggregation-mode=prefill
        envFrom:
        - configMapRef: {name: sglang-env}
        env:
        - {name: BASE, value: /models}
        - {name: MODEL, value: $(BASE)/deepseek}
        - name: PAGE
          valueFrom: {configMapKeyRef: {name: sglang-env, key: page}}
        - name: KEY
          valueFrom: {secretKeyRef: {name: keys, key: api}}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
---
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: decode}
spec:
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
        - name: engine
          image: lmsysorg/sglang:v0.5.23
          command: [bash, -c, 'sglang serve m --tp "$TP" --nnodes 2 --node-rank 0 --disaggregation-mode decode']
          env: [{name: TP, value: "16"}]
    workerTemplate:
      spec:
        containers:
        - name: engine
          image: lmsysorg/sglang:v0.5.23
          command: [sglang, serve, m, --host, 0.0.0.0, --port, "30000", --tp, "16", --nnodes, "2", --node-rank, "1", --disaggregation-mode, decode]
"""


def test_kubernetes_objects_give_a_node_for_each_container_that_starts_an_engine() -> None:
    reading = manifests.read("k8s.yaml", KUBERNETES)
    nodes = by_name(reading)
    assert list(nodes) == ["prefill", "decode"]  # the workers of the set only compute for its leader
    prefill = nodes["prefill"]
    assert prefill[facts.MODEL] == "/models/deepseek"
    assert prefill[facts.PAGE] == 64
    assert prefill[facts.DEFERRED] is True
    assert prefill[facts.SERVED] == "$(NOT)/$(NOBODY)"
    assert (
        prefill.where(facts.MODEL) == "k8s.yaml, line 21, Deployment/prefill, container sglang, --model-path"
    )
    assert nodes["decode"][facts.TP] == 16
    assert nodes["decode"][facts.DEFERRED] is True  # nothing is missing there: the default of its version


def test_the_template_of_workers_is_a_node_where_it_is_the_leaders_as_well() -> None:
    """leaderworkerset.x-k8s.io: without leaderTemplate the leader is made from workerTemplate."""
    text = (
        KUBERNETES[: KUBERNETES.index("    leaderTemplate:")]
        + KUBERNETES[KUBERNETES.index("    workerTemplate:") :]
    )
    nodes = by_name(
        manifests.read("k8s.yaml", text.replace('"--node-rank", "1", ', "").replace('--node-rank, "1", ', ""))
    )
    assert list(nodes) == ["prefill", "decode"]
    assert nodes["decode"][facts.HOST] == "0.0.0.0"


def test_of_a_secret_it_is_known_that_there_is_a_key_and_of_a_pod_s_address_that_it_is_one() -> None:
    reading = manifests.read("k8s.yaml", KUBERNETES)
    prefill = by_name(reading)["prefill"]
    assert prefill[facts.API_KEY] is True
    assert prefill[facts.HOST] == "status.podIP"  # not all interfaces, and not the pod alone
    assert prefill[facts.RELEASE_TIMEOUT] == 30.0  # a variable that is not there; the names of all are known
    assert facts.CHECKSUM in prefill  # an option that is not there has its default all the same
    assert [(unread.source, unread.why) for unread in reading.unread] == [
        (
            "k8s.yaml, line 21, Deployment/prefill, container sglang",
            "the variable KEY comes from secretKeyRef and is not read",
        ),
    ]


@pytest.mark.parametrize(
    ("field", "told"),
    [("status.podIP", ["status.podIP"]), ("status.hostIP", ["status.hostIP"]), ("spec.nodeName", [])],
)
def test_a_side_channel_at_the_pod_s_own_address_is_reached_by_others(field: str, told: list[str]) -> None:
    text = VLLM_POD.replace(
        "args: [m]",
        """args: [m, --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']""",
    )
    text += (
        f"    - name: VLLM_NIXL_SIDE_CHANNEL_HOST\n      valueFrom: {{fieldRef: {{fieldPath: {field}}}}}\n"
    )
    (sheet,) = manifests.read("k8s.yaml", text).sheets
    assert sheet.values(facts.INNER_HOST) == told


def test_a_config_map_that_is_not_in_the_file_is_reported() -> None:
    reading = manifests.read("k8s.yaml", KUBERNETES.partition("---\n")[2])
    assert "envFrom the ConfigMap sglang-env is not read: it is not in this file" in [
        one.why for one in reading.unread
    ]
    prefill = by_name(reading)["prefill"]
    assert facts.DEFERRED not in prefill
    assert facts.RELEASE_TIMEOUT not in prefill  # it may be one of those that are not read


VLLM_POD = """\
apiVersion: v1
kind: Pod
metadata: {name: v}
spec:
  containers:
  - name: v
    image: vllm/vllm-openai:v0.32.0
    args: [m]
    env:
    - name: VLLM_API_KEY
      valueFrom: {secretKeyRef: {name: keys, key: api}}
"""


@pytest.mark.parametrize(
    ("reference", "key"),
    [
        ("secretKeyRef: {name: keys, key: api}", [True]),
        ("secretKeyRef: {name: keys, key: api, optional: true}", []),
        ("configMapKeyRef: {name: keys, key: api}", []),
        ("fieldRef: {fieldPath: metadata.name}", []),
    ],
)
def test_a_key_from_a_secret_is_a_key_whatever_its_value(reference: str, key: list[bool]) -> None:
    text = VLLM_POD.replace("secretKeyRef: {name: keys, key: api}", reference)
    (sheet,) = manifests.read("k8s.yaml", text).sheets
    assert sheet.values(facts.API_KEY) == key
    assert sheet[facts.DEVELOPER] is False  # the other variables are known not to be set


def test_a_secret_in_a_shell_is_a_key_as_well() -> None:
    text = VLLM_POD.replace("args: [m]", "command: [bash, -c, 'vllm serve m --api-key \"$VLLM_API_KEY\"']")
    (sheet,) = manifests.read("k8s.yaml", text).sheets
    assert sheet[facts.API_KEY] is True


@pytest.mark.parametrize(
    "path",
    [
        ("spec",), ("spec", "template", "spec"), ("spec", "jobTemplate", "spec", "template", "spec"),
        ("spec", "predictor"), ("spec", "workerGroupSpecs", "template", "spec"),
    ],
)  # fmt: skip
def test_a_pod_is_found_wherever_a_kind_puts_it(path: tuple[str, ...]) -> None:
    inner: object = {
        "containers": [{"name": "c", "image": "x", "command": ["vllm", "serve", "m", "-tp", "2"]}]
    }
    for step in reversed(path):
        inner = {step: inner}
    document = {"apiVersion": "x/v1", "kind": "Thing", "metadata": {"name": "n"}, **inner}  # type: ignore[dict-item]
    reading = manifests.read("a", yaml.safe_dump_all([document]))
    assert [(sheet.name, sheet[facts.TP]) for sheet in reading.sheets] == [("n", 2)]


def test_a_list_of_objects_is_read() -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": {"containers": [{"image": "x", "command": ["vllm", "serve", "m"]}]},
    }
    text = json.dumps(
        {"apiVersion": "v1", "kind": "List", "items": [pod, {**pod, "metadata": {"name": "q"}}]}
    )
    assert list(by_name(manifests.read("a", text))) == ["p", "q"]


INGRESS = """\
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  name: llm
  annotations:
    nginx.ingress.kubernetes.io/proxy-read-timeout: "120"
    nginx.ingress.kubernetes.io/proxy-next-upstream: "error timeout http_502 non_idempotent"
    nginx.ingress.kubernetes.io/configuration-snippet: |
      proxy_ignore_client_abort on;
spec:
  ingressClassName: nginx
  rules:
  - host: llm.example.org
    http:
      paths:
      - {path: /v1, pathType: Prefix, backend: {service: {name: gateway, port: {number: 8000}}}}
"""


def test_an_ingress_is_a_proxy_by_its_annotations() -> None:
    (proxy,) = manifests.read("ingress.yaml", INGRESS).proxies
    assert (proxy.kind, proxy.read_timeout, proxy.retries_post, proxy.closes_upstream) == (
        "nginx",
        120.0,
        True,
        False,
    )
    assert (proxy.where, proxy.routes) == (
        "ingress.yaml, line 1, Ingress/llm",
        "llm.example.org/v1 -> gateway",
    )


def test_what_the_controllers_own_configuration_decides_is_not_known() -> None:
    lines = INGRESS.splitlines()
    bare = "\n".join(lines[:4] + lines[9:])
    (proxy,) = manifests.read("ingress.yaml", bare).proxies
    assert (proxy.read_timeout, proxy.retries_post, proxy.closes_upstream) == (None, None, None)
    (off,) = manifests.read("i", INGRESS.replace("error timeout http_502 non_idempotent", "off")).proxies
    assert off.retries_post is False
    (plain,) = manifests.read("i", INGRESS.replace(" non_idempotent", "")).proxies
    assert (plain.retries_post, plain.copies) == (None, None)


@pytest.mark.parametrize(
    "note",
    ['nginx.ingress.kubernetes.io/mirror-target: "https://me:secret@shadow/?key=secret"', "nginx.ingress.kubernetes.io/server-snippet: mirror https://shadow/;"],
)  # fmt: skip
def test_an_ingress_that_copies_requests_says_where_to(note: str) -> None:
    (proxy,) = manifests.read("i", INGRESS.replace("  annotations:", f"  annotations:\n    {note}")).proxies
    assert proxy.copies == "https://shadow/"
    whole = 'nginx.ingress.kubernetes.io/mirror-request-body: "off"'
    off = INGRESS.replace("  annotations:", f"  annotations:\n    {note}\n    {whole}")
    assert manifests.read("i", off).proxies[0].copies == ""


def test_an_ingress_of_another_controller_is_left_alone() -> None:
    lines = INGRESS.replace("ingressClassName: nginx", "ingressClassName: traefik").splitlines()
    assert manifests.read("i", "\n".join(lines[:4] + lines[9:])).proxies == []


# ------------------------------------------------------------------------------------ YAML that is none, or too much


def test_a_template_is_told_to_be_rendered_first() -> None:
    text = KUBERNETES.replace("replicas: 2", "{{- if .Values.x }}\n  replicas: {{ .Values.n }}")
    reading = manifests.read("k8s.yaml", text)
    assert reading.sheets == []
    assert [one.why for one in reading.unread] == [
        "is a template of a chart; render it first: helm template NAME CHART > rendered.yaml"
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{{- if .Values.on }}\napiVersion: v1\nkind: Pod\nmetadata: {name: "{{ .Release.Name }}"}\n{{- end }}\n',
        'apiVersion: v1\nkind: Pod\nmetadata: {name: "{{ include `chart.name` . }}"}\nspec: {containers: [{image: "vllm/vllm-openai:v0.32.0"}]}\n',
        '{{/* names */}}\n{{- define "chart.name" -}}\nserver\n{{- end }}\n',
    ],
)
def test_a_template_is_known_also_where_it_is_yaml_or_begins_with_a_condition(text: str) -> None:
    assert manifests.looks_like("pod.yaml", text)
    reading = manifests.read("pod.yaml", text)
    assert reading.sheets == []
    assert len(reading.unread) == 1
    assert "render it first: helm template" in reading.unread[0].why


@pytest.mark.parametrize(
    "inside",
    ["{{ $labels.instance }} is down", "{{ bos_token }}{% if tools %}", "{{inputs.parameters.model}}"],
)
def test_what_a_rendered_manifest_quotes_is_no_template(inside: str) -> None:
    text = VLLM_POD.replace("args: [m]", f"args: [m, --chat-template, '{inside}']")
    (sheet,) = manifests.read("k8s.yaml", text).sheets
    assert sheet[facts.MODEL] == "m"


def test_aliases_that_grow_without_bound_are_refused() -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(yaml_text.NotYaml, match="stands for so many by its aliases"):
        yaml_text.documents("\n".join(lines))
    merges = ["a0: &a0 {x: 1}"] + [
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], k{n}: 1}}" for n in range(1, 12)
    ]
    with pytest.raises(yaml_text.NotYaml, match="stands for so many by its aliases"):
        yaml_text.documents("\n".join(merges))


def test_an_alias_of_what_holds_it_is_refused() -> None:
    for text in ("a: &a [1, *a]", "a: &a 1\nb: &a [*a]"):
        with pytest.raises(yaml_text.NotYaml, match="of what holds it"):
            yaml_text.documents(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "- " * 5_000 + "x",
        '{"a":' * 900 + "1" + "}" * 900,
        "[" * 65 + "]" * 65,
        "a: " + "[" * 64 + "]" * 64,
    ],
    ids=["flow", "block", "json", "one too many", "one too many in YAML"],
)
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(yaml_text.NotYaml, match="nest"):
        yaml_text.documents(text)


def test_nesting_up_to_the_bound_is_read() -> None:
    assert yaml_text.documents("[" * 64 + "]" * 64)
    assert yaml_text.documents("a: " + "[" * 63 + "]" * 63)


def test_tags_build_nothing() -> None:
    assert yaml_text.documents("a: !!python/object/apply:os.system [echo]") == [{"a": ["echo"]}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: yes", {"a": "yes"}), ("a: 1:30", {"a": "1:30"}), ("a: 0x1F", {"a": "0x1F"}), ("a:", {"a": None}), ("a: null", {"a": None}),
        ("a: 'null'", {"a": "null"}), ("a: &x 1\nb: *x", {"a": "1", "b": "1"}), ("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}", {"x": {"a": "1", "b": "2"}, "y": {"a": "1", "b": "3"}}),
        ('{"a": [1, 2.5, true, null]}', {"a": ["1", "2.5", "true", None]}), ("y: {'<<': z}", {"y": {"<<": "z"}}),
    ],
)  # fmt: skip
def test_scalars_stay_what_was_written(text: str, value: object) -> None:
    assert yaml_text.documents(text) == [value]


# ------------------------------------------------------------------------------------ systemd

UNIT = """\
[Unit]
Description=SGLang decode
After=network-online.target

[Service]
User=serve
Environment=SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=true "NAME=a b"
Environment=PAGE=64 'OPTS=--tp 8 --pp 2'
ExecStart=/usr/bin/numactl --interleave=all \\
    /opt/venv/bin/python -m sglang.launch_server --model-path /models/%i \\
    # a comment in between
    --page-size ${PAGE} $OPTS --served-model-name "${NAME}" --host %H --port 3000%i --revision $$x --disaggregation-mode decode
Restart=always

[Install]
WantedBy=multi-user.target
"""


def test_a_unit_is_read_as_systemd_reads_it() -> None:
    reading = systemd.read("/etc/systemd/system/sglang@1.service", UNIT)
    (node,) = reading.sheets
    assert said(node) == {
        "engine": "sglang", "model": "/models/1", "page": 64, "tp": 8, "pp": 2, "served": "a b", "revision": "$x", "role": "decode",
        "deferred": True,
    }  # fmt: skip
    assert node.name == "sglang@1"
    assert node.address is None  # %H is the machine's
    assert reading.unread == []


def test_a_setting_without_a_value_takes_back_what_stood_before() -> None:
    cat = (
        "# /etc/systemd/system/llm.service\n" + UNIT + "\n# /etc/systemd/system/llm.service.d/override.conf\n"
        "[Service]\nEnvironment=\nEnvironment=PAGE=16\nExecStart=\nExecStart=sglang serve m --page-size ${PAGE}\n"
    )
    (node,) = systemd.read("standard input", cat).sheets
    assert said(node) == {"engine": "sglang", "model": "m", "page": 16}
    assert node.name == "llm"


def test_an_environment_file_is_read_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "llm.env").write_text('# secrets\nVLLM_API_KEY="abc"\nVLLM_SERVER_DEV_MODE=0\n')
    unit = tmp_path / "llm.service"
    unit.write_text(
        "[Service]\nEnvironment=VLLM_SERVER_DEV_MODE=1\nEnvironmentFile=-/opt/llm/llm.env\nExecStart=vllm serve m\n"
    )
    reading = systemd.read(str(unit), unit.read_text())
    assert said(reading.sheets[0]) == {"engine": "vllm", "model": "m", "api_key": True, "developer": False}
    missing = systemd.read("llm.service", unit.read_text())
    assert said(missing.sheets[0]) == {"engine": "vllm", "model": "m", "developer": True}
    assert [unread.why for unread in missing.unread] == [
        "EnvironmentFile /opt/llm/llm.env is not read: it is not here"
    ]


def test_a_drop_in_alone_says_what_its_variables_say() -> None:
    text = "[Service]\nEnvironment=SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0\n"
    (node,) = systemd.read("/etc/systemd/system/sglang-decode.service.d/release.conf", text).sheets
    assert (node.name, said(node)) == ("sglang-decode", {"engine": "sglang", "deferred": False})


def test_a_unit_of_something_else_is_said_to_be_one() -> None:
    reading = systemd.read("nginx.service", "[Service]\nExecStart=/usr/sbin/nginx\n")
    assert [unread.why for unread in reading.unread] == ["starts no engine or router that is known here"]


# ------------------------------------------------------------------------------------ files that are named


def test_a_path_of_another_machine_is_not_looked_up_here(tmp_path: Path) -> None:
    """Only beside the file that names it, or in the tree that both lie in."""
    here, there = tmp_path / "deploy", tmp_path / "etc"
    here.mkdir()
    there.mkdir()
    (there / "llm.env").write_text("A=1")
    unit = here / "llm.service"
    unit.write_text("")
    find = beside.beside(str(unit))
    assert find(str(there / "llm.env")) == "A=1"  # one tree: both are below the same first folder
    assert find("/proc/version") is None
    assert find("../etc/llm.env") == "A=1"
    assert find("nothing.env") is None
    assert find("") is None
    assert find("a\0b") is None
    assert beside.beside("standard input")("llm.env") is None


def test_a_named_file_of_any_size_does_not_fill_the_memory(tmp_path: Path) -> None:
    unit = tmp_path / "llm.service"
    unit.write_text("")
    (tmp_path / "big.env").write_bytes(b"A" * (beside.MOST + 1))
    assert beside.beside(str(unit))("big.env") is None


# ------------------------------------------------------------------------------------ which is which

NGINX = "server {\n  listen 80;\n  location / { proxy_pass http://llm; }\n}\n"
KINDS = {"manifests": manifests, "systemd": systemd, "flags": flags, "proxies": proxies}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("manifests", COMPOSE), ("manifests", ENV_FILE), ("manifests", KUBERNETES), ("manifests", INGRESS), ("systemd", UNIT),
        ("systemd", "[Service]\nEnvironment=A=1\n"), ("proxies", NGINX), ("flags", "vllm serve m --port 8000\n"),
    ],
)  # fmt: skip
def test_each_kind_is_taken_for_itself_alone(kind: str, text: str) -> None:
    assert [name for name, reader in KINDS.items() if reader.looks_like("file", text)] == [kind]


NO_CONFIGURATION = [
    "[2026-11-30 10:00:00] server_args=ServerArgs(model_path='m')\napiVersion: v1\nkind: Pod\n",
    "INFO 11-30 10:00:00 services:\n  image: x\n",
    "<!DOCTYPE html><html><body>apiVersion: v1</body></html>",
    '{"version": "0.5.23", "max_total_num_tokens": 2048}',
    "# HELP sglang:x x\n# TYPE sglang:x gauge\nsglang:x 1\n",
    'time=10 level=info msg="server { listen 80; }"\n',
    "",
    "\0\0\0",
]


@pytest.mark.parametrize("text", NO_CONFIGURATION)
def test_a_log_or_an_answer_is_taken_for_none(text: str) -> None:
    assert not any(reader.looks_like("file", text) for reader in KINDS.values())


@pytest.mark.parametrize(
    "file", sorted(str(path.relative_to(CAPTURES)) for path in CAPTURES.rglob("*") if path.is_file())
)
def test_no_capture_of_an_engine_is_taken_for_a_configuration(file: str) -> None:
    text = (CAPTURES / file).read_text("utf-8", "replace")
    assert not any(reader.looks_like(file, text) for reader in KINDS.values())


def test_variables_that_double_from_line_to_line_end_as_unknown() -> None:
    steps = "".join(f"export V{n}=$V{n - 1}$V{n - 1}\n" for n in range(1, 60))
    reading = flags.read("s", f"V0=xx\n{steps}sglang serve m --tp 2 --revision $V59")
    assert said(reading.sheets[0]) == {"engine": "sglang", "model": "m", "tp": 2}
    lists = "".join(f'A{n}=("${{A{n - 1}[@]}}" "${{A{n - 1}[@]}}")\n' for n in range(1, 60))
    reading = flags.read("s", f'A0=(x)\n{lists}sglang serve m --tp 2 "${{A59[@]}}"')
    assert reading.sheets[0][facts.TP] == 2
    container = {
        "name": "c",
        "image": "x",
        "command": ["vllm", "serve", "m", "-tp", "2", "--revision", "$(V59)"],
        "env": [{"name": "V0", "value": "xx"}]
        + [{"name": f"V{n}", "value": f"$(V{n - 1})$(V{n - 1})"} for n in range(1, 60)],
    }
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}}
    assert said(manifests.read("a", json.dumps(pod)).sheets[0]) == {"engine": "vllm", "model": "m", "tp": 2}


def test_shells_that_start_shells_without_end_are_left() -> None:
    inner = "; ".join(['bash -c "$X"'] * 200)
    reading = flags.read("s", f"export X='{inner}'\n{inner}\nsglang serve m --tp 2", {})
    assert reading.sheets[0][facts.TP] == 2


# ------------------------------------------------------------------------------------ properties


@given(st.data(), st.sampled_from([COMPOSE, ENV_FILE, KUBERNETES, INGRESS, UNIT]))
@settings(deadline=None)
def test_no_damaged_file_ends_a_reader(data: st.DataObject, text: str) -> None:
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, len(text)))
    junk = data.draw(st.text(st.sampled_from("'\"\\$`(){}[]<>|&*!%#:;=- \n\t\0\r\ud800a1"), max_size=12))
    damaged = data.draw(st.sampled_from([text[:at], text[:at] + junk + text[end:], text[at:end] + junk]))
    for reader in (manifests, systemd):
        reader.looks_like("file", damaged)
        for sheet in reader.read("file", damaged).sheets:
            for name, seen in sheet.facts():
                assert name in facts.FACTS
                assert all("\0" not in str(one.value) for one in seen), name


def test_a_log_with_many_empty_lines_is_looked_at_in_one_pass() -> None:
    """Its first line looks like YAML, and each of the others began a search through all that follow: 1 MB took a week."""
    assert not manifests.looks_like("log", "INFO: started\n" + "\n" * 1_000_000)
