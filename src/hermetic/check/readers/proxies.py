"""nginx, Envoy and HAProxy configurations: how long each waits, whether it asks twice, and what it does when a client leaves.

The one thing to know: where the configuration is silent, the proxy's documented default is taken if no version has changed it (nginx: 60 s, no retry of
POST, upstream closed; Envoy: 15 s for a whole answer, 5 min of silence), and nothing otherwise (HAProxy's abortonclose is on by default
since 3.3). `math.inf` is a time-out that is turned off.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hermetic.check.deployment import Proxy
from hermetic.check.readers.beside import matching
from hermetic.check.readers.quoting import quoted_words
from hermetic.check.readers.reading import Reading
from hermetic.check.readers.shell import UNKNOWN
from hermetic.check.readers.yaml_text import (
    Located,
    Node,
    NotYaml,
    documents,
    line_of,
    mapping,
    place,
    sequence,
    text_of,
    under,
)
from hermetic.check.urls import shown_url

MOST = 4 * 1024**2  # characters of a configuration
_HEAD = 1024**2


def looks_like(name: str, text: str) -> bool:
    """Whether this is a configuration of nginx, Envoy or HAProxy."""
    return _kind(text[:_HEAD]) != ""


def read(source: str, text: str) -> Reading:
    """A Proxy for each location, route or backend that hands requests on."""
    reading = Reading()
    if len(text) > MOST:
        return reading.failed(
            source, f"has more than {MOST:,} characters, so it is no configuration of a proxy"
        )
    kind = _kind(text[:_HEAD])
    if kind == "envoy":
        _envoy(reading, source, text)
    elif kind == "haproxy":
        _haproxy(reading, source, text)
    else:
        _nginx(reading, source, text)
    if not (reading.proxies or reading.unread):
        reading.failed(source, "hands no requests on to a server")
    return reading


_HAPROXY_SECTION = re.compile(
    r"^(?:global|defaults|frontend|backend|listen)(?:[ \t]+[^\n{;=]*)?$", re.MULTILINE
)
_HAPROXY_LINE = re.compile(
    r"^[ \t]+(?:bind|server|server-template|mode|timeout|option|balance|default_backend)[ \t]+\S",
    re.MULTILINE,
)
_ENVOY = re.compile(
    r'^[ \t]*["\']?(?:static_resources|dynamic_resources|staticResources|dynamicResources)["\']?\s*:',
    re.MULTILINE,
)
_NGINX_BLOCK = re.compile(
    r"^[ \t]*(?:http|server|stream|events|location[ \t][^{};\n]{1,500}|upstream[ \t]+[^{};\s]{1,200})[ \t]*\{",
    re.MULTILINE,
)
_NGINX_LINE = re.compile(
    r"(?:^|[{;])[ \t]*(?:proxy_\w{1,50}|listen|server|server_name|worker_processes|worker_connections|keepalive|include)[ \t]+[^;{}\n]{1,500};",
    re.MULTILINE,
)


def _kind(text: str) -> str:
    first = next((line for line in text.splitlines() if line.strip() and line.lstrip()[0] not in "#"), "")
    if text.lstrip().startswith("{") and re.search(r'"(?:static|dynamic)_?[rR]esources"[ \t]*:', text):
        return "envoy"  # JSON, which may stand in one line
    if _ENVOY.search(text) and re.match(r"\s*(?:---|\{|[\"']?\w+[\"']?\s*:)", first):
        return "envoy"
    if _HAPROXY_SECTION.match(first.rstrip()) and _HAPROXY_LINE.search(text):
        return "haproxy"
    if _NGINX_BLOCK.search(text) and _NGINX_LINE.search(text) and re.match(r"\s*[a-z_]+[\s{]", first):
        return "nginx"
    return ""


# ------------------------------------------------------------------------------------ nginx
#
# The directives of ngx_http_proxy_module, as nginx.org documents them.

_DEEPEST = 64
_INCLUDED = 200  # files at most
_LUA = re.compile(r"""(?:--)?\[\[|--[^\n]*|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"|[{}]""")
_NO_PROXIES = ("upstream", "map", "geo", "split_clients", "types", "match")
_HARMLESS_INCLUDES = ("mime.types", "fastcgi_params", "uwsgi_params", "scgi_params", "fastcgi.conf")
_FAILED = frozenset({"500", "502", "503", "504"})
_DUMPED = re.compile(r"^# configuration file (\S+):[ \t]*$", re.MULTILINE)
_UNITS = {
    "ms": 0.001,
    "s": 1.0,
    "": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
    "M": 2592000.0,
    "y": 31536000.0,
}
_SETTINGS = (
    "proxy_read_timeout", "proxy_next_upstream", "proxy_next_upstream_tries", "proxy_ignore_client_abort", "proxy_timeout", "mirror_request_body",
)  # fmt: skip


@dataclass
class Directive:
    """One directive of nginx. `block`: what stands in its braces, if it has any."""

    name: str
    arguments: list[str]
    line: int
    block: list[Directive] | None = None


class _Cut(ValueError):
    """Where a configuration breaks off."""


def nginx_directives(text: str) -> tuple[list[Directive], str]:
    """(the directives, what is wrong with the text or ""). What stands before the fault is read all the same."""
    top: list[Directive] = []
    stack = [top]
    words: list[str] = []
    began = 1
    try:
        for token, line, quoted in _tokens(text):
            if not words:
                began = line
            if quoted or token not in ("{", "}", ";"):
                words.append(token)
            elif token == "}":
                if words or len(stack) == 1:
                    raise _Cut(f"line {line}: a closing brace that nothing opened")
                stack.pop()
            elif not words:
                if token == "{":
                    raise _Cut(f"line {line}: a brace without a name")
            else:
                directive = Directive(words[0], words[1:], began, [] if token == "{" else None)
                stack[-1].append(directive)
                if directive.block is not None:
                    if len(stack) > _DEEPEST:
                        raise _Cut(f"line {line}: nested more than {_DEEPEST} deep")
                    stack.append(directive.block)
                words = []
        if words or len(stack) > 1:
            raise _Cut("it ends in the middle of a block or directive")
    except _Cut as fault:
        return top, str(fault)
    return top, ""


def _tokens(text: str) -> Iterator[tuple[str, int, bool]]:
    """(word or sign, line, whether it was quoted). A `..._by_lua_block` is one directive without contents."""
    at, line, size = 0, 1, len(text)
    last = ""
    while at < size:
        char = text[at]
        if char == "\n":
            line += 1
            at += 1
        elif char.isspace():
            at += 1
        elif char == "#":
            end = text.find("\n", at)
            at = size if end < 0 else end
        elif char == "{" and last.endswith("_by_lua_block"):
            end = _lua_end(text, at)
            line += text.count("\n", at, end)
            at, last = end, ""
            yield ";", line, False
        elif char in "{};":
            last = ""
            yield char, line, False
            at += 1
        elif char in "'\"":
            word, end = _quoted(text, at)
            yield word, line, True
            line += text.count("\n", at, end)
            at, last = end, word
        else:
            end = at
            while end < size and text[end] not in " \t\r\n;{}":
                if text[end] == "\\":
                    end += 1
                elif text.startswith("${", end):
                    closing = text.find("}", end, end + 256)
                    end = closing if closing >= 0 else end + 1
                end += 1
            end = max(min(end, size), at + 1)
            last = text[at:end]
            yield last, line, False
            line += text.count("\n", at, end)
            at = end


def _quoted(text: str, at: int) -> tuple[str, int]:
    """The text in quotes that begin here, and where it ends."""
    quote, at = text[at], at + 1
    found: list[str] = []
    while at < len(text) and text[at] != quote:
        if text[at] == "\\" and at + 1 < len(text):
            found.append(text[at + 1] if text[at + 1] in "\\'\"" else text[at : at + 2])
            at += 2
        else:
            found.append(text[at])
            at += 1
    return "".join(found), min(at + 1, len(text))


def _lua_end(text: str, at: int) -> int:
    """Behind the brace that closes the one at `at`; strings and comments of Lua are stepped over."""
    depth = 0
    while (found := _LUA.search(text, at)) is not None:
        at = found.end()
        if found[0].endswith("[["):
            end = text.find("]]", at)
            at = len(text) if end < 0 else end + 2
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0 and found[0] == "}":
            return at
    return len(text)


def seconds_of_nginx(text: str) -> float | None:
    """`60`, `60s`, `1m 30s`, `500ms`. None for what is no time."""
    parts = re.findall(r"(\d{1,9})(ms|[smhdwMy]?)", text.replace(" ", ""))
    if not parts or "".join(map("".join, parts)) != text.replace(" ", ""):
        return None
    return sum(int(number) * _UNITS[unit] for number, unit in parts)


def retries_of_nginx(conditions: Sequence[str]) -> bool:
    """Whether POST goes to the next server: only with non_idempotent (since 1.9.13, of 2016)."""
    return "non_idempotent" in conditions and "off" not in conditions


def copies_of_nginx(targets: Sequence[str] | None, whole: bool = True) -> str | None:
    """Where `mirror` (since 1.13.4, of 2017) sends copies of a request; without its body (`whole`) there is no prompt in one."""
    if targets is None or not whole:
        return None if targets is None else ""
    return ", ".join(shown_url(one) for one in targets if one != "off")


def nginx_settings(text: str) -> dict[str, list[str]]:
    """The settings that matter here in a snippet, by name."""
    found: dict[str, list[str]] = {}
    for one in nginx_directives(text)[0]:
        if one.name == "mirror":
            found.setdefault(one.name, []).extend(one.arguments[:1])
        elif one.name in _SETTINGS and one.arguments:
            found[one.name] = one.arguments
    return found


def _nginx(reading: Reading, source: str, text: str) -> None:
    """`nginx -T` prints all its files one behind the other: then what is included is looked for there."""
    dumped: dict[str, str] = {}
    marks = list(_DUMPED.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=False):
        dumped[mark[1]] = text[mark.end() : end].removeprefix("\n")
    main = source
    if dumped and not text[: marks[0].start()].strip():
        main, text = next(iter(dumped.items()))
    reader = _Nginx(reading, source, dumped)
    top = reader.parsed(main, text)
    whole = any(one.name in ("http", "stream", "events") for one in top)
    reader.block(top, main, {}, () if whole else ("http",), whole)
    if reader.cut:
        for proxy in reading.proxies:
            _forget(proxy)


def _hands_on(one: Directive) -> bool:
    """Whether it is a location with a name, to which requests that failed elsewhere are handed on as they are, POST too."""
    return (
        one.name == "location"
        and bool(one.arguments)
        and one.arguments[-1].startswith("@")
        and any(inner.name == "proxy_pass" for inner in one.block or ())
    )


def _forget(proxy: Proxy) -> None:
    """What a file says that breaks off may be said otherwise further on: a directive holds for its block wherever in it it stands. That POST is sent
    again, or copied, can no longer be taken back."""
    proxy.read_timeout = proxy.closes_upstream = None
    proxy.retries_post, proxy.copies = proxy.retries_post or None, proxy.copies or None


@dataclass
class _Nginx:
    reading: Reading
    source: str
    dumped: Mapping[str, str]
    included: int = 0
    cut: bool = False  # some file of it ends too early
    named: frozenset[str] = frozenset()  # locations like @other of the server in hand that hand requests on
    handed_on: list[str] = field(
        default_factory=list
    )  # who gets copies in its locations that have no server of their own

    def parsed(self, file: str, text: str) -> list[Directive]:
        directives, fault = nginx_directives(text)
        if fault:
            self.cut = True
            self.reading.failed(file, f"cannot be read to its end: {fault}", part=True)
        return directives

    def block(
        self,
        directives: Sequence[Directive],
        file: str,
        inherited: Mapping[str, list[str]],
        path: tuple[str, ...],
        whole: bool,
    ) -> None:
        """Proxies below a block. Settings hold for the whole block, wherever in it they stand. `whole`: nothing around it, and
        nothing that it includes, stands in a file that is not here: then what is not set has nginx's default."""
        spread: list[tuple[Directive, str]] = []
        whole = self._spread(directives, file, spread) and whole
        settings = dict(inherited)
        for one, _ in spread:
            if one.block is None and one.name in _SETTINGS and one.arguments:
                settings[one.name] = one.arguments
        if targets := [one.arguments[0] for one, _ in spread if one.name == "mirror" and one.arguments]:
            settings["mirror"] = targets  # of which there can be several
            if "".join(path[-1:]).startswith("location") and not any(
                one.name == "proxy_pass" for one, _ in spread
            ):
                self.handed_on += [one for one in targets if one != "off"]  # as with try_files $uri @llm
        if own := [one.arguments for one, _ in spread if one.name == "error_page"]:
            settings["error_page"] = [words[-1] for words in own if not _FAILED.isdisjoint(words[:-1])]
        if path[-1:] == ("server",):
            self.named = frozenset(one.arguments[-1] for one, _ in spread if _hands_on(one))
            self.handed_on, began = [], len(self.reading.proxies)
        for one, where in spread:
            if one.block is not None:
                if one.name not in _NO_PROXIES:
                    self.block(
                        one.block, where, settings, (*path, " ".join([one.name, *one.arguments])), whole
                    )
            elif one.name == "proxy_pass" and one.arguments:
                self._proxy(one, where, settings, path, whole)
        if path[-1:] == ("server",) and self.handed_on:
            for proxy in self.reading.proxies[began:]:
                if proxy.routes.startswith("location @"):
                    proxy.copies = copies_of_nginx([*filter(None, [proxy.copies]), *self.handed_on])

    def _spread(
        self, directives: Sequence[Directive], file: str, into: list[tuple[Directive, str]], depth: int = 0
    ) -> bool:
        """Directives with those of included files in their place, each with the file that it stands in. Whether all are here."""
        whole = True
        for one in directives:
            if one.name != "include" or not one.arguments:
                into.append((one, file))
                continue
            if one.arguments[0].endswith(_HARMLESS_INCLUDES):
                continue
            found = self._included(one.arguments[0]) if self.included < _INCLUDED and depth < _DEEPEST else []
            self.included += len(found)
            if not found:
                many = self.included >= _INCLUDED or depth >= _DEEPEST
                why = "so many files are included, or one by itself" if many else "no such file is beside it"
                self.reading.failed(file, f"include {one.arguments[0]} is not read: {why}", part=True)
                whole = False
            for name, text in found:
                if text is None:
                    self.reading.failed(
                        file, f"include {name} is not read: it cannot be, or is too large", part=True
                    )
                    whole = False
                    continue
                whole = self._spread(self.parsed(name, text), name, into, depth + 1) and whole
        return whole

    def _included(self, pattern: str) -> Sequence[tuple[str, str | None]]:
        if not self.dumped:
            return matching(self.source, pattern)
        wanted = pattern if pattern.startswith("/") else f"*/{pattern}"
        return [(name, text) for name, text in self.dumped.items() if fnmatch.fnmatchcase(name, wanted)]

    def _proxy(
        self, one: Directive, file: str, settings: Mapping[str, list[str]], path: tuple[str, ...], whole: bool
    ) -> None:
        where = f"{file}, line {one.line}"
        blocks = [step for step in path if step.startswith(("location", "if"))]
        proxy = Proxy(
            name=f"nginx {blocks[0] if blocks else 'server'}",
            kind="nginx",
            where=where,
            routes=f"{' '.join(blocks)} -> {one.arguments[0]}".strip(),
        )
        stream = path[:1] == ("stream",)
        setting, default = ("proxy_timeout", ["10m"]) if stream else ("proxy_read_timeout", ["60s"])
        if (timeout := settings.get(setting, default if whole else None)) is not None:
            written = " ".join(timeout)
            proxy.read_timeout = seconds_of_nginx(written)
            if proxy.read_timeout is None:
                self.reading.failed(where, f"{setting} is {written[:60]!r}, which is no time", part=True)
        if stream:
            proxy.retries_post = False  # what is tried again is the connection, before a byte was sent
            proxy.copies = ""
        else:
            self._post(proxy, settings, whole)
            if not {*settings.get("mirror", ())}.isdisjoint(step.rpartition(" ")[2] for step in blocks):
                proxy.copies = ""  # it takes the copies, which are copied no more
            others = self.named & {*settings.get("error_page", ())} - {path[-1].removeprefix("location ")}
            proxy.retries_post = bool(others) or proxy.retries_post
        self.reading.proxies.append(proxy)

    def _post(self, proxy: Proxy, settings: Mapping[str, list[str]], whole: bool) -> None:
        conditions = settings.get("proxy_next_upstream", ["error", "timeout"] if whole else None)
        if settings.get("proxy_next_upstream_tries") == ["1"]:
            proxy.retries_post = False
        elif conditions is not None:
            proxy.retries_post = retries_of_nginx(conditions)
        bodies = settings.get("mirror_request_body", ["on"]) != ["off"]
        proxy.copies = copies_of_nginx(settings.get("mirror", [] if whole else None), bodies)
        ignores = settings.get("proxy_ignore_client_abort", ["off"] if whole else None)
        if ignores is not None:
            proxy.closes_upstream = ignores != ["on"]


# ------------------------------------------------------------------------------------ Envoy
#
# envoy.config.route.v3.RouteAction and RetryPolicy, and HttpConnectionManager, as envoyproxy.io documents them.

_ROUTE_TIMEOUT = 15.0
_STREAM_IDLE = 300.0
_TCP_IDLE = 3600.0
# Conditions under which nothing of the request has been worked on; any other sends a POST again.
_HARMLESS = frozenset({"connect-failure", "refused-stream", "reset-before-request", "envoy-ratelimited"})
_CAMEL = re.compile(r"[a-z]+(?:[A-Z][a-z0-9]*)+")
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)s")


