"""Whole deployments that once were told to be clean, and what somebody can put into a source to make them look so."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from hermetic.check import check
from hermetic.check.check import CheckOptions
from hermetic.check.command import code
from hermetic.check.deployment import Deployment
from hermetic.check.readers import flags, proxies
from hermetic.check.result import Report
from hermetic.check.rules import RULES, judge

CAPTURES = Path(__file__).parent / "captures"


def checked(*sources: Path | str, select: tuple[str, ...] = ()) -> Report:
    return check.run(CheckOptions(tuple(map(str, sources)), select=select))


def states(report: Report) -> dict[str, str]:
    return {f"{verdict.code} {verdict.subject}": verdict.state for verdict in report.verdicts}


def test_of_two_machines_that_listen_everywhere_each_has_its_own_pool(tmp_path: Path) -> None:
    """Their logs were taken for one node's, whose pool was then not known."""
    log = (CAPTURES / "sglang-0.5.23-pd/prefill.log").read_text().replace("127.0.0.1", "0.0.0.0")
    for number, pool in enumerate((9_000, 2_048)):
        (tmp_path / f"prefill-{number}.log").write_text(
            log.replace("max_total_num_tokens=2048", f"max_total_num_tokens={pool}")
        )
    report = checked(tmp_path, select=("CAP001", "SRC001"))
    assert states(report) == {
        "CAP001 prefill 0.0.0.0:31100": "passed", "CAP001 prefill 0.0.0.0:31100 (2)": "finding",
        "SRC001 prefill 0.0.0.0:31100": "passed", "SRC001 prefill 0.0.0.0:31100 (2)": "passed",
    }  # fmt: skip
    assert "prefill-0.log, prefill-1.log" in report.notes[0]
    assert "a=prefill-0.log for this file" in report.notes[0]


# ------------------------------------------------------------------------------------ what changes a manifest from outside

OFF = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
COMMAND = (
    "python -m sglang.launch_server --model-path m --disaggregation-mode decode --host 10.0.0.8 --port 30001"
)
UNIT = f"[Service]\nExecStart=/usr/bin/docker run --rm lmsysorg/sglang:v0.5.23 {COMMAND}\n"


def written(folder: Path, **files: str) -> Path:
    """Files by name, with `__` for a slash and `_` for a dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_a_unit_is_read_with_the_drop_ins_beside_it(tmp_path: Path) -> None:
    """The unit alone waits for transfers, by its version's default; what runs is told not to."""
    start = f"ExecStart=/usr/bin/docker run -e {OFF}=0 --rm lmsysorg/sglang:v0.5.23 {COMMAND}"
    on = start.replace("=0", "=1", 1)
    folder = written(
        tmp_path, x_service=UNIT, x_service_d__20_conf=f"[Service]\nExecStart=\n{start}\n", x_service_d__10_conf=f"[Service]\nExecStart=\n{on}\n"
    )  # fmt: skip
    for source in (folder, folder / "x.service"):
        assert states(checked(source, select=("REL001", "SRC001"))) == {
            "REL001 decode x": "finding",
            "SRC001 decode x": "passed",
        }


def test_of_a_template_of_units_the_drop_ins_hold_for_each_instance(tmp_path: Path) -> None:
    direct = f"[Service]\nExecStart={COMMAND}\n"
    variables = f"[Service]\nEnvironment={OFF}=0\n"
    folder = written(tmp_path, **{"x@1_service": direct, "x@_service_d__a_conf": variables})
    for source in (folder, folder / "x@1.service"):
        assert states(checked(source, select=("REL001",))) == {"REL001 decode x@1": "finding"}


def test_a_drop_in_that_cannot_be_read_leaves_open_what_runs(tmp_path: Path) -> None:
    folder = written(tmp_path, x_service=UNIT, x_service_d__a_conf="")
    (folder / "x.service.d/a.conf").unlink()
    (folder / "x.service.d/a.conf").symlink_to("nowhere")
    report = checked(folder / "x.service")
    assert code(report) == 2
    assert "its drop-in" in report.unread[0].why


def test_a_drop_in_by_itself_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path, x_service_d__a_conf=f"[Service]\nEnvironment={OFF}=0\n")
    assert states(checked(folder, select=("VER007",))) == {"VER007 x": "unknown"}


COMPOSE = f"services:\n  decode:\n    image: lmsysorg/sglang:v0.5.23\n    command: {COMMAND}\n  other:\n    image: redis\n"


