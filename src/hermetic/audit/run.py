"""One audit from its first request to its report.

The one thing to know: whatever happens (Ctrl-C, a server that dies, a budget that ends), there is a report of what was seen until
then, and what was not played stands in it with the reason. "Could not run" never looks like "nothing found".
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hermetic.audit.address import shown
from hermetic.audit.evidence import Evidence
from hermetic.audit.exchange import Answer, shortened
from hermetic.audit.learned import Learned
from hermetic.audit.markers import Plant
from hermetic.audit.openings import learn
from hermetic.audit.result import Played, Report, Sample
from hermetic.audit.scenarios import Scenario, chosen
from hermetic.audit.scenarios.registry import SALTED
from hermetic.audit.signatures import known
from hermetic.audit.stage import SIZES, Stage
from hermetic.audit.target import Target, TargetError, TargetOptions, open_target

BUDGETS = {"quick": 150.0, "standard": 1200.0, "soak": 4 * 3600.0}  # seconds, where none is given
# Seconds to a first token, up to which BUDGETS are enough; a slower server is given as much more, up to SLOWER times the budget. So is one that
# turns out to be slower than that until every scenario has had a TURN, unless --budget says how much there is.
QUICK_SERVER = 0.3
SLOWER = 4.0
TURN = (
    8  # first tokens: a scenario needs a few requests, one behind the other, before it has compared anything
)
LEAST = 5.0  # seconds for a scenario, however fast the server is
NO_TIME = "no time left in the budget"
PASSES: dict[str, tuple[str, ...]] = {  # sizes in which every scenario is played, one after the other
    "quick": ("quick",),
    "standard": ("quick", "standard"),
    "soak": ("quick", "standard", "soak"),
}
RISKY = 90  # `Scenario.order` from which on a server may not recover: played in the last pass alone
LEARNING = 0.25  # share of the budget for learning limits, speed and noise
MOST_LEARNING = 120.0  # seconds
GRACE = 30.0  # seconds that a scenario may take longer than its share, before it is cut short
GONE = 8  # requests in a row without a connection after which the server is taken for dead
INTERRUPTED = "interrupted"  # the reason in a report that a signal ended
SAMPLES = 20_000  # points kept for the charts
# A server on which nothing is missing: what cannot be played there is for want of an option.
ABLE = Learned(model="", engine=SALTED[0])


class Progress(Protocol):
    """Who is told how it goes."""

    def learning(self, what: str) -> None:
        """A step before the first scenario."""

    def playing(self, played: Played, number: int, of: int, left: float) -> None:
        """A scenario begins: the `number`th `of` so many; `left` seconds of the budget."""

    def slowed(self, wait: float) -> None:
        """A request was told to slow down, and waits so many seconds."""

    def asked(self, answer: Answer, findings: int, left: float) -> None:
        """A request has ended; `findings` so far."""


@dataclass(frozen=True)
class AuditOptions:
    """What is asked for. `scenarios` empty: those of the profile. `budget` None: the profile's. `fail_fast`: the first finding
    ends it."""

    urls: tuple[str, ...]
    target: TargetOptions = field(default_factory=TargetOptions)
    profile: str = "quick"
    scenarios: tuple[str, ...] = ()
    budget: float | None = None
    seed: int = 1
    fail_fast: bool = False

    def command(self) -> str:
        """How to run this again. Holds no key."""
        urls = map(shown, self.urls)
        words = ["hermetic", "audit", *urls, "--profile", self.profile, "--seed", str(self.seed)]
        words += ["--model", self.target.model] if self.target.model else []
        words += ["--ca", self.target.ca] if self.target.ca else []
        words += [w for name in self.scenarios for w in ("--scenario", name)]
        if self.budget is not None:
            words += ["--budget", f"{self.budget:g}s"]
        words += ["--fail-fast"] if self.fail_fast else []
        return shlex.join(words)


class _Quiet:
    """Nobody is told."""

    def learning(self, what: str) -> None: ...

    def playing(self, played: Played, number: int, of: int, left: float) -> None: ...

    def slowed(self, wait: float) -> None: ...

    def asked(self, answer: Answer, findings: int, left: float) -> None: ...


class _ServerGone(Exception):
    """No connection any more."""


class _Enough(Exception):
    """A finding, and the first is to be the last."""


async def audit(options: AuditOptions, progress: Progress | None = None) -> Report:
    """Play everything. What cannot be audited at all has its reason in the report as well. Raises OptionError for a scenario
    that is not known."""
    began = time.monotonic()
    report = Report(
        target=" ".join(map(shown, options.urls)),
        model=options.target.model or "",
        profile=options.profile,
        seed=options.seed,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=options.command(),
    )
    run = _Run(options, report, progress or _Quiet(), began)
    with _stopping(asyncio.current_task()):
        try:
            async with open_target(options.urls, options.target, run.slowed) as target:
                await run.play(target)
        except asyncio.CancelledError:
            report.reason = INTERRUPTED
        except TargetError as error:
            report.reason = str(error)
    run.close()
    return report


@contextlib.contextmanager
def _stopping(task: asyncio.Task[object] | None) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the audit and leaves a report; the second ends the process."""
    loop = asyncio.get_running_loop()
    before: dict[signal.Signals, Any] = {}

    def stop() -> None:
        for number in before:
            loop.remove_signal_handler(number)
        if task is not None:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        former = signal.getsignal(number)
        if former == signal.SIG_IGN or number in before:  # ignored: under nohup, or in a script's background
            continue
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread, or Windows
            loop.add_signal_handler(number, stop)
            before[number] = former
    try:
        yield
    finally:
        for number, former in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, former or signal.SIG_DFL)