def _envoy(reading: Reading, source: str, text: str) -> None:
    try:
        found = documents(text)
    except NotYaml as error:
        reading.failed(source, str(error), damaged=True)
        return
    for document in map(_snake, found):
        resources = under(document, "static_resources")
        for listener in sequence(under(resources, "listeners")):
            name = text_of(mapping(listener).get("name")) or "listener"
            for chain in _chains(listener):
                for one in sequence(under(chain, "filters")):
                    _filter(reading, source, name, mapping(one))
        dynamic = under(document, "dynamic_resources")
        for kind in ("lds_config", "ads_config"):
            if under(dynamic, kind) is not None:
                reading.failed(source, f"listeners and routes that come by {kind} are not read", part=True)
                break


def _snake(node: Node) -> Node:
    """With the keys as the documentation spells them: Envoy takes retryPolicy for retry_policy as well."""
    if isinstance(node, dict):
        found = Located(line_of(node))
        for key, inner in node.items():
            camel = _CAMEL.fullmatch(key) is not None
            found[re.sub("[A-Z]", lambda sign: f"_{sign[0].lower()}", key) if camel else key] = _snake(inner)
        return found
    return [_snake(inner) for inner in node] if isinstance(node, list) else node


def _chains(listener: Node) -> list[Node]:
    chains = sequence(under(listener, "filter_chains"))
    default = under(listener, "default_filter_chain")
    return chains + ([default] if default is not None else [])


