"""docker compose files and Kubernetes manifests: which engines they start, how, and with which variables.

The one thing to know: a variable whose value stands elsewhere (a secret, a file that is not here, the shell that will run compose) is no fact. While a
set of variables is missing whose names are not known either, nothing is said of variables that are not set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hermetic.check import facts
from hermetic.check.deployment import Proxy
from hermetic.check.facts import Sheet
from hermetic.check.readers import flags, hidden, overlays, shell, yaml_text
from hermetic.check.readers.beside import Files, beside
from hermetic.check.readers.proxies import copies_of_nginx, nginx_settings, retries_of_nginx, seconds_of_nginx
from hermetic.check.readers.reading import Reading
from hermetic.check.readers.shell import SECRET, UNKNOWN, Filler
from hermetic.check.readers.yaml_text import Node, NotYaml, documents, mapping, sequence, text_of, under

_COMPOSE_TOP = re.compile(r"^services[ \t]*:[ \t]*(?:#.*)?$", re.MULTILINE)
_COMPOSE_FLOW = re.compile(
    r"^[ \t]+[\w.-]+:[ \t]*\{[^\n]*\b(?:image|command)\s*:", re.MULTILINE
)  # a service on one line
_COMPOSE_INNER = re.compile(
    r"^[ \t]+(?:image|build|command|entrypoint|environment|extends)[ \t]*:", re.MULTILINE
)
_KUBERNETES = re.compile(
    r'^(?:- )?apiVersion[ \t]*:[ \t]*["\']?[A-Za-z0-9./-]+["\']?[ \t]*(?:#.*)?$', re.MULTILINE
)
_KIND = re.compile(r'^(?:- |  )?kind[ \t]*:[ \t]*["\']?[A-Za-z]+["\']?[ \t]*(?:#.*)?$', re.MULTILINE)
_YAML_LINE = re.compile(
    r"(?:---|%YAML|[{]|\[\s*(?:[{]|$)|(?:- )?[\"']?[A-Za-z_$][\w./$-]*[\"']?\s*:(?:\s|$)|- )"
)
# What only a chart that is not rendered has. Other `{{` stand in rendered manifests as well: alerts, prompts of models, workflows.
_TEMPLATE = re.compile(
    r"\{\{-?[^{}\n]*(?:[$ (]\.(?:Values|Release|Chart|Capabilities)\b|\b(?:include|define|template)\s+[\"`])"
)
_HEAD = 4 * 1024**2


def looks_like(name: str, text: str) -> bool:
    """Whether this is a compose file or a Kubernetes manifest, by what its lines begin with, or a template of such."""
    text = text[:_HEAD]
    first = next(
        (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), ""
    )
    if _is_template(text) and (first.startswith("{{") or _KUBERNETES.search(text) is not None):
        return True
    if not _YAML_LINE.match(first):
        return False
    if overlays.is_kustomization(name):
        return True
    inner = _COMPOSE_INNER.search(text) or _COMPOSE_FLOW.search(text)
    compose = _COMPOSE_TOP.search(text) is not None and inner is not None
    return compose or (_KUBERNETES.search(text) is not None and _KIND.search(text) is not None) or _json(text)


def _is_template(text: str) -> bool:
    return _TEMPLATE.search(text) is not None


def _json(text: str) -> bool:
    """As `kubectl get -o json` or `docker compose config --format json` print it, in one line or many."""
    if not text.lstrip().startswith("{"):
        return False
    resource = '"apiVersion"' in text and '"kind"' in text and ('"spec"' in text or '"items"' in text)
    return resource or (re.search(r'"services"\s*:\s*\{', text) is not None and '"image"' in text)


def read(source: str, text: str) -> Reading:
    """A sheet for each container that starts an engine, a proxy for each router and each Ingress that says how it waits."""
    reading = Reading()
    if _is_template(text[:_HEAD]):
        return reading.failed(
            source,
            "is a template of a chart; render it first: helm template NAME CHART > rendered.yaml",
            damaged=True,
        )
    try:
        found = documents(text)
    except NotYaml as error:
        return reading.failed(source, str(error), damaged=True)
    files = beside(source)
    for why in filter(None, (overlays.changed_by_kustomize(source, one) for one in found)):
        reading.failed(source, why, damaged=True)
    resources = [resource for document in found for resource in _resources(document)]
    for document in found:
        if (
            isinstance(document, dict)
            and isinstance(document.get("services"), dict)
            and "kind" not in document
        ):
            _compose(reading, source, document, files)
    if resources:
        _kubernetes(reading, source, resources, files)
    if not (reading.sheets or reading.proxies or reading.unread):
        reading.failed(source, "starts no engine or router that is known here")
    return reading


def _resources(document: Node) -> Iterator[dict[str, Node]]:
    """The Kubernetes objects of a document; a List holds several."""
    for one in sequence(document) or [document]:
        inner = mapping(one)
        if text_of(inner.get("kind")).endswith("List") and "items" in inner:
            yield from (mapping(item) for item in sequence(inner["items"]))
        elif "kind" in inner and "apiVersion" in inner:
            yield inner


# ------------------------------------------------------------------------------------ compose

_INTERPOLATED = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<name>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)(?P<rest>[^{}]*)\}|(?P<odd>\{))"
)


@dataclass
class _Variables:
    """What a container is given. `missing`: what is not read of it; `complete`: whether the names of all variables are known."""

    values: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    complete: bool = True

    def lacks(self, what: str) -> None:
        """A set of variables that is not read."""
        self.missing.append(what)
        self.complete = False


@dataclass(frozen=True)
class _Outer:
    """What .env says, for all services of a file."""

    values: Mapping[str, str]
    filler: Filler = field(default_factory=Filler)


def _compose(reading: Reading, source: str, document: Mapping[str, Node], files: Files) -> None:
    outer = _Outer(_lines(files(".env") or ""))
    if document.get("include") is not None:
        reading.failed(source, "include: the files that it names are not read", part=True)
    try:
        other, changed = overlays.overridden(source, files)
    except NotYaml as error:
        reading.failed(source, str(error), damaged=True)
        return
    for name, one in mapping(document["services"]).items():
        service = mapping(one)
        place = f"{yaml_text.place(source, service)}, service {name}"
        if name in changed and overlays.of_an_engine(service, changed[name]):
            reading.failed(
                place,
                f"is changed by {other}, so this is not what will run; give what `docker compose config` prints",
                damaged=True,
            )
            continue
        if service.get("extends") is not None:
            reading.failed(place, "extends another service, which is not read", part=True)
        image = _interpolated(text_of(service.get("image")), outer)
        variables = _compose_variables(service, outer, files)
        entry = _compose_words(service.get("entrypoint"), outer)
        command = _compose_words(service.get("command"), outer)
        runs = flags.in_image(
            image,
            entry,
            command,
            variables.values,
            complete=variables.complete and service.get("extends") is None,
        )
        if runs:
            for missing in variables.missing:
                reading.failed(place, missing, part=True)
        if not runs:
            _hidden(reading, image, entry, command, place, name)
        _nodes(reading, runs, place, name, files)
        if runs and reading.sheets:
            _published(reading, service, place, outer)


def _compose_variables(service: Mapping[str, Node], outer: _Outer, files: Files) -> _Variables:
    found = _Variables()
    named = service.get("env_file")
    for one in sequence(named) or [named]:
        name = text_of(one) or text_of(mapping(one).get("path"))
        if not name:
            continue
        text = files(_interpolated(name, outer))
        if text is None:
            found.lacks(f"env_file {name} is not read: it is not here")
        else:
            found.values |= _lines(text)
    given = service.get("environment")
    pairs = [text_of(one).partition("=") for one in sequence(given)]
    entries = [(name, value if equals else None) for name, equals, value in pairs]
    entries += [
        (name, text_of(value) if value is not None else None) for name, value in mapping(given).items()
    ]
    for name, value in entries:
        if value is None and isinstance(given, dict) and not isinstance(given.get(name), str | None):
            continue
        found.values[name] = (
            _interpolated(value, outer)
            if value is not None
            else outer.filler.bounded(outer.values.get(name, UNKNOWN))
        )
    return found


def _lines(text: str) -> dict[str, str]:
    """NAME=VALUE lines of an environment file."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and re.fullmatch(r"[A-Za-z_][\w.]*", name.strip()) and not line.lstrip().startswith("#"):
            value = value.strip()
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
            value = value[1:-1] if quoted else re.split(r"\s+#", value)[0]
            found[name.strip()] = (
                value if "$" not in value or (quoted and line.rstrip()[-1] == "'") else UNKNOWN
            )
    return found