class _Run:
    """An audit under way."""

    def __init__(self, options: AuditOptions, report: Report, progress: Progress, began: float) -> None:
        self.options, self.report, self.progress, self.began = options, report, progress, began
        self.budget = BUDGETS[options.profile] if options.budget is None else options.budget
        self.evidence: Evidence | None = None
        self.learned: Learned | None = None
        self._unreachable = 0
        self._complaint = ""  # of the last answer that had one
        self._found_enough = False
        self._slowed: list[float] = []  # seconds of each wait that the server asked for
        self._failed: list[str] = []  # scenarios that ended by a fault of the audit's own
        self._playing: Played | None = None
        self._task: asyncio.Future[None] | None = None
        self._limit = asyncio.Timeout(None)  # of the scenario that is played

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.began)

    def slowed(self, wait: float) -> None:
        """A request was told to slow down, and waits so many seconds."""
        self._slowed.append(wait)
        self.progress.slowed(wait)

    async def play(self, target: Target) -> None:
        report = self.report
        wanted, keys = (self.options.scenarios, self.options.profile), self.options.target.keys
        _some([reason for _, reason in chosen(*wanted, ABLE, keys)])  # before minutes go into learning
        learning = replace(self.options.target, learning=min(LEARNING * self.budget, MOST_LEARNING))
        learned = await learn(target, learning, self.progress.learning)
        if self.options.budget is None:
            self.budget *= min(SLOWER, max(1.0, learned.first / QUICK_SERVER))
        report.model, report.limits = learned.model, msgspec.to_builtins(learned)
        report.noise = msgspec.to_builtins(learned.noise)
        todo = chosen(*wanted, learned, keys)
        _some([reason for _, reason in todo])
        report.scenarios = [
            Played(name=one.name, says=one.says, reason=reason or "not reached") for one, reason in todo
        ]
        able = [(one, p) for (one, reason), p in zip(todo, report.scenarios, strict=True) if not reason]
        self._enough(learned)
        plant = Plant(self.options.seed)
        self.evidence, self.learned = Evidence(learned, plant), learned
        try:
            for turn in range(len(PASSES[self.options.profile])):
                await self._pass(turn, able, target, plant)
        except _ServerGone as gone:
            report.reason = f"the server cannot be reached any more, since {gone}: {GONE} requests in a row had no connection"
            return
        except _Enough:
            report.notes.append("The first finding ended this audit, as --fail-fast asks.")
            return
        report.complete = all(p.state == "done" for p in report.scenarios)

    async def _pass(
        self, turn: int, able: list[tuple[Scenario, Played]], target: Target, plant: Plant
    ) -> None:
        """All of them in one size: a short pass first, so that what shows easily shows soon."""
        assert self.learned is not None
        sizes = PASSES[self.options.profile]
        last = turn + 1 == len(sizes)
        some = [(one, played) for one, played in able if last or one.order < RISKY]
        slow = max(1.0, self.budget / BUDGETS[self.options.profile])
        rest = 0.0 if last else self.left() - min(slow * BUDGETS[sizes[turn]], self.left() / 4)
        for number, (scenario, played) in enumerate(some):
            if last:
                self._extend(len(some) - number)
            share = (self.left() - rest) * scenario.weight / sum(one.weight for one, _ in some[number:])
            if (turn or number) and share < self.learned.first:
                played.state, played.reason = "cut short" if played.requests else "not run", NO_TIME
                continue
            self.progress.playing(played, turn * len(able) + number + 1, len(sizes) * len(able), self.left())
            await self._one(scenario, played, turn, share, target, plant)
            if not last and played.state == "done":
                played.state, played.reason = "cut short", "only its short form was played"

    def _extend(self, scenarios: int) -> None:
        """More time, if so many scenarios would not have their turn in what is left of a profile's own."""
        assert self.learned is not None
        if self.options.budget is None:
            needed = (time.monotonic() - self.began) + scenarios * _turn(self.learned)
            self.budget = max(self.budget, min(needed, SLOWER * BUDGETS[self.options.profile]))

    def _enough(self, learned: Learned) -> None:
        needed = (time.monotonic() - self.began) + _turn(learned)
        if self.budget < needed:
            raise TargetError(
                f"--budget {self.budget:g}s is too small for one scenario on this server "
                f"(a first token takes {learned.first:.2f} s here): give at least {needed:.0f}s"
            )

    async def _one(
        self, scenario: Scenario, played: Played, turn: int, share: float, target: Target, plant: Plant
    ) -> None:
        assert self.evidence is not None
        assert self.learned is not None
        began, bound = time.monotonic(), self.learned.bound
        size = SIZES[PASSES[self.options.profile][turn]]
        stage = Stage(
            scenario.name, target, self.learned, plant, self.evidence, size, self.options.seed,
            lambda: share - (time.monotonic() - began), max(1, self.options.target.keys), self._answered, turn,
        )  # fmt: skip
        self._playing = played
        played.state, played.reason = "cut short", "interrupted"
        self._task = asyncio.ensure_future(scenario.play(stage))
        try:
            async with asyncio.timeout(max(share, 0.0) + GRACE + bound) as self._limit:
                fault = await _outcome(self._task)
            if fault is not None:
                self._failed.append(played.name)
                played.reason = f"the audit itself failed here, please report it: {_told(fault)}"
                return
            played.state, played.reason = "done", "; ".join(stage.notes)
            if self.options.fail_fast and self.evidence.findings():
                raise _Enough
        except TimeoutError:
            played.reason = f"did not end {GRACE + bound:.0f} s after its share of the time"
        except asyncio.CancelledError:
            if self._found_enough:
                played.reason = "ended by the first finding"
                raise _Enough from None
            if self._unreachable < GONE:
                raise
            played.reason = "the server could not be reached any more"
            raise _ServerGone(played.name) from None
        finally:
            played.seconds += time.monotonic() - began

    def _goes_on(self) -> None:
        """An answer has come: while they do a scenario is not cut short, unless --budget says how much there is."""
        assert self.learned is not None
        until = self._limit.when()
        if self.options.budget is not None or until is None or self._limit.expired():
            return
        left = SLOWER * BUDGETS[self.options.profile] - (time.monotonic() - self.began)
        self._limit.reschedule(
            max(until, asyncio.get_running_loop().time() + min(GRACE + self.learned.bound, left))
        )

    def _answered(self, scenario: str, answer: Answer) -> None:
        self._goes_on()
        played, report = self._playing, self.report
        report.requests += 1
        if played is not None:
            played.requests += 1
            played.how[answer.how] = played.how.get(answer.how, 0) + 1
        if len(report.samples) < SAMPLES:
            report.samples.append(
                Sample(
                    answer.number,
                    scenario,
                    answer.sent,
                    answer.usage.prompt,
                    answer.first,
                    answer.seconds,
                    answer.how,
                )
            )
        found = 0 if self.evidence is None else len(self.evidence.findings())
        self.progress.asked(answer, found, self.left())
        if answer.error and answer.how != "answered":
            self._complaint = f"status {answer.status}: {answer.error}" if answer.status else answer.error
        self._unreachable = self._unreachable + 1 if answer.how == "unreachable" else 0
        self._found_enough = self.options.fail_fast and found > 0
        if (self._found_enough or self._unreachable >= GONE) and self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Bring together what was seen, however far it came."""
        report = self.report
        report.seconds = time.monotonic() - self.began
        if not report.scenarios:
            wanted = chosen(self.options.scenarios, self.options.profile, Learned(model=""))
            report.scenarios = [
                Played(name=one.name, says=one.says, reason="not reached") for one, _ in wanted
            ]
        if self._slowed:
            report.notes.append(
                f"The server told requests to slow down {len(self._slowed)} times; they waited {sum(self._slowed):.0f} s in all. What they "
                "would have shown side by side at full speed is not known."
            )
        if self.evidence is None or self.learned is None:
            return
        for endpoint, edge in self.learned.edges.items():
            if edge.silent:
                report.notes.append(
                    f"While the limits were learned, prompts of {', '.join(map(str, edge.silent))} tokens to /{endpoint} got neither an answer nor "
                    "an error; `over-capacity` asks for that again."
                )
        report.findings = self.evidence.findings()
        report.noise |= self.evidence.noise()
        for finding in report.findings:
            finding.answers = [shortened(answer) for answer in finding.answers]
            if not finding.signature and (cause := known(finding, self.learned)) is not None:
                finding.signature = cause.name
            finding.repeat = finding.repeat or AuditOptions(
                self.options.urls, self.options.target, self.options.profile, (finding.scenario,), self.options.budget,
                self.options.seed,
            ).command()  # fmt: skip
        for played in report.scenarios:
            played.coverage = self.evidence.coverage(played.name)
        wrong = {answer.number for finding in report.findings for answer in finding.answers[:1]}
        report.samples = [
            msgspec.structs.replace(s, wrong=True) if s.number in wrong else s for s in report.samples
        ]
        report.notes += self.evidence.notes()
        report.complete = report.complete and all(played.compared() for played in report.scenarios)
        if report.findings:
            report.verdict = "findings"
            return
        if not report.reason and (report.mostly_lost() or not report.compared()):
            ends = sum((Counter(played.how) for played in report.scenarios), Counter[str]())
            told = ", ".join(f"{number} {how}" for how, number in ends.most_common())
            said = f"; one of them: {self._complaint}" if self._complaint else ""
            report.reason = f"hardly a request was answered ({told or 'none was sent'}{said})"
        if self._failed and not report.reason:
            report.reason = f"the audit itself failed in {', '.join(dict.fromkeys(self._failed))}: what they would have shown is not known"
        skipped = sum(played.reason == NO_TIME for played in report.scenarios)
        if skipped and not report.reason:
            report.reason = (
                f"the budget of {self.budget:.0f} s was over before {skipped} of {len(report.scenarios)} scenarios could be played: "
                f"give more with --budget, or name fewer with --scenario"
            )
        if not report.reason and (open_ := _open(report.scenarios)):
            report.reason = f"not played to the end, or with nothing that could be compared: {', '.join(open_)}; what they would have shown is not known"
        if not report.reason:
            report.verdict = "nothing found"


async def _outcome(task: asyncio.Future[None]) -> BaseException | None:
    """Wait until it has ended; what it raised. Cancelled with it, either way."""
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    return task.exception()


def _open(scenarios: Sequence[Played]) -> list[str]:
    """Those that were begun and do not tell that all is well."""
    return [
        played.name
        for played in scenarios
        if played.state == "cut short" or (played.state == "done" and not played.compared())
    ]


def _some(reasons: Sequence[str]) -> None:
    """Raises TargetError if each of the scenarios has a reason why it cannot be played."""
    if all(reasons):
        told = "; ".join(sorted(set(reasons))) or "none was chosen"
        raise TargetError(f"no scenario can be played here: {told}")


def _turn(learned: Learned) -> float:
    """Seconds that a scenario needs at least."""
    return max(LEAST, TURN * learned.first)


def _told(fault: BaseException) -> str:
    """The first fault in a group, and the line of the audit where it happened."""
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    last = traceback.extract_tb(fault.__traceback__)[-1:]
    where = f" ({Path(last[0].filename).name}, line {last[0].lineno})" if last else ""
    return f"{type(fault).__name__}: {fault}{where}"


__all__ = ["BUDGETS", "AuditOptions", "Progress", "audit"]