def _filter(reading: Reading, source: str, listener: str, one: Mapping[str, Node]) -> None:
    where = f"{place(source, one)}, {listener}"
    config = mapping(one.get("typed_config") or one.get("config"))
    kind = text_of(config.get("@type")) + text_of(one.get("name"))
    if "http_connection_manager" in kind or "HttpConnectionManager" in kind:
        if config.get("rds") is not None:
            reading.failed(where, "routes that come by rds are not read", part=True)
        routes = mapping(config.get("route_config"))
        for host in sequence(routes.get("virtual_hosts")):
            for number, route in enumerate(sequence(under(host, "routes")), 1):
                at = f"{place(source, route)}, {listener}"
                _route(reading, at, (config, routes, mapping(host)), mapping(route), number)
    elif "tcp_proxy" in kind or "TcpProxy" in kind:
        idle = _envoy_time(reading, where, "idle_timeout", config.get("idle_timeout"), _TCP_IDLE)
        cluster = text_of(config.get("cluster"))
        reading.proxies.append(
            Proxy(
                name=f"envoy {cluster}".strip(),
                kind="envoy",
                where=where,
                read_timeout=idle,
                retries_post=False,
                copies="",
                routes=f"tcp -> {cluster}",
            )
        )


def _route(
    reading: Reading,
    at: str,
    around: tuple[Mapping[str, Node], Mapping[str, Node], Mapping[str, Node]],
    route: Mapping[str, Node],
    number: int,
) -> None:
    """How long a route waits for the first byte is the least of its time-outs: all of them run until then. `around`: its connection manager, the
    manager's routes, and its virtual host."""
    manager, routes, host = around
    action, match = mapping(route.get("route")), mapping(route.get("match"))
    if not action or not _takes_post(sequence(match.get("headers"))):
        return
    host_name = text_of(host.get("name"))
    path = next(
        (text_of(match.get(key)) for key in ("prefix", "path", "path_separated_prefix") if match.get(key)), ""
    )
    path = path or text_of(under(match, "safe_regex", "regex")) or f"route {number}"
    where = f"{at}, virtual host {host_name}, {path}" if host_name else f"{at}, {path}"
    policy = mapping(action.get("retry_policy") or host.get("retry_policy"))
    retries = _envoy_retries(policy)

    def seconds(node: object, name: str, default: float) -> float | None:
        return _envoy_time(reading, where, name, mapping(node).get(name), default)

    idle = "idle_timeout" if action.get("idle_timeout") is not None else "stream_idle_timeout"
    times = [
        seconds(action, "timeout", _ROUTE_TIMEOUT),
        seconds(action if idle == "idle_timeout" else manager, idle, _STREAM_IDLE),
        seconds(action.get("max_stream_duration"), "max_stream_duration", math.inf),
    ]
    if action.get("max_stream_duration") is None:
        common = manager.get("common_http_protocol_options")
        times.append(seconds(common, "max_stream_duration", math.inf))
    if text_of(policy.get("retry_on")):
        times += [seconds(policy, name, math.inf) for name in ("per_try_timeout", "per_try_idle_timeout")]
    known = [time for time in times if time is not None]
    proxy = Proxy(
        name=f"envoy {path}",
        kind="envoy",
        where=where,
        read_timeout=min(known) if len(known) == len(times) else None,
        retries_post=retries,
        closes_upstream=True,  # a stream whose client is gone is reset
        copies=_envoy_copies(action, host, routes),
        routes=f"{path} -> {_cluster(action)}",
    )
    reading.proxies.append(proxy)


