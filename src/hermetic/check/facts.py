"""What can be known of a node, and where it is known from. Readers put facts in, rules take them out.

The one thing to know: a rule that asks for a fact that nobody gave, or on which the sources disagree, gets `NotKnown` and not a
guess. So what could not be determined is reported as unknown, and never as passed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hermetic.check import hosts as hosts_of

T = TypeVar("T")

# Kinds of sources, as hints name them.
SERVER_INFO, MODEL_INFO, LOADS = "its /server_info", "its /model_info", "its /v1/loads"
MODELS, METRICS_PAGE, URL = "its /v1/models", "its /metrics", "its URL"
START, LOG = "its start-up log", "its log"
COMMAND, ENVIRONMENT = "its command line or manifest", "its manifest (environment)"
PACKAGES = "its list of packages (pip freeze)"
_NOT_OF = {
    "vllm": (SERVER_INFO, LOADS),
    "hermetic": (SERVER_INFO, LOADS),
}  # vLLM has the first in developer mode only


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A kind of fact. `says`: what it is, to go on after "is not known: "; `asked`: the kinds of sources that can say it; `when`: when they do.

    `several`: of what is counted or measured, what several sources say together (counts of two logs add up); None: they have to agree. `apart`: of
    different values those that are not two ways to say one thing."""

    name: str
    says: str
    asked: tuple[str, ...]
    several: Callable[[Sequence[T]], T] | None = field(default=None, compare=False)
    when: str = ""
    apart: Callable[[list[T]], list[T]] = field(default=list, compare=False)


@dataclass(frozen=True)
class Seen(Generic[T]):
    """A value, and where it stands: a source, and a place in it ("prefill.log, line 41")."""

    value: T
    where: str


