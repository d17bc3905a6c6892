"""The command line of a node or router, and its environment, as facts.

The one thing to know: only what is said becomes a fact. A value that a shell would have to work out (`$PORT`, `$(nproc)`) is left out, and so is
the default of its option. Defaults are added where the version is known (from the image's tag), that version's source was read for them, and
nothing on the command line could say otherwise.
"""

from __future__ import annotations

import json
import posixpath
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hermetic.check import facts
from hermetic.check.deployment import ALONE, BOTH, DECODE, PREFILL, Proxy
from hermetic.check.facts import Fact, Sheet
from hermetic.check.readers import defaults, hermetic_engine, prose, values
from hermetic.check.readers.beside import Files, beside, nowhere
from hermetic.check.readers.misspelt import misspelt
from hermetic.check.readers.reading import Reading
from hermetic.check.readers.shell import SECRET, UNKNOWN, commands
from hermetic.check.readers.yaml_text import NotYaml, documents, mapping

T = TypeVar("T")

MOST = 1024**2  # characters of a script
DEEPEST = 8  # shells within shells
MOST_SCRIPTS = 500  # shells in shells, one beside the other
FARTHEST = 200  # words in which a wrapper's command begins

SGLANG, VLLM, HERMETIC = "sglang", "vllm", "hermetic"
SGLANG_ROUTER, VLLM_ROUTER = "sglang-router", "vllm-router"
_ENGINES = (SGLANG, VLLM, HERMETIC)


@dataclass(frozen=True)
class Run:
    """A command that starts an engine or a router. `words`: its options; `complete`: nothing else is in its environment."""

    kind: str
    what: str  # Hermetic: serve, prefill, decode or gateway; else the way it is started
    words: tuple[str, ...]
    environment: Mapping[str, str]
    image: str = ""
    complete: bool = False


def looks_like(name: str, text: str) -> bool:
    """Whether a text is a command line or script that starts an engine. A log that quotes one is none; of prose only its commands are read."""
    text = prose.commands_of(name, text)
    if len(text) > MOST or any(_LOGGED.match(line) for line in text[:20_000].splitlines()):
        return False
    return bool(runs_of(text, {}))


def read(source: str, command: str | Sequence[str], environment: Mapping[str, str] | None = None) -> Reading:
    """What a command line or script says: a sheet for each node that it starts, a proxy for each router."""
    reading = Reading()
    if isinstance(command, str):
        command = prose.commands_of(source, command)
    if isinstance(command, str) and len(command) > MOST:
        return reading.failed(source, f"has more than {MOST:,} characters, so it is no script")
    found = runs_of(command, environment or {})
    if not found:
        return reading.failed(source, "starts no engine or router that is known here")
    for number, run in enumerate(found, 1):
        place = source if len(found) == 1 else f"{source}, command {number}"
        read_run(reading, run, place, name="", files=beside(source))
    return reading


def runs_of(
    command: str | Sequence[str], environment: Mapping[str, str], image: str = "", complete: bool = False
) -> list[Run]:
    """What a command starts, behind all that stands before it. A text is read as a shell would read it, words are taken as
    they are. `image`: what it runs in."""
    if isinstance(command, str):
        return _in_script(command, environment, image, complete, _Depth())
    return _in_words(tuple(command), environment, image, complete, _Depth())


def read_run(reading: Reading, run: Run, place: str, name: str, files: Files = nowhere) -> Sheet | None:
    """Add what one command says. `place`: the source and where in it; the sheet if it is a node."""
    if run.kind not in _ENGINES:
        _router(reading, run, place, name, prefix="")
        return None
    sheet = Sheet(name=name, sources=[place], read={facts.COMMAND})
    sheet.read |= {facts.ENVIRONMENT} if run.complete else set()
    sheet.add(facts.ENGINE, run.kind, place)
    version = image_version(run.image)
    if version is not None and version[0] == run.kind:
        sheet.add(facts.VERSION, version[1], f"{place}, image tag")
    if UNKNOWN not in run.image and ("@sha256:" in run.image or _TAG.fullmatch(_tag(run.image))):
        sheet.add(facts.IMAGE, run.image, f"{place}, image")
    given = _given(run, files, reading, place)
    if (why := _only_computes(given)) is not None:
        reading.failed(
            place,
            f"{why}, so it answers no requests and is no node of its own: give the command of the one that does",
            part=True,
        )
        return None
    known = version[1] if version is not None and version[0] == run.kind else ""
    _options(sheet, run, given, known, reading, place)
    _environment(sheet, run.kind, run.environment, reading, place)
    if run.complete:
        _unset(sheet, run, known)
    if run.kind == SGLANG:
        _halves(sheet, given, known, place)
    if run.kind == VLLM:
        _vllm(sheet, run, given, known, reading, place)
    if run.kind == HERMETIC:
        _hermetic(sheet, run, given, files, reading, place)
    _address(sheet, given)
    if run.what == "with a router":
        _router(reading, run, place, name, prefix="router-")
    reading.sheets.append(sheet)
    return sheet


def _only_computes(given: _Given) -> str | None:
    """Whether it computes for another process of the same server, and by which option that is known."""
    rank = given.values.get("node-rank")
    if isinstance(rank, str) and re.fullmatch(r"0*[1-9][0-9]{0,5}", rank):
        return f"has --node-rank {rank}"
    return "has --headless" if given.values.get("headless") is True else None