def _envoy_copies(*levels: Mapping[str, Node]) -> str | None:
    """The clusters that get copies of requests. The innermost level that says so counts; a share of 0 is none, unless what Envoy is told while it runs may
    be another."""
    policies = next((said for one in levels if (said := one.get("request_mirror_policies"))), [])
    if not isinstance(policies, list):
        return None
    found: list[str] = []
    unsure = False
    for one in map(mapping, policies):
        share = one.get("runtime_fraction")
        if share is not None and text_of(under(share, "default_value", "numerator")) in ("", "0"):
            unsure |= bool(text_of(under(share, "runtime_key")))
        else:
            found.append(text_of(one.get("cluster")) or "a cluster told by the request")
    return ", ".join(found) or (None if unsure else "")


def _cluster(action: Mapping[str, Node]) -> str:
    weighted = [
        text_of(mapping(one).get("name")) for one in sequence(under(action, "weighted_clusters", "clusters"))
    ]
    return text_of(action.get("cluster")) or ", ".join(weighted) or "a cluster told by the request"


def _envoy_time(reading: Reading, where: str, name: str, node: Node, default: float) -> float | None:
    """`15s` or `0.25s`; 0 turns a time-out off. None where it cannot be read."""
    if node is None:
        return default
    found = _DURATION.fullmatch(text_of(node))
    parts = mapping(node)
    if found is None and parts:  # {seconds: 15}
        found = _DURATION.fullmatch(f"{text_of(parts.get('seconds')) or '0'}s")
    if found is None:
        reading.failed(where, f"{name} is {str(node)[:60]!r}, which is no duration", part=True)
        return None
    seconds = float(found[1])
    if parts:
        nanos = text_of(parts.get("nanos")) or "0"
        seconds += int(nanos) / 1e9 if re.fullmatch(r"[0-9]{1,9}", nanos) else 0.0
    return seconds or math.inf