@pytest.mark.parametrize("other", ["docker-compose_override_yml", "compose_override_yaml"])
def test_a_service_that_an_override_changes_is_not_read_as_if_it_did_not(tmp_path: Path, other: str) -> None:
    change = f'services:\n  decode:\n    environment:\n      {OFF}: "0"\n'
    folder = written(tmp_path, **{"docker-compose_yml": COMPOSE, other: change})
    for source in (folder, folder / "docker-compose.yml"):
        report = checked(source)
        assert code(report) == 2
        (why,) = [one.why for one in report.unread if one.source.endswith("yml, line 3, service decode")]
        assert why.startswith("is changed by")
        assert "`docker compose config`" in why


@pytest.mark.parametrize(
    "override", ["services: {other: {image: redis}}\n", "services: {third: {command: x}}\n", "x: 1\n"]
)
def test_an_override_of_something_else_changes_nothing(tmp_path: Path, override: str) -> None:
    folder = written(tmp_path, compose_yaml=COMPOSE, compose_override_yml=override)
    report = checked(folder / "compose.yaml", select=("REL001",))
    assert (code(report), states(report)) == (0, {"REL001 decode": "passed"})


def test_a_compose_file_of_another_name_has_no_override(tmp_path: Path) -> None:
    folder = written(tmp_path, prod_yaml=COMPOSE, compose_override_yml="services: {decode: {image: redis}}\n")
    assert code(checked(folder / "prod.yaml", select=("REL001",))) == 0


def test_an_override_that_is_damaged_leaves_open_what_runs(tmp_path: Path) -> None:
    folder = written(tmp_path, compose_yaml=COMPOSE, compose_override_yml="a: [\n")
    report = checked(folder / "compose.yaml")
    assert code(report) == 2
    assert report.unread[0].why.startswith("is changed by compose.override.yml, which is no YAML")


DEPLOYMENT = (
    "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: decode}\nspec: {template: {spec: {containers: [{name: d, image: 'lmsysorg/sglang:v0.5.23', "
    f"command: {COMMAND.split()}}}]}}}}}}\n"
)


@pytest.mark.parametrize(
    ("kustomization", "expected"),
    [
        ("resources: [deploy.yaml]\npatches: [{path: patch.yaml}]\n", 2),
        ("resources: [deploy.yaml]\nimages: [{name: lmsysorg/sglang, newTag: v0.5.19}]\n", 2),
        ("resources: [deploy.yaml]\nnamespace: llm\nlabels: []\n", 0),
    ],
)
def test_manifests_that_kustomize_changes_are_not_what_will_run(tmp_path: Path, kustomization: str, expected: int) -> None:  # fmt: skip
    folder = written(tmp_path, deploy_yaml=DEPLOYMENT, kustomization_yaml=kustomization)
    report = checked(folder, select=("VER001",))
    assert states(report) == {"VER001 decode": "passed"}
    assert code(report) == expected
    assert any("kubectl kustomize" in one.why for one in report.unread) == (expected == 2)


# ------------------------------------------------------------------------------------ proxies

NAMED = "events {{}}\nhttp {{ server {{ {outer} location / {{ proxy_pass http://a; {inner} }} location @b {{ {there} }} }} }}\n"


@pytest.mark.parametrize(
    ("outer", "inner", "there", "again"),
    [
        ("", "error_page 502 504 = @b;", "proxy_pass http://b;", True), ("error_page 504 @b;", "", "proxy_pass http://b;", True),
        ("", "error_page 404 = @b;", "proxy_pass http://b;", False), ("", "error_page 502 = @b;", "return 503;", False),
        ("error_page 504 @b;", "error_page 404 /x;", "proxy_pass http://b;", False), ("", "error_page 502 /b;", "proxy_pass http://b;", False),
        ("", "error_page 502 @c;", "proxy_pass http://b;", False),
    ],
)  # fmt: skip
def test_a_named_location_for_failures_gets_the_post_once_more(outer: str, inner: str, there: str, again: bool) -> None:  # fmt: skip
    """nginx hands the request on as it is, with its method and body (ngx_http_core_module, error_page)."""
    found = proxies.read("nginx.conf", NAMED.format(outer=outer, inner=inner, there=there)).proxies
    assert [proxy.retries_post for proxy in found] == ([again, False] if "proxy_pass" in there else [again])


def test_an_include_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """It may say how long the proxy waits, and that it sends POST again."""
    folder = written(tmp_path, nginx_conf="events {}\nhttp { include conf.d/*.conf; server { location / { proxy_pass http://a; } } }\n")  # fmt: skip
    (folder / "conf.d").mkdir()
    (folder / "conf.d/a.conf").write_text("client_max_body_size 1m;\n")
    (folder / "conf.d/b.conf").symlink_to("nowhere")
    reading = proxies.read(str(folder / "nginx.conf"), (folder / "nginx.conf").read_text())
    assert [proxy.retries_post for proxy in reading.proxies] == [None]
    assert "b.conf is not read" in reading.unread[0].why