def read_environment(reading: Reading, environment: Mapping[str, str], place: str, name: str) -> Sheet | None:
    """A node of which only variables are known, such as a drop-in of a unit. None if they say nothing of an engine."""
    for kind, known in _VARIABLES.items():
        if known.keys() & environment.keys():
            sheet = Sheet(name=name, sources=[place])
            sheet.add(facts.ENGINE, kind, place)
            _environment(sheet, kind, environment, reading, place)
            reading.sheets.append(sheet)
            return sheet
    return None


# ------------------------------------------------------------------------------------ finding the command

_LOGGED = re.compile(
    r"\s*(?:\([^()]* pid=\d+\) )?\[?(?:\d{4}-\d\d-\d\d[ T]|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|TRACE)\b[ :\]])"
)
_PYTHON = re.compile(r"(?:python|pypy)[\d.]*")
_SHELLS = ("sh", "bash", "dash", "zsh", "ash", "ksh")
_CONTAINERS = ("docker", "podman", "nerdctl")
_WRAPPERS = (
    "exec", "nohup", "nice", "ionice", "chrt", "numactl", "taskset", "time", "timeout", "stdbuf", "sudo", "setsid", "tini", "dumb-init",
    "catchsegv", "torchrun", "accelerate", "mpirun", "mpiexec", "srun", "poetry", "uv", "conda", "mamba", "micromamba", "pixi", "command",
    "gosu", "su-exec", "chpst", "nsys", "ncu", "hpcrun", "systemd-run", "jemalloc.sh", "s6-setuidgid", "with-contenv", "env", "ray",
    "nvidia_entrypoint.sh", "entrypoint.sh", "docker-entrypoint.sh",
)  # fmt: skip
_MODULES = {
    "sglang.launch_server": (SGLANG, "module"),
    "sglang.srt.entrypoints.http_server": (SGLANG, "module"),
    "vllm.entrypoints.openai.api_server": (VLLM, "module"),
    "sglang_router.launch_router": (SGLANG_ROUTER, "router"),
    "sglang_router.launch_server": (SGLANG, "with a router"),
    "sglang.srt.disaggregation.mini_lb": (SGLANG_ROUTER, "router"),
    "sglang.srt.disaggregation.launch_lb": (SGLANG_ROUTER, "router"),
    "vllm_router.launch_router": (VLLM_ROUTER, "router"),
}
_MODULES_WITH_COMMAND = {
    "sglang.cli.main": SGLANG, "vllm.entrypoints.cli.main": VLLM, "sglang_router": SGLANG_ROUTER, "hermetic": HERMETIC,
}  # fmt: skip
_PROGRAMS = {
    "sglang": SGLANG, "vllm": VLLM, "hermetic": HERMETIC, "smg": SGLANG_ROUTER, "sgl-router": SGLANG_ROUTER,
    "sglang-router": SGLANG_ROUTER, "sgl-model-gateway": SGLANG_ROUTER, "vllm-router": VLLM_ROUTER,
}  # fmt: skip
_COMMANDS = {
    SGLANG: ("serve",), VLLM: ("serve",), HERMETIC: ("serve", "prefill", "decode", "gateway"),
    SGLANG_ROUTER: ("launch",), VLLM_ROUTER: (),
}  # fmt: skip
_PYTHON_TAKES = ("-X", "-W")
_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass
class _Depth:
    """How deep in shells and containers something stands. `left`: how many may still be looked into."""

    deep: int = 0
    left: list[int] = field(default_factory=lambda: [MOST_SCRIPTS])

    def inside(self) -> _Depth | None:
        """One deeper; None where it gets too deep or too much."""
        self.left[0] -= 1
        return _Depth(self.deep + 1, self.left) if self.deep < DEEPEST and self.left[0] >= 0 else None


def _in_script(
    text: str, environment: Mapping[str, str], image: str, complete: bool, depth: _Depth
) -> list[Run]:
    return [
        run
        for command in commands(text, environment)
        for run in _in_words(command.words, command.environment, image, complete, depth)
    ]


def _in_words(
    words: tuple[str, ...], environment: Mapping[str, str], image: str, complete: bool, depth: _Depth
) -> list[Run]:
    """What these words start: an engine, or what a wrapper, a shell or a container starts in turn."""
    for _ in range(FARTHEST):
        if not words:
            break
        if (found := _started(words)) is not None:
            kind, what, rest = found
            return [Run(kind, what, rest, environment, image, complete)]
        program = _base(words[0])
        if program in _SHELLS:
            script, inside = _script(words), depth.inside()
            if script is None or inside is None:
                break
            return _in_script(script, environment, image, complete, inside)
        if program in _CONTAINERS:
            inside = depth.inside()
            return _in_container(words, inside) if inside is not None else []
        if program == "env":
            words, environment = _env(words[1:], environment)
        elif program in _WRAPPERS:
            far = min(len(words), FARTHEST)
            at = next((at for at in range(1, far) if _starts(words[at : at + 32])), len(words))
            words = words[at:]
        else:
            break
    return []


def _base(word: str) -> str:
    return posixpath.basename(word)


def _starts(words: tuple[str, ...]) -> bool:
    """Whether a wrapper's command may begin here."""
    return (
        _started(words) is not None
        or _base(words[0]) in (*_SHELLS, *_CONTAINERS, *_WRAPPERS)
        or (
            words[0] == "-m"
            and len(words) > 1
            and (words[1] in _MODULES or words[1] in _MODULES_WITH_COMMAND)
        )
    )


def _started(words: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]] | None:
    """(kind, how, its own words) if the first words start an engine or a router."""
    program = _base(words[0])
    if _PYTHON.fullmatch(program):
        return _by_python(words[1:])
    if words[0] == "-m":
        return _by_module(words[1:])
    kind = _PROGRAMS.get(program)
    return _with_command(kind, words[1:]) if kind is not None else None