def _takes_post(headers: Sequence[Node]) -> bool:
    """Whether requests with these headers can be POST: :method may be asked for."""
    for one in headers:
        header = mapping(one)
        if text_of(header.get("name")) != ":method":
            continue
        wanted = text_of(header.get("exact_match")) or text_of(under(header, "string_match", "exact"))
        inverted = header.get("invert_match") == "true"
        if wanted and (wanted == "POST") == inverted:
            return False
    return True


def _envoy_retries(policy: Mapping[str, Node]) -> bool | None:
    """Whether a POST may be sent twice. Envoy asks for no method unless the policy does."""
    conditions = {one.strip() for one in text_of(policy.get("retry_on")).split(",") if one.strip()}
    if not conditions or UNKNOWN in "".join(conditions):
        return None if conditions else False
    number = policy.get("num_retries")
    count = text_of(mapping(number).get("value")) if isinstance(number, dict) else text_of(number)
    if count == "0":
        return False
    if not (conditions - _HARMLESS - {"retriable-status-codes"}) and not sequence(
        policy.get("retriable_status_codes")
    ):
        return False
    headers = sequence(policy.get("retriable_request_headers"))
    return not headers or any(_takes_post([one]) for one in headers)


# ------------------------------------------------------------------------------------ HAProxy
#
# The configuration manual of HAProxy, sections 2.5 (times), 4.2 (retry-on, option abortonclose, timeout server, http-request).