class NotKnown(Exception):
    """A fact that a rule needs and does not have; the message says why, and what would help.

    `lacks`: what is not known, where nobody says it; `ask`: the kinds of sources of which one would say it, those that were read and do not left out.
    Both empty where it is not known for another reason."""

    def __init__(self, message: str, lacks: str = "", ask: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lacks, self.ask = lacks, tuple(ask)


@dataclass
class Sheet:
    """Facts of one node. `name`: for people; `sources`: everything that said something of it, in the order of reading.

    `read`: the kinds of sources among them. `address`: (host, port) that it serves on, where it is known. `asked`: names of the facts that were taken out since it was cleared, so that a
    verdict can say what it rests on. `loopback`: the pod or container whose loopback addresses are its own, if it is in one."""

    name: str = ""
    sources: list[str] = field(default_factory=list)
    address: tuple[str, int] | None = None
    loopback: str = ""
    read: set[str] = field(default_factory=set)
    asked: dict[str, None] = field(default_factory=dict)
    _facts: dict[str, list[Seen[object]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, fact: Fact[T], value: T | None, where: str) -> None:
        """Note a value. None is nothing to note; the same value from the same place is noted once."""
        seen = Seen[object](value, where)
        if value is not None and seen not in self._facts[fact.name]:
            self._facts[fact.name].append(seen)

    def replace(self, fact: Fact[T], value: T, where: str) -> None:
        """Note a value in the place of all that was noted before."""
        self._facts[fact.name] = [Seen[object](value, where)]

    def take_out(self, fact: Fact[T]) -> list[Seen[T]]:
        """What was noted of it, which is noted no more."""
        return self._facts.pop(fact.name, [])  # type: ignore[return-value]

    def count(self, fact: Fact[int], where: str, more: int = 1) -> None:
        """One more of what is counted, at `where` (the first place is kept)."""
        seen = self._facts[fact.name]
        first = seen[0] if seen else Seen[object](0, where)
        assert isinstance(first.value, int)
        self._facts[fact.name] = [Seen(first.value + more, first.where)]

    def seen(self, fact: Fact[T]) -> list[Seen[T]]:
        """All that was said of it."""
        return list(self._facts.get(fact.name, ()))  # type: ignore[arg-type]

    def __contains__(self, fact: Fact[T]) -> bool:
        return bool(self._facts.get(fact.name))

    def __getitem__(self, fact: Fact[T]) -> T:
        """The value that all sources agree on. Raises NotKnown."""
        values = self.values(fact)
        if not values:
            silent, left = self._places(fact)
            message = f"{self.name}: {fact.says} is not known; {_hint(fact, silent, left)}"
            raise NotKnown(message, fact.says, _with(left or silent if fact.when else left, fact.when))
        if fact.several is not None:
            return fact.several([seen.value for seen in self.seen(fact)])
        if len(values) > 1:
            told = "; ".join(f"{seen.value} ({seen.where})" for seen in self.seen(fact))
            raise NotKnown(f"{self.name}: the sources disagree on {fact.says}: {told}")
        return values[0]

    def _places(self, fact: Fact[T]) -> tuple[list[str], list[str]]:
        """Of the kinds of sources that can say it: those that were read and do not, and those that were not read."""
        not_its = {
            place for seen in self._facts.get("engine", ()) for place in _NOT_OF.get(str(seen.value), ())
        }
        places = [place for place in fact.asked if place not in not_its or place in self.read] or fact.asked
        silent = [place for place in places if self._was_read(place)]
        return silent, [place for place in places if place not in silent]

    def _was_read(self, place: str) -> bool:
        if place == URL:
            return any(source.startswith(("http://", "https://")) for source in self.sources)
        return place in self.read

    def get(self, fact: Fact[T], otherwise: T) -> T:
        """The same, or `otherwise` where nobody says. Raises NotKnown where the sources disagree."""
        if fact in self:
            return self[fact]
        return otherwise

    def values(self, fact: Fact[T]) -> list[T]:
        """The different values that were said."""
        self.asked[fact.name] = None
        found: list[T] = []
        for seen in self.seen(fact):
            if seen.value not in found:
                found.append(seen.value)
        return fact.apart(found)

    def where(self, fact: Fact[T]) -> str:
        """Where it is known from, for people; empty if it is not."""
        return ", ".join(dict.fromkeys(seen.where for seen in self.seen(fact)))

    def rests_on(self) -> list[str]:
        """Where the facts stand that were asked for."""
        return list(dict.fromkeys(seen.where for name in self.asked for seen in self._facts.get(name, ())))

    def facts(self) -> Iterator[tuple[str, list[Seen[object]]]]:
        return iter(self._facts.items())

    def take(self, other: Sheet) -> None:
        """Everything that another sheet of the same node says."""
        self.sources += [source for source in other.sources if source not in self.sources]
        self.address = self.address or other.address
        self.loopback = self.loopback or other.loopback
        self.read |= other.read
        for name, seen in other.facts():
            kept = self._facts[name]
            kept += [one for one in seen if one not in kept]


def _hint(fact: Fact[T], silent: Sequence[str], left: Sequence[str]) -> str:
    """Which sources would say it, and which were read and do not."""
    when = f" {fact.when}" if fact.when else ""
    if not silent:
        return f"{_listed(left, 'or')} would say it{when}"
    told = f"{_listed(silent, 'and')} {'was read and does' if len(silent) == 1 else 'were read and do'} not say it"
    if left:
        return f"{told}; {_listed(left, 'or')} would{when}"
    return f"{told}{f' (it would{when})' if when else ''}"


def _with(places: Sequence[str], when: str) -> list[str]:
    return [f"{place} {when}".strip() for place in places]


def _listed(places: Sequence[str], last: str) -> str:
    """its /server_info, its /metrics or its start-up log"""
    return f" {last} ".join([", ".join(places[:-1]), places[-1]] if len(places) > 1 else places)


def _places(hosts: list[str]) -> list[str]:
    """A name and an address may be one place, and then the address is what is known of it. No name stands for all interfaces."""
    by_number = {host: number for host in hosts if (number := hosts_of.number(host)) is not None}
    names = [host for host in hosts if host not in by_number]
    if len(names) != 1 or len(by_number) != 1:
        return hosts
    ((host, number),) = by_number.items()
    may_be = number.is_loopback if names[0] == "localhost" else not number.is_unspecified
    return [host] if may_be else hosts


def one_release(versions: list[str]) -> list[str]:
    """An image's tag leaves out what a build adds to its release (0.32.0+cpu), and may begin with a v: the longest says it all. Two builds are two."""
    plain = {version: version.removeprefix("v") for version in versions}
    longest = max(versions, key=lambda version: len(plain[version]), default="")
    release = plain.get(longest, "").partition("+")[0]
    return (
        [longest]
        if versions and all(one in (release, plain[longest]) for one in plain.values())
        else versions
    )


_INFO, _START, _METRICS, _COMMAND, _ENVIRONMENT = SERVER_INFO, START, METRICS_PAGE, COMMAND, ENVIRONMENT

ENGINE = Fact[str]("engine", "which engine this is", (_INFO, _METRICS, _START))  # sglang, vllm, hermetic
VERSION = Fact[str]("version", "the version", (_INFO, _START, _COMMAND), apart=one_release)
ROLE = Fact[str]("role", "the role in the deployment", (_INFO, _COMMAND))  # prefill, decode, both or alone
MODEL = Fact[str]("model", "the model path", (_INFO, _START, _COMMAND))
REVISION = Fact[str]("revision", "the model's revision", (_INFO, _COMMAND))
SERVED = Fact[str]("served", "the name under which the model is served", (MODELS,))

CONTEXT = Fact[int]("context", "the advertised context in tokens", (MODELS, _START, _COMMAND))
POOL = Fact[int]("pool", "how many tokens the KV pool holds", (_INFO, _METRICS, _START))
POOL_LIMIT = Fact[int](
    "pool_limit",
    "the most tokens that the KV pool was allowed (it holds what memory allows, up to that)",
    (_COMMAND,),
)
PAGE = Fact[int]("page", "the page size in tokens", (_INFO, _METRICS, _COMMAND))
LONGEST = Fact[int](
    "longest", "the length from which on the front check refuses prompts", (_INFO,)
)  # max_req_input_len
RESERVE = Fact[int]("reserve", "how many tokens decode reserves for each request", (_INFO, _COMMAND))
TRUNCATES = Fact[bool]("truncates", "whether prompts that are too long are cut", (_INFO, _COMMAND))
MEMORY_FRACTION = Fact[float]("memory_fraction", "the share of memory for weights and KV", (_INFO, _COMMAND))
KV_BYTES = Fact[float]("kv_bytes", "how many bytes the KV pool has", (_METRICS,))

KV_DTYPE = Fact[str]("kv_dtype", "the dtype of the KV cache", (_START, _INFO))
TP = Fact[int]("tp", "the tensor parallel width", (_INFO, _COMMAND))
PP = Fact[int]("pp", "the pipeline parallel depth", (_INFO, _COMMAND))
TRANSPORT = Fact[str](
    "transport", "what moves KV between the halves", (_INFO, _COMMAND)
)  # mooncake, nixl, shm, fake, ...
TRANSPORT_VERSION = Fact[str](
    "transport_version",
    "the version of the transfer engine",
    (PACKAGES, _START),
    lambda told: ", ".join(sorted(set(told))),  # there may be several engines, each with its name
)
IMAGE = Fact[str]("image", "the image that it runs in", (_COMMAND,))

DEFERRED = Fact[bool](
    "deferred", "whether decode waits for the transfer before it releases pages", (_ENVIRONMENT,)
)
RELEASE_TIMEOUT = Fact[float](
    "release_timeout", "how long decode waits before it releases anyway, in seconds", (_ENVIRONMENT,)
)
BATCH_PAGES = Fact[int](
    "batch_pages", "how many pages one transfer batch has at most (0: no bound)", (_ENVIRONMENT,)
)
RESTORES = Fact[bool]("restores", "whether decode restores KV from host memory", (_INFO, _COMMAND))
TRANSFER_SPEED = Fact[float](
    "transfer_speed", "the speed of transfers in bytes a second", (_METRICS, LOADS), min, when="under load"
)
RELEASED = Fact[int]("released", "how many releases waited and ended", (_METRICS,), max)
RELEASED_BY_TIMEOUT = Fact[int](
    "released_by_timeout", "how many releases ended by time-out", (_METRICS, LOG), max
)

CHECKSUM = Fact[bool]("checksum", "whether transferred KV is checked", (_INFO, _COMMAND))
CHECKSUM_SKIPPED = Fact[int](
    "checksum_skipped", "log lines that say that a layout is not checked", (LOG,), sum
)
CHECKSUM_WRONG = Fact[int](
    "checksum_wrong", "log lines that say that transferred KV was not what was sent", (LOG,), sum
)
CANARY = Fact[str]("canary", "the mode of the KV canary", (_INFO, _COMMAND))  # none, log or raise
CANARY_CHECKED = Fact[int]("canary_checked", "how many tokens the canary has checked", (LOG,), max)
CANARY_WRONG = Fact[int]("canary_wrong", "violations of the canary in the log after the warm-up", (LOG,), sum)
CANARY_WARM_UP = Fact[int](
    "canary_warm_up", "violations of the canary in the log during the warm-up", (LOG,), sum
)
STARTED = Fact[bool]("started", "whether the log reaches the end of the start", (LOG,), max)

PREFILL_SPEED = Fact[float](
    "prefill_speed",
    "the measured prefill speed in tokens a second",
    (_METRICS, LOADS, LOG),
    min,
    when="under load",
)

HOST = Fact[str]("host", "the address that it listens on", (_INFO, _COMMAND), apart=_places)
INNER_HOST = Fact[str](
    "inner_host",
    "the address of its bootstrap or side channel",
    (_START, _COMMAND, _ENVIRONMENT),
    apart=_places,
)
INNER_PORT = Fact[int]("inner_port", "the port of its bootstrap or side channel", (_COMMAND,))
API_KEY = Fact[bool]("api_key", "whether an API key is asked for", (_INFO, _COMMAND))
ADMIN_KEY = Fact[bool]("admin_key", "whether an admin key is asked for", (_INFO, _COMMAND))
METRICS = Fact[bool]("metrics", "whether it exports metrics", (_INFO, _COMMAND))
METRICS_OPEN = Fact[bool]("metrics_open", "whether /metrics answers without a key", (URL,))
REMOTE_CODE = Fact[bool](
    "remote_code", "whether code from the model's repository runs", (_INFO, _START, _COMMAND)
)

# vLLM
LOAD_FAILURE = Fact[str](
    "load_failure", "what becomes of a request whose KV could not be loaded", (_START, _COMMAND)
)  # fail or recompute
LEASE = Fact[float](
    "lease", "how long prefill keeps pages for decode, in seconds (kv_lease_duration)", (_COMMAND,)
)
WAITED = Fact[float](
    "waited",
    "the longest time that requests were seen to wait, in seconds",
    (_METRICS,),
    max,
    when="under load",
)
EXPIRED = Fact[int](
    "expired", "how many requests' pages expired before decode had read them", (_METRICS,), max
)
READ_LATE = Fact[int](
    "read_late", "how many requests' pages decode read after they had expired", (_METRICS, LOG), max
)
TRANSFERS = Fact[int]("transfers", "how many prompts it took from other nodes", (_METRICS,), max)
FAILED_TRANSFERS = Fact[int]("failed_transfers", "how many transfers failed", (_METRICS,), max)
DEVELOPER = Fact[bool]("developer", "whether developer mode is on", (_ENVIRONMENT, URL))

# Hermetic
VERIFY = Fact[str](
    "verify", "what is verified of pages before they are read", (MODELS, _START, _COMMAND)
)  # tags, landing or read
VERIFIED = Fact[int]("verified", "how many requests were verified", (_METRICS,), max)
DISABLED = Fact[bool]("disabled", "whether the model is disabled", (_METRICS,))
INTEGRITY_FAILURES = Fact[int](
    "integrity_failures", "how many requests met a page that was not their own", (_METRICS,), max
)
QUARANTINED = Fact[int]("quarantined", "how many pages are in quarantine", (_METRICS,), max)
SERVED_REQUESTS = Fact[int]("served_requests", "how many requests were served", (_METRICS,), max)

FACTS: dict[str, Fact[object]] = {
    value.name: value for value in list(globals().values()) if isinstance(value, Fact)
}