def _by_python(words: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]] | None:
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        at += 2 if words[at] in _PYTHON_TAKES else 1
    if at >= len(words):
        return None
    if words[at] == "-m":
        return _by_module(words[at + 1 :])
    path = words[at].removesuffix(".py").replace("/", ".")
    for module, (kind, what) in _MODULES.items():
        if words[at].endswith(".py") and (path == module or path.endswith("." + module)):
            return kind, what, words[at + 1 :]
    kind_of = _PROGRAMS.get(_base(words[at]))  # `python /usr/local/bin/vllm serve`
    return _with_command(kind_of, words[at + 1 :]) if kind_of is not None else None


def _by_module(words: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]] | None:
    if not words:
        return None
    if words[0] in _MODULES:
        return *_MODULES[words[0]], words[1:]
    kind = _MODULES_WITH_COMMAND.get(words[0])
    return _with_command(kind, words[1:]) if kind is not None else None


def _with_command(kind: str, words: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]] | None:
    """A program that does several things, told by its first word; a router may do without."""
    if words and words[0] in _COMMANDS[kind]:
        return kind, words[0], words[1:]
    if kind in (SGLANG_ROUTER, VLLM_ROUTER) and words and words[0].startswith("-"):
        return kind, "router", words
    return None


def _script(words: tuple[str, ...]) -> str | None:
    """What stands behind a shell's -c."""
    for at in range(1, len(words) - 1):
        if not words[at].startswith("-"):
            return None
        if re.fullmatch(r"-[a-z]*c", words[at]):
            return words[at + 1]
    return None


def _env(words: tuple[str, ...], environment: Mapping[str, str]) -> tuple[tuple[str, ...], Mapping[str, str]]:
    """What `env` runs, and with which variables."""
    changed = dict(environment)
    at = 0
    while at < len(words):
        if found := _ASSIGNMENT.fullmatch(words[at]):
            changed[found[1]] = found[2]
        elif words[at] in ("-u", "--unset", "-C", "--chdir"):
            if words[at] in ("-u", "--unset") and at + 1 < len(words):
                changed.pop(words[at + 1], None)
            at += 1
        elif words[at] in ("-i", "-", "--ignore-environment"):
            changed.clear()
        elif not words[at].startswith("-"):
            break
        at += 1
    return words[at:], changed


_ALONE = frozenset({
    "--detach", "--interactive", "--tty", "--rm", "--init", "--privileged", "--read-only", "--publish-all", "--no-healthcheck",
    "--oom-kill-disable", "--sig-proxy", "--disable-content-trust", "--quiet", "--replace", "--no-hosts",
})  # fmt: skip
_ALONE_LETTERS = frozenset("ditPqr")


def _in_container(words: tuple[str, ...], depth: _Depth) -> list[Run]:
    """`docker run [options] IMAGE [command]`: the container has the variables that it is given, and no others."""
    if "run" not in words:
        return []
    at = words.index("run") + 1
    variables: dict[str, str] = {}
    entry: tuple[str, ...] = ()
    complete = True
    while at < len(words) and words[at].startswith("-"):
        word, at = words[at], at + 1
        option, equals, value = word.partition("=")
        if not word.startswith("--"):
            if set(word[1:]) <= _ALONE_LETTERS:
                continue
            option, value, equals = word[:2], word[2:].removeprefix("="), "=" if len(word) > 2 else ""
        elif option in _ALONE:
            continue
        if not equals:
            if at >= len(words):
                return []
            value, at = words[at], at + 1
        if option in ("-e", "--env"):
            found = _ASSIGNMENT.fullmatch(value)
            variables[found[1] if found else value] = found[2] if found else UNKNOWN
        elif option == "--env-file":
            complete = False
        elif option == "--entrypoint":
            entry = (value,)
    if at >= len(words):
        return []
    return in_image(words[at], entry, words[at + 1 :], variables, complete, depth)


def in_image(
    image: str,
    entry: Sequence[str],
    command: Sequence[str],
    environment: Mapping[str, str],
    complete: bool,
    depth: _Depth | None = None,
) -> list[Run]:
    """What a container starts. Without an entry point of its own, images that are known to start the engine by themselves do."""
    as_it_came = (
        "" if _INSTALLS.search(" ".join((*entry, *command))) else image
    )  # its tag tells nothing any more
    found = _in_words((*entry, *command), environment, as_it_came, complete, depth or _Depth())
    if found or entry:
        return found
    return [
        Run(kind, what, tuple(command), environment, image, complete)
        for pattern, kind, what in _START_BY_THEMSELVES
        if pattern.search(repository(image))
    ]


# ------------------------------------------------------------------------------------ images

_OFFICIAL = (
    (re.compile(r"(?:^|/)lmsysorg/sglang(?:-[a-z]+)?$"), SGLANG),
    (re.compile(r"(?:^|/)vllm/vllm-openai(?:-[a-z]+)?$"), VLLM),
    (re.compile(r"(?:^|/)lmsysorg/sgl-model-gateway$"), SGLANG_ROUTER),
)
_START_BY_THEMSELVES = (  # by their entry point: docker/Dockerfile of vLLM, docker/gateway.Dockerfile of SGLang
    (re.compile(r"(?:^|/)vllm-openai(?:-[a-z]+)?$"), VLLM, "serve"),
    (re.compile(r"(?:^|/)sgl-model-gateway$"), SGLANG_ROUTER, "router"),
)
_INSTALLS = re.compile(r"\b(?:pip[\d.]*|uv|conda|mamba)\s+(?:\S+\s+)?(?:install|sync|add)\b")
_TAG = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:\.?(?:post|rc|a|b|dev)\d+)*)(?:[-_].*)?", re.DOTALL)