_HAPROXY_UNITS = {"us": 1e-6, "ms": 0.001, "": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SECTIONS = ("global", "defaults", "frontend", "backend", "listen")
_OTHER_SECTIONS = (
    "userlist", "peers", "mailers", "program", "resolvers", "cache", "ring", "log-forward", "http-errors", "fcgi-app", "crt-store",
    "traces", "acme", "log-profile",
)  # fmt: skip
_SET_TIMEOUT = ("http-request", "set-timeout", "server")
_SENT_NOTHING = frozenset({"none", "conn-failure", "0rtt-rejected"})
_ANY_POST = (["METH_POST"], ["!METH_GET"], ["{", "method", "POST", "}"], ["!{", "method", "GET", "}"])
_NOT_POST = (["METH_GET"], ["!METH_POST"], ["{", "method", "GET", "}"], ["!{", "method", "POST", "}"])


@dataclass(frozen=True)
class _Front:
    """What a frontend decides for the backends that it leads to: whether POST is sent once, and whether it sets time-outs."""

    stops_post: bool | None
    sets_timeout: bool


@dataclass
class _Section:
    kind: str
    name: str
    line: int
    base: _Section | None = None
    lines: list[tuple[int, list[str]]] = field(default_factory=list)

    def all(self) -> Iterator[tuple[int, list[str]]]:
        """Its lines, the last first, and then those of the defaults that it is based on."""
        section: _Section | None = self
        for _ in range(_DEEPEST):
            if section is None:
                return
            yield from reversed(section.lines)
            section = section.base

    def last(self, *words: str) -> tuple[int, list[str]] | None:
        """The last line that begins so: what counts."""
        return next((one for one in self.all() if tuple(one[1][: len(words)]) == words), None)


def _haproxy(reading: Reading, source: str, text: str) -> None:
    sections = _sections(text)
    leads: dict[str, list[_Front]] = {}  # by backend; "": a name that a request tells, which may be any
    for section in (one for one in sections if one.kind == "frontend"):
        front = _Front(_stops_post(section), section.last(*_SET_TIMEOUT) is not None)
        for name in {_led_to(words) for _, words in section.all()} - {None}:
            leads.setdefault(name or "", []).append(front)
    for one in sections:
        if one.kind in ("backend", "listen") and any(words[0].startswith("server") for _, words in one.lines):
            _backend(reading, source, one, [*leads.get(one.name, ()), *leads.get("", ())])
    if any(words[0] == ".if" for one in sections for _, words in one.lines):
        reading.failed(
            source, "has conditional blocks (.if), which are read as if all of them held", part=True
        )


def _sections(text: str) -> list[_Section]:
    found: list[_Section] = []
    unnamed: _Section | None = None
    named: dict[str, _Section] = {}
    current: _Section | None = None
    for number, line in enumerate(text.splitlines(), 1):
        words = _haproxy_words(line)
        if not words:
            continue
        if words[0] in _OTHER_SECTIONS:
            current = None
        elif words[0] in _SECTIONS:
            base = named.get(words[words.index("from") + 1]) if "from" in words[:-1] else unnamed
            name = words[1] if len(words) > 1 and words[1] != "from" else ""
            current = _Section(words[0], name, number)
            if current.kind == "defaults":
                current.base = base if "from" in words[:-1] else None
                unnamed = current
                named[name] = current
            elif current.kind != "global":
                current.base = base
            found.append(current)
        elif current is not None:
            current.lines.append((number, words))
    return found


def _haproxy_words(line: str) -> list[str]:
    """The words of a line. `${NAME}` is not known here."""
    return quoted_words(line, as_it_is="'", comment="#", variable=_VARIABLE)


_VARIABLE = re.compile(r"\{?\w+[^{}\"]*\}?")


def _led_to(words: Sequence[str]) -> str | None:
    """The backend that a line of a frontend names."""
    if words[0] not in ("use_backend", "default_backend") or len(words) < 2:
        return None
    return "" if "%[" in words[1] else words[1]


def _backend(reading: Reading, source: str, one: _Section, fronts: Sequence[_Front]) -> None:
    where = f"{source}, line {one.line}"
    mode = one.last("mode")
    tcp = mode is None or mode[1][1:2] != ["http"]
    proxy = Proxy(
        name=f"haproxy {one.kind} {one.name}".strip(),
        kind="haproxy",
        where=where,
        read_timeout=_server_timeout(reading, source, one, fronts),
        routes=" ".join(words[2] for _, words in one.lines if words[0] == "server" and len(words) > 2),
    )
    proxy.retries_post = False if tcp else _haproxy_retries(one, fronts)
    said = next((words for _, words in one.all() if _option(words) == "abortonclose"), None)
    if said is not None:
        proxy.closes_upstream = said[0] != "no"
    reading.proxies.append(proxy)


def _option(words: Sequence[str]) -> str:
    words = words[1:] if words[0] == "no" else words
    return words[1] if len(words) > 1 and words[0] == "option" else ""


def _server_timeout(reading: Reading, source: str, one: _Section, fronts: Sequence[_Front]) -> float | None:
    """None where it is not known; a rule that sets it for some requests makes it so."""
    if any(front.sets_timeout for front in fronts):
        return None
    if (rule := one.last(*_SET_TIMEOUT)) is not None:
        return _haproxy_time(reading, source, rule[0], rule[1][3]) if len(rule[1]) == 4 else None
    found = one.last("timeout", "server")
    if found is None:
        return math.inf  # the manual: a time-out that is not set is infinite
    return _haproxy_time(reading, source, found[0], "".join(found[1][2:3]))


def _haproxy_time(reading: Reading, source: str, number: int, text: str) -> float | None:
    match = re.fullmatch(r"(\d{1,12})(us|ms|s|m|h|d|)", text)
    if match is None:
        why = "holds a variable" if UNKNOWN in text else f"is {text[:60]!r}, which is no time"
        reading.failed(f"{source}, line {number}", f"timeout server {why}", part=True)
        return None
    return int(match[1]) * _HAPROXY_UNITS[match[2]] or math.inf


def _haproxy_retries(one: _Section, fronts: Sequence[_Front]) -> bool | None:
    """HAProxy sends a request again for what retry-on names; without it only where no connection came about."""
    conditions = one.last("retry-on")
    if conditions is None or set(conditions[1][1:]) <= _SENT_NOTHING:
        return False
    if (count := one.last("retries")) is not None and count[1][1:2] == ["0"]:
        return False
    stopped = _stops_post(one)
    in_front = [front.stops_post for front in fronts]
    if stopped or (in_front and all(in_front)):
        return False
    if stopped is None or any(state is not False for state in in_front):
        return None  # it depends on the request
    return True


def _stops_post(section: _Section) -> bool | None:
    """Whether `http-request disable-l7-retry` holds for POST; None if its condition is not one that tells."""
    answer: bool | None = False
    for _, words in section.all():
        if words[:2] != ["http-request", "disable-l7-retry"]:
            continue
        held = True if len(words) == 2 else _post(words[3:], inverted=words[2] == "unless")
        if held:
            return True
        answer = None if held is None else answer
    return answer


def _post(condition: list[str], inverted: bool) -> bool | None:
    """Whether a condition holds for every POST (or, inverted, for none)."""
    yes, no = (_NOT_POST, _ANY_POST) if inverted else (_ANY_POST, _NOT_POST)
    return True if condition in yes else False if condition in no else None


__all__ = [
    "Directive", "copies_of_nginx", "looks_like", "nginx_directives", "nginx_settings", "read", "retries_of_nginx", "seconds_of_nginx",
]  # fmt: skip