def _compose_words(node: Node, outer: _Outer) -> list[str]:
    if isinstance(node, list):
        return [_interpolated(text_of(one), outer) for one in node]
    # UNKNOWN must survive the splitting, which knows nothing of it
    return shell.words(_interpolated(text_of(node), outer), {})


def _interpolated(text: str, outer: _Outer) -> str:
    """${NAME} by what .env says. What the shell that runs compose might say is not known, so neither is a default."""

    def one(match: re.Match[str]) -> str:
        if match["escaped"]:
            return "$"
        value = outer.values.get(match["name"] or match["braced"] or "")
        rest = match["rest"] or ""
        if value is None or (rest and not rest.startswith((":-", "-", ":?", "?"))):
            return UNKNOWN
        if value == "" and rest.startswith(":"):
            return rest[2:] if rest[1] == "-" and "$" not in rest else UNKNOWN
        return value

    return outer.filler.fill(_INTERPOLATED, one, text)


def _published(reading: Reading, service: Mapping[str, Node], place: str, outer: _Outer) -> None:
    """The port at which the host answers for the container, which is what a URL would name."""
    sheet = reading.sheets[-1]
    if sheet.sources != [place]:
        return
    port = sheet.address[1] if sheet.address is not None else None
    if text_of(service.get("network_mode")) == "host":
        return
    sheet.address = None
    if service.get("network_mode") is None:
        sheet.loopback = place
    for one in sequence(service.get("ports")):
        entry = mapping(one)
        outside, _, inside = _interpolated(text_of(one), outer).partition("/")[0].rpartition(":")
        if entry:
            outside = f"{text_of(entry.get('host_ip'))}:{text_of(entry.get('published'))}"
            inside = text_of(entry.get("target"))
        host, _, number = outside.rpartition(":")
        if inside == str(port) and re.fullmatch(r"[0-9]{1,5}", number):
            sheet.address = (host.strip("[]") or "0.0.0.0", int(number))
            return