ENVOY = """\
static_resources:
  listeners:
  - filterChains:
    - filters:
      - typedConfig:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          streamIdleTimeout: 7s
          routeConfig:
            virtualHosts:
            - routes:
              - match: {prefix: /}
                route: {cluster: c, timeout: 0s, retryPolicy: {retryOn: 5xx}}
"""


def test_envoys_other_spelling_is_read_as_well() -> None:
    """Protobuf's JSON takes both, one beside the other."""
    (proxy,) = proxies.read("envoy.yaml", ENVOY).proxies
    assert (proxy.retries_post, proxy.read_timeout) == (True, 7.0)
    (mixed,) = proxies.read("envoy.yaml", ENVOY.replace("routeConfig", "route_config")).proxies
    assert mixed.retries_post


# ------------------------------------------------------------------------------------ memory

LAUNCH = "python -m sglang.launch_server --tp 2 --model-path"
LONG, OFTEN = "a" * 60_000, 4_000  # 240 MB, if each name became what it stands for


def many(tmp_path: Path, kind: str) -> Path:
    """A file with a short name for a long text, which is used very often."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [
        {"name": "c", "image": "lmsysorg/sglang:v0.5.23", "env": [{"name": "x", "value": LONG}], "command": [*LAUNCH.split(), *["$(x)"] * OFTEN]}]}}  # fmt: skip
    again = "services:\n  a:\n    image: lmsysorg/sglang:v0.5.23\n    x: &a '$$" + LONG + "'\n    command: [" + ", ".join(LAUNCH.split()) + ", *a" * OFTEN + "]\n"  # fmt: skip
    (tmp_path / ".env").write_text(f"x={LONG}\n")
    text = {
        "one word.sh": f"x={LONG}\n{LAUNCH} {'$x' * OFTEN}\n", "many words.sh": f"x={LONG}\n{LAUNCH} {'$x ' * OFTEN}\n",
        "commands.sh": f"x={LONG}\n" + f"{LAUNCH} {'$x' * 80}\n" * (OFTEN // 80), "array.sh": f"x=({LONG} {LONG})\n{LAUNCH} " + '"${x[@]}" ' * OFTEN + "\n",
        "value.sh": f"x={LONG}\ny={'$x' * OFTEN}\n{LAUNCH} $y\n", "unit.service": f"[Service]\nEnvironment=x={LONG}\nExecStart={LAUNCH} {'${x}' * OFTEN}\n",
        "words.service": f"[Service]\nEnvironment=x={LONG}\nExecStart={LAUNCH} {'$x ' * OFTEN}\n", "pod.yaml": json.dumps(pod),
        "compose.yaml": f"services:\n  a:\n    image: lmsysorg/sglang:v0.5.23\n    command: {LAUNCH} {'${x}' * OFTEN}\n", "alias.yaml": again,
    }[kind]  # fmt: skip
    (tmp_path / kind).write_text(text)
    return tmp_path / kind


@pytest.mark.parametrize(
    "kind",
    ["one word.sh", "many words.sh", "commands.sh", "array.sh", "value.sh", "unit.service", "words.service", "pod.yaml", "compose.yaml", "alias.yaml"],
)  # fmt: skip
def test_a_short_name_of_a_long_text_takes_no_memory_however_often_it_stands_there(tmp_path: Path, kind: str) -> None:  # fmt: skip
    path = many(tmp_path, kind)
    tracemalloc.start()
    try:
        report = checked(path, select=("CAP",))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [node.facts["tp"][0]["value"] for node in report.nodes][:1] == [2]
    assert most < 100_000_000


def test_a_node_is_judged_without_looking_at_all_others() -> None:
    """Each of 3,000 nodes was asked by each rule what it had said of any other: a script with so many commands took an hour."""
    lines = [f"python -m sglang.launch_server --model-path m --host 10.0.{n // 250}.{n % 250} --port 30000" for n in range(3_000)]  # fmt: skip
    deployment = Deployment([flags.read(f"s{n}", line).sheets[0] for n, line in enumerate(lines)])
    for number, node in enumerate(deployment.nodes):
        node.name = f"n{number}"
    assert len(judge(deployment, [rule for rule in RULES.values() if rule.per == "node"])) > 3_000


def test_a_standard_input_that_is_closed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    report = checked("-")
    assert (code(report), report.unread[0].why) == (2, "is closed")