def image_version(image: str) -> tuple[str, str] | None:
    """(engine, version) by the tag of an image that the engine's makers publish, also from a mirror. Tags like `latest` say nothing."""
    name, tag = repository(image), _tag(image)
    version = _TAG.fullmatch(tag)
    for pattern, kind in _OFFICIAL:
        if version is not None and pattern.search(name):
            return kind, version[1]
    return None


def repository(image: str) -> str:
    """An image's name without its tag and digest."""
    image = image.partition("@")[0]
    path, colon, tag = image.rpartition(":")
    return path if colon and "/" not in tag else image


def _tag(image: str) -> str:
    image = image.partition("@")[0]
    _, colon, tag = image.rpartition(":")
    return tag if colon and "/" not in tag else ""


# ------------------------------------------------------------------------------------ options


@dataclass
class _Given:
    """Options as they stand there. `unclear`: given, but with a value that is not known; `open`: there may be others."""

    values: dict[str, str | bool] = field(default_factory=dict)
    unclear: set[str] = field(default_factory=set)
    nested: dict[str, Any] = field(default_factory=dict)  # of --kv-transfer-config.NAME
    open: bool = False
    positional: str = ""

    def unsaid(self, option: str) -> bool:
        return option not in self.values and option not in self.unclear and not self.open


@dataclass(frozen=True)
class _Option:
    """`takes`: whether a value follows."""

    name: str
    takes: bool = True


def _table(takes: str, alone: str = "", also: Mapping[str, str] | None = None) -> dict[str, _Option]:
    table = {name: _Option(name) for name in takes.split()}
    table |= {name: _Option(name, False) for name in alone.split()}
    return table | {other: table[name] for other, name in (also or {}).items()}


# One value follows them (server_args.py of SGLang 0.5.23, arg_utils.py of vLLM 0.32), and a variable often holds it: it is no option itself.
_WITH_VALUE_SGLANG = (
    "dist-init-addr nnodes dp-size ep-size max-running-requests chunked-prefill-size max-prefill-tokens quantization dtype load-format download-dir "
    "tokenizer-path chat-template tool-call-parser reasoning-parser log-level random-seed attention-backend watchdog-timeout disaggregation-ib-device "
    "speculative-algorithm speculative-draft-model-path base-gpu-id"
)
_WITH_VALUE_VLLM = (
    "nnodes master-addr master-port data-parallel-size data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-rank "
    "data-parallel-start-rank max-num-seqs max-num-batched-tokens quantization dtype load-format download-dir tokenizer seed speculative-config "
    "compilation-config distributed-executor-backend"
)

_OPTIONS: dict[str, dict[str, _Option]] = {
    SGLANG: _table(
        "model-path revision served-model-name context-length max-total-tokens page-size mem-fraction-static num-reserved-decode-tokens "
        "kv-cache-dtype tp-size pp-size disaggregation-mode disaggregation-transfer-backend disaggregation-bootstrap-port kv-canary "
        f"api-key admin-api-key host port config node-rank {_WITH_VALUE_SGLANG}",
        "allow-auto-truncate disaggregation-enable-kv-checksum trust-remote-code enable-metrics "
        "disaggregation-decode-enable-radix-cache enable-hierarchical-cache",
        {
            "enable-hicache": "enable-hierarchical-cache", "model": "model-path", "tp": "tp-size", "tensor-parallel-size": "tp-size", "pp": "pp-size",
            "pipeline-parallel-size": "pp-size", "nccl-init-addr": "dist-init-addr", "dp": "dp-size", "data-parallel-size": "dp-size", "ep": "ep-size",
            "expert-parallel-size": "ep-size",
        },
    ),
    VLLM: _table(
        "model revision served-model-name max-model-len block-size gpu-memory-utilization kv-cache-dtype tensor-parallel-size "
        f"pipeline-parallel-size kv-transfer-config api-key host port config {_WITH_VALUE_VLLM}",
        "trust-remote-code no-trust-remote-code headless",
        {"-tp": "tensor-parallel-size", "-pp": "pipeline-parallel-size", "device-memory-utilization": "gpu-memory-utilization"},
    ),
    HERMETIC: _table("model mode host port context-length page-size verify api-keys served-name transport cluster name"),
}  # fmt: skip
_KEYS = ("api-key", "admin-api-key")
_ROUTER_OPTIONS = (
    "request-timeout-secs retry-max-retries host port prefill decode worker-urls",
    "disable-retries pd-disaggregation vllm-pd-disaggregation mini-lb enable-igw",
)