# ------------------------------------------------------------------------------------ Kubernetes

_ADDRESSES = ("status.podIP", "status.hostIP")
_SUBSTITUTED = re.compile(r"\$(?:\$|\(([A-Za-z_][\w.-]*)\))")


@dataclass(frozen=True)
class _Around:
    """What a file's pods have in common: its ConfigMaps by name."""

    maps: Mapping[str, Mapping[str, Node]]
    filler: Filler


@dataclass(frozen=True)
class _Pod:
    """A pod or what pods are made from. `path`: where in its object it stands."""

    resource: str
    path: tuple[str, ...]
    spec: Mapping[str, Node]

    @property
    def ends(self) -> bool:
        """Whether it does its work and is done: it downloads a model, or measures."""
        return self.resource.startswith(("Job/", "CronJob/"))


def _kubernetes(reading: Reading, source: str, resources: Sequence[Mapping[str, Node]], files: Files) -> None:
    maps = {
        _name(resource): mapping(resource.get("data"))
        for resource in resources
        if resource.get("kind") == "ConfigMap"
    }
    filler = Filler()
    for resource in resources:
        kind, name = text_of(resource.get("kind")), _name(resource)
        pods = _serving(kind, list(_pods(resource, f"{kind}/{name}", ())))
        shared = _shared(pods) if len(pods) > 1 else 0
        for pod in pods:
            # the step that tells it from the others: `leaderTemplate`, `prefill`
            step = pod.path[shared : shared + 1] if len(pods) > 1 else ()
            label = "/".join((name, *(one.removesuffix("Template") for one in step)))
            _pod(reading, source, pod, label, _Around(maps, filler), files)
        if kind == "Ingress":
            _ingress(reading, source, resource)


def _serving(kind: str, pods: list[_Pod]) -> list[_Pod]:
    """Those that answer requests: the workers of a LeaderWorkerSet only compute for its leader. Without a template of its own the leader has theirs."""
    if kind != "LeaderWorkerSet" or not any("leaderTemplate" in pod.path for pod in pods):
        return pods
    return [pod for pod in pods if "workerTemplate" not in pod.path]


def _name(resource: Mapping[str, Node]) -> str:
    metadata = mapping(resource.get("metadata"))
    return text_of(metadata.get("name")) or f"{text_of(metadata.get('generateName'))}*"


