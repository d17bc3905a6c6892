"""nginx, Envoy and HAProxy, as operators write them; the expected values are by their documentation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.check.deployment import Proxy
from hermetic.check.readers import proxies


def facts_of(proxy: Proxy) -> tuple[float | None, bool | None, bool | None]:
    return proxy.read_timeout, proxy.retries_post, proxy.closes_upstream


def all_of(text: str, source: str = "proxy.conf") -> list[Proxy]:
    reading = proxies.read(source, text)
    assert reading.unread == []
    return reading.proxies


# ------------------------------------------------------------------------------------ nginx

NGINX = """\
worker_processes auto;
events { worker_connections 4096; }

http {
    log_format main '$remote_addr "$request" { $status };';
    proxy_read_timeout 5m 30s;
    map $http_upgrade $connection { default upgrade; '' close; }
    upstream llm { server 10.0.0.1:8000; server 10.0.0.2:8000; }

    server {
        listen 443 ssl;
        location /v1/ {
            proxy_pass http://llm;           # the API
            proxy_next_upstream error timeout http_502 non_idempotent;
            proxy_ignore_client_abort on;
        }
        location ~ ^/(health|metrics)$ {
            proxy_read_timeout 5s;
            proxy_pass http://llm;
        }
        location /static/ { root /srv; }
        location /nested/ {
            proxy_next_upstream off;
            location /nested/a { if ($request_method = POST) { proxy_pass http://llm; } }
        }
        access_by_lua_block {
            if ngx.var.uri == "}" then ngx.exit(403) end -- }
        }
    }
    server {
        proxy_read_timeout 30;
        location / { proxy_pass http://${backend}:8000; }
    }
}
stream {
    server { listen 8998; proxy_pass 10.0.0.1:8998; }
}
"""


def test_nginx_settings_hold_for_the_blocks_inside() -> None:
    found = {(proxy.name, proxy.where): facts_of(proxy) for proxy in all_of(NGINX, "nginx.conf")}
    assert found == {
        ("nginx location /v1/", "nginx.conf, line 13"): (330.0, True, False),
        ("nginx location ~ ^/(health|metrics)$", "nginx.conf, line 19"): (5.0, False, True),
        ("nginx location /nested/", "nginx.conf, line 24"): (330.0, False, True),
        ("nginx location /", "nginx.conf, line 32"): (30.0, False, True),
        ("nginx server", "nginx.conf, line 36"): (600.0, False, None),
    }


def test_nginx_by_default_waits_a_minute_asks_once_and_closes_upstream() -> None:
    (proxy,) = all_of(
        "events {}\nhttp {\nserver {\n  location / {\n    proxy_pass http://10.0.0.1:8000;\n  }\n}\n}\n",
        "nginx.conf",
    )
    assert facts_of(proxy) == (60.0, False, True)
    assert (proxy.kind, proxy.where, proxy.routes) == (
        "nginx",
        "nginx.conf, line 5",
        "location / -> http://10.0.0.1:8000",
    )


def test_what_a_file_of_conf_d_does_not_say_its_main_file_may_say() -> None:
    text = "server {\n  listen 80;\n  location / { proxy_pass http://a; }\n  location /b { proxy_pass http://b; proxy_read_timeout 5s; }\n}\n"
    assert [facts_of(proxy) for proxy in all_of(text)] == [(None, None, None), (5.0, None, None)]


def test_one_try_is_no_retry() -> None:
    text = NGINX.replace("proxy_ignore_client_abort on;", "proxy_next_upstream_tries 1;")
    assert facts_of(all_of(text)[0]) == (330.0, False, True)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 60), ("60s", 60), ("5m", 300), ("1h 30m", 5400), ("1h30m", 5400), ("500ms", 0.5), ("1d", 86_400), ("soon", None), ("", None), ("5 x", None), ("-1", None)],
)  # fmt: skip
def test_nginx_times(text: str, seconds: float | None) -> None:
    assert proxies.seconds_of_nginx(text) == seconds


def test_a_time_that_is_none_is_reported_and_not_replaced_by_the_default() -> None:
    reading = proxies.read("a.conf", NGINX.replace("5m 30s", "$time"))
    assert reading.proxies[0].read_timeout is None
    assert "proxy_read_timeout is '$time', which is no time" in [one.why for one in reading.unread]


def test_an_include_that_is_not_there_is_reported_and_one_that_is_is_read(tmp_path: Path) -> None:
    text = "http {\n  include mime.types;\n  include proxy.inc;\n  include conf.d/*.conf;\n  server { listen 80; location / { proxy_pass http://a; } }\n}\n"
    main = tmp_path / "nginx.conf"
    main.write_text(text)
    (tmp_path / "proxy.inc").write_text("proxy_read_timeout 7s;\n")
    reading = proxies.read(str(main), text)
    assert reading.proxies[0].read_timeout == 7.0
    assert [one.why for one in reading.unread] == [
        "include conf.d/*.conf is not read: no such file is beside it"
    ]
    assert facts_of(reading.proxies[0]) == (7.0, None, None)  # the files that are not here may say more
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "b.conf").write_text("server { location / { proxy_pass http://b; } }\n")
    (tmp_path / "conf.d" / "a.conf").write_text("proxy_ignore_client_abort on;\n")
    both = proxies.read(str(main), text)
    assert both.unread == []
    assert [facts_of(proxy) for proxy in both.proxies] == [(7.0, False, False), (7.0, False, False)]
    alone = proxies.read("nginx.conf", text)
    assert [one.why for one in alone.unread] == [
        "include proxy.inc is not read: no such file is beside it",
        "include conf.d/*.conf is not read: no such file is beside it",
    ]


def test_a_file_that_includes_itself_ends(tmp_path: Path) -> None:
    text = "http {\n  server { listen 80; location / { proxy_pass http://a; } }\n  include nginx.conf;\n}\n"
    main = tmp_path / "nginx.conf"
    main.write_text(text)
    reading = proxies.read(str(main), text)
    assert reading.proxies
    assert any("or one by itself" in one.why for one in reading.unread)


def test_nginx_dash_t_holds_its_own_includes() -> None:
    dump = (
        "# configuration file /etc/nginx/nginx.conf:\nevents {}\nhttp {\n  proxy_read_timeout 9s;\n  include /etc/nginx/conf.d/*.conf;\n}\n\n"
        "# configuration file /etc/nginx/conf.d/llm.conf:\nserver {\n  listen 80;\n  location / {\n    proxy_pass http://a;\n  }\n}\n"
    )
    (proxy,) = all_of(dump, "dump.txt")
    assert (proxy.read_timeout, proxy.where) == (9.0, "/etc/nginx/conf.d/llm.conf, line 4")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "server { listen 80; location / { proxy_pass http://a; }",
            "it ends in the middle of a block or directive",
        ),
        (
            "server { listen 80; location / { proxy_pass http://a; } } }",
            "line 1: a closing brace that nothing opened",
        ),
        ("server { listen 80; location / { proxy_pass http://a; } ; { } }", "line 1: a brace without a name"),
    ],
)
def test_what_stands_before_a_fault_is_read(text: str, why: str) -> None:
    reading = proxies.read("a.conf", text)
    assert facts_of(reading.proxies[0]) == (None, None, None)
    assert [(one.why, one.part) for one in reading.unread] == [(f"cannot be read to its end: {why}", True)]


WORD = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=8)


@given(st.lists(st.lists(WORD, min_size=1, max_size=4), max_size=5))
@settings(deadline=None)
def test_quoted_words_of_nginx_are_read_back(directives: list[list[str]]) -> None:
    def quoted(word: str) -> str:
        return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'

    text = "http { " + " ".join(" ".join(map(quoted, words)) + ";" for words in directives) + " }"
    top, fault = proxies.nginx_directives(text)
    assert fault == ""
    assert [[one.name, *one.arguments] for one in top[0].block or []] == directives


# ------------------------------------------------------------------------------------ Envoy

ENVOY = """\
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}
static_resources:
  listeners:
  - name: api
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: api
          route_config:
            virtual_hosts:
            - name: llm
              domains: ["*"]
              routes:
              - match: {prefix: /v1/chat}
                route:
                  cluster: gateway
                  timeout: 600s
                  retry_policy: {retry_on: "5xx,reset", num_retries: 2}
              - match: {prefix: /v1/completions}
                route: {cluster: gateway, timeout: 0s, idle_timeout: 0s}
              - match: {prefix: /stream}
                route: {cluster: gateway, timeout: 0s}
              - match: {path: /models, headers: [{name: ":method", string_match: {exact: GET}}]}
                route: {cluster: gateway}
              - match: {prefix: /}
                route: {cluster: gateway}
              - match: {prefix: /old}
                redirect: {path_redirect: /}
  - name: bootstrap
    filter_chains:
    - filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          cluster: prefill
  clusters: [{name: gateway}]
"""


def test_envoy_waits_as_long_as_the_shortest_of_its_time_outs() -> None:
    found = {proxy.name: facts_of(proxy) for proxy in all_of(ENVOY, "envoy.yaml")}
    assert found == {
        "envoy /v1/chat": (
            300.0,
            True,
            True,
        ),  # the stream's idle time-out, 5 min, is shorter than the route's
        "envoy /v1/completions": (math.inf, False, True),
        "envoy /stream": (300.0, False, True),
        "envoy /": (15.0, False, True),
        "envoy prefill": (3600.0, False, None),
    }
    # lines counted by hand: the first route, and the filter of the other listener
    places = [proxy.where for proxy in all_of(ENVOY, "envoy.yaml")]
    assert places[0] == "envoy.yaml, line 16, api, virtual host llm, /v1/chat"
    assert places[-1] == "envoy.yaml, line 34, bootstrap"


@pytest.mark.parametrize("indent", [None, 2])
def test_envoy_as_json_is_the_same(indent: int | None) -> None:
    text = json.dumps(yaml.safe_load(ENVOY), indent=indent)
    assert proxies.looks_like("envoy.json", text)
    assert [facts_of(proxy) for proxy in all_of(text)] == [facts_of(proxy) for proxy in all_of(ENVOY)]


@pytest.mark.parametrize(
    ("policy", "retries"),
    [
        ("{retry_on: '5xx'}", True),
        ("{retry_on: 'connect-failure,refused-stream'}", False),
        ("{retry_on: 'reset', num_retries: 0}", False),
        ("{retry_on: 'reset', num_retries: {value: 0}}", False),
        ("{retry_on: 'retriable-status-codes'}", False),
        ("{retry_on: 'retriable-status-codes', retriable_status_codes: [503]}", True),
        ("{num_retries: 3}", False),
        (
            "{retry_on: gateway-error, retriable_request_headers: [{name: ':method', string_match: {exact: GET}}]}",
            False,
        ),
        (
            "{retry_on: gateway-error, retriable_request_headers: [{name: ':method', string_match: {exact: POST}}]}",
            True,
        ),
        (
            "{retry_on: gateway-error, retriable_request_headers: [{name: ':method', exact_match: POST, invert_match: true}]}",
            False,
        ),
    ],
)
def test_envoy_retries_a_post_unless_its_policy_says_otherwise(policy: str, retries: bool) -> None:
    text = ENVOY.replace('{retry_on: "5xx,reset", num_retries: 2}', policy)
    assert all_of(text)[0].retries_post is retries


def test_an_envoy_policy_of_the_virtual_host_holds_for_its_routes() -> None:
    text = ENVOY.replace(
        'domains: ["*"]', 'domains: ["*"]\n              retry_policy: {retry_on: 5xx, per_try_timeout: 2.5s}'
    )
    assert {proxy.name: facts_of(proxy) for proxy in all_of(text)}["envoy /"] == (2.5, True, True)


def test_envoy_time_outs_of_the_manager_and_in_parts() -> None:
    text = ENVOY.replace("stat_prefix: api", "stream_idle_timeout: 20s").replace(
        "timeout: 600s", "timeout: {seconds: 10, nanos: 500000000}"
    )
    found = {proxy.name: proxy.read_timeout for proxy in all_of(text)}
    assert (found["envoy /v1/chat"], found["envoy /stream"], found["envoy /v1/completions"]) == (
        10.5,
        20.0,
        math.inf,
    )


def test_an_envoy_time_out_that_is_none_is_reported() -> None:
    reading = proxies.read("envoy.yaml", ENVOY.replace("timeout: 600s", "timeout: 10m"))
    assert reading.proxies[0].read_timeout is None
    assert [one.why for one in reading.unread] == ["timeout is '10m', which is no duration"]


def test_routes_that_envoy_gets_elsewhere_are_reported() -> None:
    text = "dynamic_resources: {ads_config: {api_type: GRPC}, lds_config: {ads: {}}}\n"
    assert [one.why for one in proxies.read("e", text).unread] == [
        "listeners and routes that come by lds_config are not read"
    ]
    by_rds = ENVOY.replace("stat_prefix: api", "rds: {route_config_name: x}")
    assert [one.why for one in proxies.read("e", by_rds).unread] == ["routes that come by rds are not read"]


_MIRROR = "request_mirror_policies: [{cluster: shadow%s}]"


@pytest.mark.parametrize(
    ("share", "copies"),
    [
        ("", "shadow"),
        (", runtime_fraction: {default_value: {numerator: 5}}", "shadow"),
        (", runtime_fraction: {default_value: {numerator: 0}}", ""),
        (", runtime_fraction: {default_value: {}}", ""),
        (", runtime_fraction: {runtime_key: x, default_value: {numerator: 0}}", None),
    ],
)
def test_envoy_copies_requests_where_a_level_says_so(share: str, copies: str | None) -> None:
    """The innermost level that has policies counts (config.route.v3)."""
    mirror = _MIRROR % share
    by_route = ENVOY.replace("timeout: 600s", f"timeout: 600s\n                  {mirror}")
    assert [proxy.copies for proxy in all_of(by_route)][:2] == [copies, ""]
    by_host = ENVOY.replace('domains: ["*"]', f'domains: ["*"]\n              {mirror}')
    by_all = ENVOY.replace("virtual_hosts:", f"{mirror}\n            virtual_hosts:")
    for text in (by_host, by_all):
        assert {proxy.copies for proxy in all_of(text) if proxy.name != "envoy prefill"} == {copies}
    inner = by_all.replace("timeout: 600s", "timeout: 600s, requestMirrorPolicies: [{cluster: other}]")
    inner = inner.replace("timeout: 600s, r", "timeout: 600s\n                  r")
    assert all_of(inner)[0].copies == "other"


# ------------------------------------------------------------------------------------ HAProxy

HAPROXY = """\
global
    log stdout format raw local0

defaults common
    mode http
    timeout connect 5s
    timeout client  30s
    option redispatch

defaults slow from common
    timeout server 20m

defaults from common
    timeout server  50000

frontend api
    bind :8000
    default_backend llm   # all of it

backend llm
    retries 2
    retry-on all-retryable-errors
    option abortonclose
    server a 10.0.0.1:8000 check
    server b 10.0.0.2:8000 check

backend patient from slow
    no option abortonclose
    server a 10.0.0.1:8000

listen bootstrap
    mode tcp
    bind :8998
    server p 10.0.0.1:8998

backend empty
    timeout server 1s
"""


def test_haproxy_backends_take_what_their_defaults_say() -> None:
    found = {proxy.name: facts_of(proxy) for proxy in all_of(HAPROXY, "haproxy.cfg")}
    assert found == {
        "haproxy backend llm": (50.0, True, True),
        "haproxy backend patient": (1200.0, False, False),
        "haproxy listen bootstrap": (50.0, False, None),
    }
    assert all_of(HAPROXY, "haproxy.cfg")[0].where == "haproxy.cfg, line 20"
    assert all_of(HAPROXY)[0].routes == "10.0.0.1:8000 10.0.0.2:8000"


def test_haproxys_answer_to_a_client_that_leaves_depends_on_its_version_where_it_is_not_said() -> None:
    (proxy,) = all_of("backend a\n  mode http\n  server s 10.0.0.1:80\n")
    assert facts_of(proxy) == (math.inf, False, None)


@pytest.mark.parametrize(
    ("line", "retries"),
    [
        ("retry-on all-retryable-errors", True),
        ("retry-on conn-failure", False),
        ("retry-on none", False),
        ("retry-on 503 response-timeout\n retries 0", False),
        ("retry-on 503\n http-request disable-l7-retry if METH_POST", False),
        ("retry-on 503\n http-request disable-l7-retry unless METH_GET", False),
        ("retry-on 503\n http-request disable-l7-retry if { method POST }", False),
        ("retry-on 503\n http-request disable-l7-retry", False),
        ("retry-on 503\n http-request disable-l7-retry if METH_GET", True),
        ("retry-on 503\n http-request disable-l7-retry if { path_beg /v1 }", None),
    ],
)
def test_haproxy_sends_a_post_again_for_what_retry_on_names(line: str, retries: bool | None) -> None:
    (proxy,) = all_of(f"backend a\n mode http\n {line}\n server s 10.0.0.1:80\n")
    assert proxy.retries_post is retries


def test_a_frontend_that_forbids_it_decides_for_its_backend() -> None:
    text = HAPROXY.replace("bind :8000", "bind :8000\n    http-request disable-l7-retry if METH_POST")
    assert all_of(text)[0].retries_post is False
    other = text + "frontend second\n    bind :8001\n    default_backend llm\n"
    assert all_of(other)[0].retries_post is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50000", 50.0),
        ("50s", 50.0),
        ("2m", 120.0),
        ("1h", 3600.0),
        ("500us", 0.0005),
        ("1d", 86_400.0),
        ("0", math.inf),
    ],
)
def test_haproxy_times(text: str, seconds: float) -> None:
    (proxy,) = all_of(f"backend a\n mode http\n timeout server {text}\n server s 10.0.0.1:80\n")
    assert proxy.read_timeout == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('"${WAIT}"', "timeout server holds a variable"),
        ("soon", "timeout server is 'soon', which is no time"),
    ],
)
def test_a_haproxy_time_that_is_not_known_is_reported(text: str, why: str) -> None:
    reading = proxies.read("h.cfg", f"backend a\n mode http\n timeout server {text}\n server s 10.0.0.1:80\n")
    assert reading.proxies[0].read_timeout is None
    assert [(one.source, one.why) for one in reading.unread] == [("h.cfg, line 3", why)]


def test_a_time_that_is_set_for_some_requests_only_is_not_known() -> None:
    text = "backend a\n mode http\n timeout server 5s\n http-request set-timeout server 10m if { path /v1 }\n server s 10.0.0.1:80\n"
    assert all_of(text)[0].read_timeout is None
    assert all_of(text.replace(" if { path /v1 }", ""))[0].read_timeout == 600.0
    front = "frontend f\n mode http\n bind :80\n http-request set-timeout server 10m\n default_backend a\n"
    plain = "backend a\n mode http\n timeout server 5s\n server s 10.0.0.1:80\n"
    assert all_of(front + plain)[0].read_timeout is None
    assert all_of(front.replace("set-timeout server 10m", "deny if FALSE") + plain)[0].read_timeout == 5.0


# ------------------------------------------------------------------------------------ all of them


@pytest.mark.parametrize("text", [NGINX, ENVOY, HAPROXY])
def test_each_is_recognised(text: str) -> None:
    assert proxies.looks_like("file", text)


@pytest.mark.parametrize(
    "text",
    [
        "events { worker_connections 1; }\n", "backend a\n  mode http\n", "static_resources: {}\n",
    ],
)  # fmt: skip
def test_a_configuration_that_hands_nothing_on_is_said_to_be_one(text: str) -> None:
    reading = proxies.read("file", text)
    assert [one.why for one in reading.unread] == ["hands no requests on to a server"]


@given(st.data(), st.sampled_from([NGINX, ENVOY, HAPROXY]))
@settings(deadline=None)
def test_no_damaged_configuration_ends_the_reader(data: st.DataObject, text: str) -> None:
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, len(text)))
    junk = data.draw(st.text(st.sampled_from("'\"\\${}[]<>*!%#:;=- \n\t\0\r\ud800a1"), max_size=12))
    damaged = data.draw(st.sampled_from([text[:at], text[:at] + junk + text[end:], text[at:end] + junk]))
    proxies.looks_like("file", damaged)
    reading = proxies.read("file", damaged)
    assert reading.proxies or reading.unread


# ------------------------------------------------------------------------------------ copies by nginx


@pytest.mark.parametrize(
    ("outer", "inner", "copies"),
    [
        ("", "", ""),
        ("mirror /copy;", "", "/copy"),
        ("mirror /copy;", "mirror off;", ""),
        ("", "mirror /copy; mirror /again;", "/copy, /again"),
        ("", "mirror https://me:secret@shadow/?key=secret;", "https://shadow/"),
        ("mirror_request_body off;", "mirror /copy;", ""),  # no prompt in them
    ],
)
def test_nginx_copies_requests_where_mirror_says_so(outer: str, inner: str, copies: str) -> None:
    """ngx_http_mirror_module: inherited where the inner block has none of its own, `off` ends that."""
    text = f"events {{}}\nhttp {{ {outer}\n server {{ listen 80;\n location / {{ {inner}\n proxy_pass http://llm; }} }} }}\n"
    assert [proxy.copies for proxy in all_of(text)] == [copies]


def test_whether_a_snippet_is_copied_is_not_known() -> None:
    assert all_of("location / {\n proxy_pass http://llm;\n proxy_read_timeout 60s;\n}\n")[0].copies is None
    cut = proxies.read("n", "http {\n server { listen 80;\n location / { proxy_pass http://a;\n mirror /b;\n")
    assert [proxy.copies for proxy in cut.proxies] == ["/b"]
    open_end = proxies.read("n", "http {\n server { listen 80;\n location / { proxy_pass http://a; }\n")
    assert [proxy.copies for proxy in open_end.proxies] == [None]  # `mirror` may stand further on


def test_nginx_copies_what_a_location_without_a_server_hands_on() -> None:
    text = """http { server {
    location / { mirror /copy; try_files $uri @llm; }
    location /other { proxy_pass http://llm; }
    location @llm { proxy_pass http://llm; }
    } }\n"""
    assert {proxy.routes: proxy.copies for proxy in all_of(text)} == {
        "location /other -> http://llm": "", "location @llm -> http://llm": "/copy",
    }  # fmt: skip


def test_the_location_that_takes_nginxs_copies_makes_none() -> None:
    text = "http { server { mirror /copy; location / { proxy_pass http://llm; }\n location = /copy { internal; proxy_pass http://shadow; } } }\n"
    assert [proxy.copies for proxy in all_of(text)] == ["/copy", ""]


def test_a_mirror_outside_of_every_block_is_no_crash() -> None:
    assert proxies.read(
        "n", "mirror /copy;\nhttp { server { location / { proxy_pass http://a; } } }\n"
    ).proxies