def _parse(words: Sequence[str], table: Mapping[str, _Option], reading: Reading, place: str) -> _Given:
    """Options as argparse takes them: the last one counts, a value follows or stands behind `=`, underscores are dashes."""
    given = _Given()
    at = 0
    if words and not words[0].startswith("-"):
        at = 1
        if UNKNOWN not in words[0]:
            given.positional = words[0]
    while at < len(words):
        word, at = words[at], at + 1
        name, equals, value = word.partition("=")
        if UNKNOWN in name:
            given.open = True
        if not name.startswith("-") or UNKNOWN in name:
            continue
        option = _option(name, table, given)
        if option is None:
            if name.startswith(("--kv-transfer-config.", "--kv_transfer_config.")):
                at += _nested(given, name, value if equals else "".join(words[at : at + 1])) and not equals
            continue
        if not option.takes:
            given.values[option.name] = True
            if equals:
                given.values.pop(option.name)
                given.unclear.add(option.name)
                reading.failed(place, f"{name} takes no value and has one", part=True)
            continue
        if not equals:
            if at >= len(words) or words[at].startswith("--"):
                reading.failed(place, f"{name} has no value", part=True)
                given.unclear.add(option.name)
                continue
            value, at = words[at], at + 1
        if UNKNOWN in value and not (SECRET in value and option.name in _KEYS):
            given.values.pop(option.name, None)
            given.unclear.add(option.name)
        else:
            given.values[option.name] = value
            given.unclear.discard(option.name)
    return given


def _option(name: str, table: Mapping[str, _Option], given: _Given) -> _Option | None:
    """The option of this name. argparse takes unique beginnings too: whatever such a one may mean is unclear."""
    plain = name.removeprefix("--").replace("_", "-") if name.startswith("--") else name
    if plain in table:
        return table[plain]
    if name.startswith("--") and len(plain) > 1:
        given.unclear |= {option.name for known, option in table.items() if known.startswith(plain)}
    return None


def _nested(given: _Given, name: str, value: str) -> bool:
    """`--kv-transfer-config.a.b VALUE` of vLLM: one value inside the JSON. Always true."""
    inner = given.nested
    *path, last = name.split(".")[1:]
    for key in path:
        below = inner.setdefault(key, {})
        inner = below if isinstance(below, dict) else {}
    inner[last] = UNKNOWN if UNKNOWN in value else _json(value, value)
    return True


def _json(text: str, otherwise: Any) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return otherwise


def _given(run: Run, files: Files, reading: Reading, place: str) -> _Given:
    """The options of an engine, those of a file behind --config before its own."""
    table = _OPTIONS[run.kind]
    given = _parse(run.words, table, reading, place)
    if "config" not in given.values and "config" not in given.unclear:
        return given
    name = given.values.get("config")
    text = files(name) if isinstance(name, str) else None
    if text is None:
        given.open = True
        named = f"--config {name}" if name else "the file behind --config"
        reading.failed(place, f"{named} is not read: it is not here", part=True)
        return given
    try:
        settings = mapping(next(iter(documents(text)), None))
    except NotYaml as error:
        given.open = True
        reading.failed(place, f"--config {name} {error}", part=True)
        return given
    words = [word for key, value in settings.items() for word in _as_words(key, value)]
    before = (run.words[0],) if given.positional else ()
    return _parse((*before, *words, *run.words[len(before) :]), table, reading, place)


def _as_words(key: str, value: object) -> list[str]:
    """An option of a configuration file as it would stand on the command line."""
    if value in ("true", "True", True):
        return [f"--{key}"]
    if value in ("false", "False", None):
        return []
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}"]


class _Odd(ValueError):
    """What is wrong with a value, in words that follow its option's name."""


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,15}", text.strip()):
        raise _Odd(f"is {_shown(text)}, which is no number of things")
    return int(text)


def _whole_or_any(text: str) -> int | None:
    """vLLM's 32k, 1M or auto."""
    if text.strip().lower() in ("-1", "auto"):
        return None
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([kKmMgGtT])", text.strip())
    if found is None:
        return _whole(text)
    if found[2].islower():
        return int(float(found[1]) * 1000 ** ("kmgt".index(found[2]) + 1))
    if "." in found[1]:
        raise _Odd(f"is {_shown(text)}, which vLLM refuses")
    return int(found[1]) * 1024 ** ("KMGT".index(found[2]) + 1)


def _number(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,15}(?:\.[0-9]{0,15})?|\.[0-9]{1,15}", text.strip()):
        raise _Odd(f"is {_shown(text)}, which is no number")
    return float(text)


def _text(text: str) -> str | None:
    return text or None