def _pods(node: object, resource: str, path: tuple[str, ...]) -> Iterator[_Pod]:
    """Every mapping that has containers, wherever a kind of object puts it."""
    if isinstance(node, dict):
        containers = node.get("containers")
        if isinstance(containers, list) and any("image" in mapping(one) for one in containers):
            yield _Pod(resource, path, node)
            return
        for key, inner in node.items():
            yield from _pods(inner, resource, (*path, key))
    elif isinstance(node, list):
        for number, inner in enumerate(node):
            yield from _pods(inner, resource, (*path, text_of(mapping(inner).get("name")) or str(number)))


def _shared(pods: Sequence[_Pod]) -> int:
    """How many steps all paths have in common."""
    first, last = min(pod.path for pod in pods), max(pod.path for pod in pods)
    return next(
        (at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last))
    )


def _pod(
    reading: Reading,
    source: str,
    pod: _Pod,
    label: str,
    around: _Around,
    files: Files,
) -> None:
    started: list[tuple[dict[str, Node], list[flags.Run], _Variables]] = []
    for one in sequence(pod.spec.get("containers")):
        container = mapping(one)
        variables = _container_variables(container, around)
        known = variables.values
        entry = [
            _substituted(text_of(word), known, around.filler) for word in sequence(container.get("command"))
        ]
        arguments = [
            _substituted(text_of(word), known, around.filler) for word in sequence(container.get("args"))
        ]
        image = text_of(container.get("image"))
        runs = flags.in_image(image, entry, arguments, known, complete=variables.complete)
        if runs:
            started.append((container, runs, variables))
        elif not pod.ends:
            _hidden(reading, image, entry, arguments, _container(source, pod, container), label)
    for container, runs, variables in started:
        place, name = _container(source, pod, container), text_of(container.get("name"))
        for missing in variables.missing:
            reading.failed(place, missing, part=True)
        before = len(reading.sheets)
        _nodes(reading, runs, place, label if len(started) == 1 else f"{label}/{name}", files)
        for sheet in reading.sheets[before:]:
            sheet.address = None  # the pod's own, which nobody outside can name
            if text_of(pod.spec.get("hostNetwork")) in ("", "false"):
                sheet.loopback = f"{source}, {pod.resource}, {'/'.join(pod.path)}"


def _container(source: str, pod: _Pod, container: Mapping[str, Node]) -> str:
    """Where it stands."""
    return f"{yaml_text.place(source, container)}, {pod.resource}, container {text_of(container.get('name'))}"


def _container_variables(container: Mapping[str, Node], around: _Around) -> _Variables:
    found, maps = _Variables(), around.maps
    for one in sequence(container.get("envFrom")):
        named = text_of(under(one, "configMapRef", "name"))
        prefix = text_of(mapping(one).get("prefix"))
        if named in maps:
            found.values |= {prefix + key: text_of(value) for key, value in maps[named].items()}
        else:
            what = (
                f"the ConfigMap {named}"
                if named
                else f"the Secret {text_of(under(one, 'secretRef', 'name'))}"
            )
            found.lacks(f"envFrom {what} is not read: it is not in this file")
    for one in sequence(container.get("env")):
        entry = mapping(one)
        name = text_of(entry.get("name"))
        if not name:
            continue
        if entry.get("valueFrom") is None:
            found.values[name] = _substituted(text_of(entry.get("value")), found.values, around.filler)
            continue
        reference = mapping(under(entry, "valueFrom", "configMapKeyRef"))
        value = maps.get(text_of(reference.get("name")), {}).get(text_of(reference.get("key")))
        if (field_ := text_of(under(entry, "valueFrom", "fieldRef", "fieldPath"))) in _ADDRESSES:
            value = field_  # not known, but one address of the pod, and no loopback
        secret = mapping(under(entry, "valueFrom", "secretKeyRef"))
        given = secret and text_of(secret.get("optional")) != "true"
        found.values[name] = value if isinstance(value, str) else SECRET if given else UNKNOWN
        if not isinstance(value, str):
            kind = next(iter(mapping(entry["valueFrom"])), "elsewhere")
            found.missing.append(f"the variable {name} comes from {kind} and is not read")
    return found