def _one_of(*allowed: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in allowed:
            raise _Odd(f"is {_shown(text)}; known are {', '.join(allowed)}")
        return text

    return convert


def _sglang_role(text: str) -> str:
    roles = {"null": ALONE, "prefill": PREFILL, "decode": DECODE}
    return roles[_one_of(*roles)(text)]


def _key(text: str) -> bool:
    """That there is a key; never which one."""
    return bool(text)


def _truth(text: str) -> bool:
    """As SGLang reads its variables. What it cannot read it takes for its default."""
    if text.lower() in ("true", "1", "yes", "y"):
        return True
    if text.lower() in ("false", "0", "no", "n"):
        return False
    raise _Odd(f"is {_shown(text)}, which is neither true nor false, so the engine uses its default")


def _digit(text: str) -> bool:
    """As vLLM reads its switches."""
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise _Odd(f"is {_shown(text)}, which vLLM does not start with")
    return int(text) != 0


def _shown(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


_Values = dict[str, tuple[Fact[Any], Callable[[str], Any]]]

_FACTS: dict[str, _Values] = {
    SGLANG: {
        "model-path": (facts.MODEL, _text),
        "revision": (facts.REVISION, _text),
        "served-model-name": (facts.SERVED, _text),
        "context-length": (facts.CONTEXT, _whole),
        "max-total-tokens": (facts.POOL_LIMIT, _whole),
        "page-size": (facts.PAGE, _whole),
        "mem-fraction-static": (facts.MEMORY_FRACTION, _number),
        "num-reserved-decode-tokens": (facts.RESERVE, _whole),
        "kv-cache-dtype": (facts.KV_DTYPE, values.kv_dtype),
        "tp-size": (facts.TP, _whole),
        "pp-size": (facts.PP, _whole),
        "disaggregation-mode": (facts.ROLE, _sglang_role),
        "disaggregation-bootstrap-port": (facts.INNER_PORT, _whole),
        "kv-canary": (facts.CANARY, _one_of("none", "log", "raise")),
        "api-key": (facts.API_KEY, _key),
        "admin-api-key": (facts.ADMIN_KEY, _key),
        "host": (facts.HOST, _text),
    },
    VLLM: {
        "model": (facts.MODEL, _text),
        "revision": (facts.REVISION, _text),
        "served-model-name": (facts.SERVED, _text),
        "max-model-len": (facts.CONTEXT, _whole_or_any),
        "block-size": (facts.PAGE, _whole),
        "gpu-memory-utilization": (facts.MEMORY_FRACTION, _number),
        "kv-cache-dtype": (facts.KV_DTYPE, values.kv_dtype),
        "tensor-parallel-size": (facts.TP, _whole),
        "pipeline-parallel-size": (facts.PP, _whole),
        "api-key": (facts.API_KEY, _key),
        "host": (facts.HOST, _text),
    },
    HERMETIC: {
        "model": (facts.MODEL, _text),
        "served-name": (facts.SERVED, _text),
        "context-length": (facts.CONTEXT, _whole),
        "page-size": (facts.PAGE, _whole),
        "verify": (facts.VERIFY, _one_of("tags", "landing", "read")),
        "transport": (facts.TRANSPORT, _text),
        "host": (facts.HOST, _text),
    },
}
_SWITCHES: dict[str, dict[str, tuple[Fact[bool], bool]]] = {
    SGLANG: {
        "allow-auto-truncate": (facts.TRUNCATES, True),
        "disaggregation-enable-kv-checksum": (facts.CHECKSUM, True),
        "trust-remote-code": (facts.REMOTE_CODE, True),
        "enable-metrics": (facts.METRICS, True),
    },
    VLLM: {
        "trust-remote-code": (facts.REMOTE_CODE, True),
        "no-trust-remote-code": (facts.REMOTE_CODE, False),
    },
    HERMETIC: {},
}
_RELEASE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
_VARIABLES: dict[str, _Values] = {
    SGLANG: {
        _RELEASE: (facts.DEFERRED, _truth),
        f"{_RELEASE}_TIMEOUT": (facts.RELEASE_TIMEOUT, _number),
        "SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES": (facts.BATCH_PAGES, _whole),
    },
    VLLM: {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": (facts.INNER_HOST, _text),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": (facts.INNER_PORT, _whole),
        "VLLM_SERVER_DEV_MODE": (facts.DEVELOPER, _digit),
    },
}


def _options(sheet: Sheet, run: Run, given: _Given, version: str, reading: Reading, place: str) -> None:
    for name, (fact, convert) in _FACTS[run.kind].items():
        value = given.values.get(name)
        if isinstance(value, str):
            _note(sheet, fact, convert, value, f"--{name}", reading, place)
    for name, (switch, meaning) in _SWITCHES[run.kind].items():
        if given.values.get(name) is True:
            sheet.add(switch, meaning, f"{place}, --{name}")
    if given.positional and run.kind != HERMETIC and run.what == "serve":
        sheet.add(facts.MODEL, given.positional, f"{place}, serve {given.positional}")
    if given.open:
        reading.failed(place, "has options that a variable or a file holds, which are not read", part=True)
    for one in defaults.options(run.kind, version):
        if given.unsaid(one.name) and not (one.name == "kv-transfer-config" and given.nested):
            sheet.add(one.fact, one.value, f"{place}, {one.says(version)}")


def _note(
    sheet: Sheet,
    fact: Fact[T],
    convert: Callable[[str], T | None],
    value: str,
    name: str,
    reading: Reading,
    place: str,
) -> None:
    try:
        sheet.add(fact, convert(value), f"{place}, {name}")
    except _Odd as error:
        reading.failed(place, f"{name} {error}", part=True)


def _environment(
    sheet: Sheet, kind: str, environment: Mapping[str, str], reading: Reading, place: str
) -> None:
    known = _VARIABLES.get(kind, {})
    for name, (fact, convert) in known.items():
        value = environment.get(name)
        if value is not None and UNKNOWN not in value:
            _note(sheet, fact, convert, value, name, reading, place)
    for name, near in misspelt(environment, known):
        reading.failed(
            place,
            f"the variable {name} is none that is known here, and engines pass over what they do not know: is {near} meant?",
            part=True,
        )


def _unset(sheet: Sheet, run: Run, version: str) -> None:
    """What variables mean that are not set, where all that are set are known."""
    for one in defaults.variables(run.kind, version):
        if one.name not in run.environment:
            sheet.add(one.fact, one.value, f"{sheet.sources[0]}, {one.says(version)}")


def _address(sheet: Sheet, given: _Given) -> None:
    """Where it can be told: the port has to be said."""
    port, host = given.values.get("port"), given.values.get("host", "")
    if not isinstance(port, str) or not isinstance(host, str) or "host" in given.unclear:
        return
    if re.fullmatch(r"[0-9]{1,5}", port):
        sheet.address = sheet.address or (host, int(port))


# ------------------------------------------------------------------------------------ SGLang


def _halves(sheet: Sheet, given: _Given, version: str, place: str) -> None:
    """What only halves of a pair have. The bootstrap server listens where the API does (managers/disagg_service.py)."""
    if not set(sheet.values(facts.ROLE)) & {PREFILL, DECODE}:
        return
    known = defaults.was_read(SGLANG, version)
    backend = given.values.get("disaggregation-transfer-backend")
    if isinstance(backend, str):
        sheet.add(facts.TRANSPORT, values.backend(backend), f"{place}, --disaggregation-transfer-backend")
    elif given.unsaid("disaggregation-transfer-backend") and known:
        sheet.add(facts.TRANSPORT, "mooncake", f"{place}, default of {version}")
    if PREFILL in sheet.values(facts.ROLE) and known:
        for seen in sheet.seen(facts.HOST):
            sheet.add(facts.INNER_HOST, seen.value, seen.where)
    if DECODE in sheet.values(facts.ROLE):
        _restores(sheet, given, place, version if known else "")


def _restores(sheet: Sheet, given: _Given, place: str, known: str) -> None:
    """Decode restores KV from the host only where both options are on (enable_decode_hicache in managers/scheduler.py). `known`: a release that was read."""
    needed = ("disaggregation-decode-enable-radix-cache", "enable-hierarchical-cache")
    if all(given.values.get(name) is True for name in needed):
        sheet.add(facts.RESTORES, True, f"{place}, --{needed[1]}")
    elif known and any(given.unsaid(name) for name in needed):
        sheet.add(facts.RESTORES, False, f"{place}, default of {known}")


# ------------------------------------------------------------------------------------ vLLM


def _vllm(sheet: Sheet, run: Run, given: _Given, version: str, reading: Reading, place: str) -> None:
    """What --kv-transfer-config says, and the key, which may be an option or a variable."""
    where = f"{place}, --kv-transfer-config"
    text = given.values.get("kv-transfer-config")
    config = _json(text, None) if isinstance(text, str) else {}
    if not isinstance(config, dict):
        reading.failed(place, "--kv-transfer-config is no JSON object", part=True)
        config = {}
    config = {**config, **given.nested}
    if config:
        _transfer(sheet, config, where, version)
    if given.unsaid("api-key"):
        key = run.environment.get("VLLM_API_KEY")
        if key is not None and (UNKNOWN not in key or SECRET in key):
            sheet.add(facts.API_KEY, bool(key), f"{place}, VLLM_API_KEY")
        elif key is None and run.complete and defaults.was_read(VLLM, version):
            sheet.add(facts.API_KEY, False, f"{place}, default of {version}")
    nixl = any(values.transport(one.get("kv_connector")) == "nixl" for one in _connectors(config))
    if (
        nixl
        and run.complete
        and defaults.was_read(VLLM, version)
        and "VLLM_NIXL_SIDE_CHANNEL_HOST" not in run.environment
    ):
        sheet.add(facts.INNER_HOST, "localhost", f"{place}, default of {version}")


def _connectors(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The connector, or those that a MultiConnector holds."""
    extra = config.get("kv_connector_extra_config")
    inner = extra.get("connectors") if isinstance(extra, dict) else None
    return [one for one in inner if isinstance(one, dict)] if isinstance(inner, list) else [config]


def _transfer(sheet: Sheet, config: Mapping[str, Any], where: str, version: str) -> None:
    connector = config.get("kv_connector")
    moves = values.transport(connector)
    sheet.add(facts.TRANSPORT, moves, where)
    if moves is None and isinstance(connector, str) and UNKNOWN not in connector:  # KV stays on the node
        sheet.add(facts.ROLE, ALONE, where)
    else:
        sheet.add(facts.ROLE, values.role(config.get("kv_role")), where)
    for one in _connectors(config):
        settings = one.get("kv_connector_extra_config")
        lease = settings.get("kv_lease_duration") if isinstance(settings, dict) else None
        sheet.add(facts.LEASE, values.number(lease), where)
        if (
            lease is None
            and values.transport(one.get("kv_connector")) == "nixl"
            and defaults.was_read(VLLM, version)
        ):
            sheet.add(facts.LEASE, 30.0, f"{where}, default of {version}")
    policy = config.get("kv_load_failure_policy")
    if policy in ("fail", "recompute"):
        sheet.add(facts.LOAD_FAILURE, policy, where)
    elif policy is None and defaults.was_read(VLLM, version):
        sheet.add(facts.LOAD_FAILURE, "fail", f"{where}, default of {version}")


# ------------------------------------------------------------------------------------ Hermetic


def _hermetic(sheet: Sheet, run: Run, given: _Given, files: Files, reading: Reading, place: str) -> None:
    """`hermetic serve` says all itself; the others have a cluster file."""
    hermetic_engine.itself(sheet, place)
    if given.values.get("api-keys"):
        sheet.add(facts.API_KEY, True, f"{place}, --api-keys")
    mode = given.values.get("mode")
    if run.what == "serve":
        roles = {"disaggregated": BOTH, "unified": ALONE}
        sheet.add(facts.ROLE, roles.get(mode) if isinstance(mode, str) else None, f"{place}, --mode")
        return
    if run.what == "prefill":
        sheet.add(facts.ROLE, PREFILL, f"{place}, hermetic prefill")
    name = given.values.get("cluster")
    text = files(name) if isinstance(name, str) else None
    if text is None:
        reading.failed(
            place, f"the cluster file {name or 'that it names'} is not read: it is not here", part=True
        )
        return
    try:
        cluster = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        reading.failed(place, f"the cluster file {name} is no TOML: {str(error)[:200]}", part=True)
        return
    _cluster(sheet, run, given, cluster, f"{place}, {name}")


def _cluster(sheet: Sheet, run: Run, given: _Given, cluster: Mapping[str, Any], where: str) -> None:
    def take(fact: Fact[Any], value: object, kind: type) -> None:
        sheet.add(fact, value if isinstance(value, kind) and not isinstance(value, bool) else None, where)

    take(facts.MODEL, cluster.get("model"), str)
    take(facts.PAGE, cluster.get("page_size"), int)
    take(facts.VERIFY, cluster.get("verify"), str)
    take(facts.TRANSPORT, cluster.get("transport"), str)
    gateway, workers = cluster.get("gateway"), cluster.get("workers")
    if run.what == "gateway" and isinstance(gateway, dict):
        take(facts.CONTEXT, gateway.get("context_length"), int)
        take(facts.SERVED, gateway.get("served_name"), str)
        sheet.add(facts.API_KEY, "api_keys" in gateway, where)
        host, colon, port = str(gateway.get("http", "")).rpartition(":")
        if colon and port.isascii() and port.isdigit():
            sheet.address = (host.strip("[]"), int(port[:6]))
            sheet.add(facts.HOST, host.strip("[]"), where)
    roles_here = {
        worker.get("role")
        for worker in (workers.values() if isinstance(workers, dict) else ())
        if isinstance(worker, dict)
    }
    if run.what == "gateway":
        sheet.add(
            facts.ROLE, BOTH if "prefill" in roles_here else ALONE if "unified" in roles_here else None, where
        )
    if run.what == "decode" and isinstance(workers, dict):
        roles = ("decode", "unified")
        mine = {
            name: worker["role"]
            for name, worker in workers.items()
            if isinstance(worker, dict) and worker.get("role") in roles
        }
        wanted = given.values.get("name")
        role = mine.get(wanted) if isinstance(wanted, str) else None
        if wanted is None and len(mine) == 1 and "name" not in given.unclear:
            role = next(iter(mine.values()))
        sheet.add(facts.ROLE, {"decode": DECODE, "unified": ALONE}.get(role or ""), where)


# ------------------------------------------------------------------------------------ routers


def _router(reading: Reading, run: Run, place: str, name: str, prefix: str) -> None:
    """A router's own time-out and retries, and what its release does by itself. What it does when a client leaves its options do not say."""
    kind = run.kind if run.kind not in _ENGINES else SGLANG_ROUTER
    names, alone = _ROUTER_OPTIONS
    table = _table(
        " ".join(prefix + one for one in names.split()), " ".join(prefix + one for one in alone.split())
    )
    quiet = Reading()
    given = _parse(run.words, table, quiet, place)
    reading.unread += quiet.unread
    proxy = Proxy(name=name or kind, kind=kind, where=place, routes=_routes(run.words, prefix))
    timeout, tries = (
        given.values.get(f"{prefix}request-timeout-secs"),
        given.values.get(f"{prefix}retry-max-retries"),
    )
    for option, value in (
        (f"--{prefix}request-timeout-secs", timeout),
        (f"--{prefix}retry-max-retries", tries),
    ):
        if isinstance(value, str) and not re.fullmatch(r"[0-9]{1,9}", value):
            reading.failed(place, f"{option} is {_shown(value)}, which is no number", part=True)
    if isinstance(timeout, str) and re.fullmatch(r"[0-9]{1,9}", timeout):
        proxy.read_timeout = float(timeout)
    if given.values.get(f"{prefix}disable-retries") is True:
        proxy.retries_post = False
    elif isinstance(tries, str) and re.fullmatch(r"[0-9]{1,9}", tries):
        proxy.retries_post = int(tries) > 1  # the count is of tries, the first one included
    if given.open:
        reading.failed(place, "has options that a variable holds, which are not read", part=True)
    halves = [given.values.get(prefix + name) for name in _TO_HALVES]
    others = given.open or any(not given.unsaid(prefix + name) for name in (*_TO_HALVES, "enable-igw"))
    proxy.pairs = True if any(halves) else None if others else False
    version = image_version(run.image) or ("", "")
    known = defaults.router(version[1]) if version[0] == kind == run.kind else None
    if known is not None:
        _by_itself(proxy, known, given, prefix)
    reading.proxies.append(proxy)


_TO_HALVES = ("pd-disaggregation", "vllm-pd-disaggregation", "prefill", "decode")


def _by_itself(proxy: Proxy, known: defaults.RouterDefaults, given: _Given, prefix: str) -> None:
    """What the router's release does where no option says otherwise."""
    if given.unsaid(f"{prefix}request-timeout-secs"):
        proxy.read_timeout = known.timeout
    if proxy.retries_post is None and given.unsaid(f"{prefix}retry-max-retries"):
        proxy.retries_post = known.tries > 1
    if proxy.pairs and f"{prefix}mini-lb" not in given.values:
        proxy.cancels_both = known.cancels_both


def _routes(words: Iterable[str], prefix: str) -> str:
    """The URLs that a router is given, for people, each behind what it is given as."""
    found: list[str] = []
    role = ""
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("--"):
            plain = name.removeprefix("--").removeprefix(prefix).replace("_", "-")
            role = {"prefill": "prefill", "decode": "decode", "worker-urls": "worker"}.get(plain, "")
            word = value
        if role and re.match(r"[a-z]+://", word) and UNKNOWN not in word:
            found.append(f"{role} {word}")
    return ", ".join(found)


__all__ = [
    "Run",
    "image_version",
    "in_image",
    "looks_like",
    "read",
    "read_environment",
    "read_run",
    "repository",
    "runs_of",
]