def _substituted(text: str, variables: Mapping[str, str], filler: Filler) -> str:
    """$(NAME) by the container's variables; `$$` is a `$`; a name that is not there stays as it is."""

    def one(match: re.Match[str]) -> str:
        if match[1] is None:
            return "$"
        return variables.get(match[1], match[0])

    return filler.fill(_SUBSTITUTED, one, text)


_INGRESS = "nginx.ingress.kubernetes.io/"
_INGRESS_F5 = "nginx.org/"
_SNIPPETS = (
    f"{_INGRESS}server-snippet", f"{_INGRESS}configuration-snippet", f"{_INGRESS_F5}server-snippets", f"{_INGRESS_F5}location-snippets",
)  # fmt: skip


def _ingress(reading: Reading, source: str, resource: Mapping[str, Node]) -> None:
    """What its annotations say. The controller's own configuration may set the rest, so that is not known."""
    notes = {
        key: text_of(value) for key, value in mapping(under(resource, "metadata", "annotations")).items()
    }
    if not any(key.startswith((_INGRESS, _INGRESS_F5)) for key in notes) and "nginx" not in (
        text_of(under(resource, "spec", "ingressClassName")) + notes.get("kubernetes.io/ingress.class", "")
    ):
        return
    place = f"{yaml_text.place(source, resource)}, Ingress/{_name(resource)}"
    proxy = Proxy(name=f"Ingress {_name(resource)}", kind="nginx", where=place, routes=_hosts(resource))
    settings = nginx_settings("\n".join(notes.get(name, "") for name in _SNIPPETS))
    timeout = (
        notes.get(f"{_INGRESS}proxy-read-timeout")
        or notes.get(f"{_INGRESS_F5}proxy-read-timeout")
        or settings.get("proxy_read_timeout", [""])[0]
    )
    if timeout:
        proxy.read_timeout = seconds_of_nginx(timeout)
        if proxy.read_timeout is None:
            reading.failed(place, f"proxy-read-timeout is {timeout[:60]!r}, which is no time", part=True)
    again = notes.get(f"{_INGRESS}proxy-next-upstream", "").split() or settings.get("proxy_next_upstream")
    tries = (
        notes.get(f"{_INGRESS}proxy-next-upstream-tries")
        or settings.get("proxy_next_upstream_tries", [""])[0]
    )
    if tries == "1" or (again is not None and "off" in again):
        proxy.retries_post = False
    elif again is not None and retries_of_nginx(again):
        proxy.retries_post = True  # without non_idempotent the controller's retry-non-idempotent decides
    if (target := notes.get(f"{_INGRESS}mirror-target")) or "mirror" in settings:
        whole = notes.get(f"{_INGRESS}mirror-request-body", *settings.get("mirror_request_body", ("on",))[:1])
        proxy.copies = copies_of_nginx([target] if target else settings["mirror"], whole != "off")
    if "proxy_ignore_client_abort" in settings:
        proxy.closes_upstream = settings["proxy_ignore_client_abort"] != ["on"]
    reading.proxies.append(proxy)


def _hosts(resource: Mapping[str, Node]) -> str:
    found: list[str] = []
    for rule in sequence(under(resource, "spec", "rules")):
        host = text_of(mapping(rule).get("host")) or "*"
        for path in sequence(under(rule, "http", "paths")):
            service = text_of(under(path, "backend", "service", "name"))
            found.append(f"{host}{text_of(mapping(path).get('path'))} -> {service}")
    return ", ".join(found)


# ------------------------------------------------------------------------------------ both


def _hidden(
    reading: Reading, image: str, entry: Sequence[str], command: Sequence[str], place: str, name: str
) -> None:
    """A node of which only the engine is known, where a script or the image starts it."""
    found = hidden.started(flags.repository(image), entry, command)
    if found is None:
        return
    engine, script = found
    sheet = Sheet(name=name, sources=[place])
    sheet.add(facts.ENGINE, engine, f"{place}, image")
    reading.sheets.append(sheet)
    reading.failed(
        place,
        f"{script} starts it, which is not read, so that only its engine is known: give its URL, or its log from its start on",
        part=True,
    )


def _nodes(reading: Reading, runs: Sequence[flags.Run], place: str, name: str, files: Files) -> None:
    for number, run in enumerate(runs, 1):
        many = len(runs) > 1
        flags.read_run(
            reading,
            run,
            f"{place}, command {number}" if many else place,
            f"{name} {number}" if many else name,
            files,
        )


__all__ = ["looks_like", "read"]
