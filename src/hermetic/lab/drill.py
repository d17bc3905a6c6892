"""`hermetic drill`: the incident, seen from outside. The audit against a server that has its fault, and against one as shipped.

First the lab's server (leaky.py): the prefill pool is smaller than what is advertised, a prompt that does not fit becomes a
placeholder, the walls are down. Then the product itself, with the same pools. Both are asked the same: an audit, and Bob's
over-long prompt after Alice's. The one thing to know: one server runs at a time, and none when this ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import httpx
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hermetic.audit.learned import Learned
from hermetic.audit.report import terminal, words
from hermetic.audit.result import Finding, Played, Report
from hermetic.audit.run import INTERRUPTED, AuditOptions, audit
from hermetic.audit.scenarios import chosen
from hermetic.audit.target import TargetOptions
from hermetic.lab.leaky import LeakyError, LeakyOptions, LeakyServer

PROFILE, SCENARIOS = "quick", ("long-prompts", "over-capacity")
BUDGET = 120.0  # seconds of each audit
PREFILL, DECODE = 1024, 4096  # tokens of the pools; a faulty gateway advertises the larger
ALICE = "PELICAN-7731 is Alice. " * 80  # 961 tokens: nearly all that prefill holds
BOB = (
    "The weather this week. On Monday it rained in the north and the wind came from the sea. On Tuesday the sky was grey "
    "until noon, then the sun came through and the streets dried. On Wednesday there was fog in the valley, and the hills "
    "stood above it like islands. "
) * 18 + "The forecast says that"  # 1,048 tokens: a little more
ANSWER = 24  # tokens
MARKS = ("PELICAN-7731", "PELICAN", "7731", "Alice")
FAULTY, SHIPPED = "with the incident's fault, walls down", "as shipped"
LESSON = "The same prompts, the same pools: one compares what it advertises with what it holds, the other does not."
QUOTED = 300  # characters of an answer
SHOWN = 3  # findings in each column
WIDE = 100  # columns from which on the reports stand side by side; below, one under the other


class DrillError(RuntimeError):
    """The drill could not be played; the message says why."""


@dataclass(frozen=True)
class DrillOptions:
    """`budget`: seconds of each of the two audits. `scenarios`: what is played, besides Alice and Bob."""

    scenarios: tuple[str, ...] = SCENARIOS
    budget: float = BUDGET
    seed: int = 1
    quiet: bool = False


@dataclass(frozen=True)
class Exchange:
    """What Bob got for a prompt that the prefill pool cannot hold. `text`: of the answer, or of the refusal."""

    status: int
    text: str
    prompt_tokens: int | None

    @property
    def refused(self) -> bool:
        return 400 <= self.status < 500


@dataclass(frozen=True)
class Side:
    """One of the two servers, after all that was asked of it."""

    title: str
    context: int  # tokens that it advertises
    bob: Exchange
    report: Report


def main(options: DrillOptions | None = None) -> int:
    """0: the leak was found and the shipped server refused. 1: not so. 2: it could not be run. 130: interrupted.

    Raises OptionError for a scenario that is not known."""
    options, console = options or DrillOptions(), Console(highlight=False)
    chosen(options.scenarios, PROFILE, Learned(model=""))
    try:
        with _terminated_as_interrupted():
            leaky = _play(options, LeakyOptions(prefill_tokens=PREFILL, decode_tokens=DECODE), console)
            sound = _play(
                options, LeakyOptions(prefill_tokens=PREFILL, decode_tokens=DECODE, leaky=False), console
            )
    except (LeakyError, DrillError) as error:
        print(f"hermetic drill: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hermetic drill: interrupted; its servers have ended", file=sys.stderr)
        return 130
    show(console, leaky, sound)
    return 1 if faults(leaky, sound) else 0


def faults(leaky: Side, sound: Side) -> list[str]:
    """What is not as it must be; nothing, if the drill shows what it is to show."""
    found = []
    if leaky.report.verdict != "findings":
        found.append(
            f"the audit of the faulty server found nothing ({leaky.report.reason or leaky.report.verdict})"
        )
    if leaky.bob.status != 200:
        found.append(f"the faulty server answered Bob with {leaky.bob.status}, not with 200")
    if sound.report.verdict != "nothing found":
        found.append(
            f"the audit of the shipped server ended with: {sound.report.reason or sound.report.verdict}"
        )
    if not sound.bob.refused:
        found.append(f"the shipped server answered Bob with {sound.bob.status}, and did not refuse")
    return found


# --------------------------------------------------------------------------------------------- playing


def _play(options: DrillOptions, server_options: LeakyOptions, console: Console) -> Side:
    """Start one server, ask it, end it. Raises LeakyError, DrillError, KeyboardInterrupt."""
    title = FAULTY if server_options.leaky else SHIPPED
    with tempfile.TemporaryDirectory(prefix="hermetic-drill-") as folder:
        server = LeakyServer(Path(folder), server_options)
        if server_options.leaky:
            server.turn("placeholder")
        try:
            with console.status(f"{title}: its server starts ..."):
                server.start()
                context, bob = _alice_and_bob(server)
            console.print(f"{title}: the audit runs, for about {options.budget:.0f} s ...")
            return Side(title, context, bob, _audit(options, server))
        finally:
            server.stop()


def _alice_and_bob(server: LeakyServer) -> tuple[int, Exchange]:
    """What the server advertises, and what Bob gets after Alice. Raises DrillError."""
    try:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            context: int = http.get("/v1/models").json()["data"][0]["max_model_len"]
            alice = _complete(http, ALICE)
            if alice.status != 200:
                raise DrillError(
                    f"Alice's prompt, which fits, was answered with {alice.status}: {alice.text}"
                )
            return context, _complete(http, BOB)
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise DrillError(f"the server gave no answer that can be read: {error!r}\n{server.tail()}") from error


def _complete(http: httpx.Client, prompt: str) -> Exchange:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
    got = http.post("/v1/completions", json=body)
    said = got.json()
    if got.status_code != 200:
        return Exchange(got.status_code, said["error"]["message"], None)
    return Exchange(200, said["choices"][0]["text"], said["usage"]["prompt_tokens"])


def _audit(options: DrillOptions, server: LeakyServer) -> Report:
    """Raises DrillError when nothing could be asked, KeyboardInterrupt when the audit was told to stop: its own report of
    that is of no use here."""
    asked = AuditOptions(
        (server.url,), TargetOptions(), PROFILE, options.scenarios, options.budget, options.seed
    )
    with terminal.Live(quiet=options.quiet) as live:
        report = asyncio.run(audit(asked, live))
    if report.reason == INTERRUPTED:
        raise KeyboardInterrupt
    if not report.compared():
        raise DrillError(f"the audit could not run: {report.reason}")
    return report


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the drill as Ctrl-C does: by way of what ends the servers."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --------------------------------------------------------------------------------------------- showing


def show(console: Console, leaky: Side, sound: Side) -> None:
    """Both reports, side by side where there is room, and whether this is what the drill has to show."""
    panels = [_panel(leaky, "red"), _panel(sound, "green")]
    if console.width >= WIDE:
        table = Table.grid(expand=True)
        table.add_column(ratio=1)
        table.add_column(ratio=1)
        table.add_row(*panels)
        console.print(table)
    else:
        console.print(*panels, sep="\n")
    wrong = faults(leaky, sound)
    for fault in wrong:
        console.print(Text(f"not as it must be: {fault}", style="bold yellow"))
    if not wrong:
        console.print(
            Text.assemble(("The leak", "bold red"), ", and the ", ("refusal", "bold green"), ". ", LESSON)
        )


def _panel(side: Side, colour: str) -> Panel:
    report = side.report
    parts: list[RenderableType] = [
        Text(f"advertises {side.context:,} tokens of context"),
        Text(),
        Text.assemble(("Alice says  ", "dim"), words.line(ALICE, 60)),
        Text.assemble(("Bob sends   ", "dim"), f"a prompt about the weather, over the {PREFILL:,} tokens that prefill holds"),
        _bob(side.bob),
        Text(),
        Text.assemble(("The audit   ", "dim"), (words.headline(report), f"bold {colour}")),
        Text.assemble(("            ", ""), f"{words.count(report.requests, 'request')} in {words.seconds(report.seconds)}"),
        *(_scenario(played) for played in report.scenarios),
    ]  # fmt: skip
    for finding in report.findings[:SHOWN]:
        parts += [Text(), *_finding(finding)]
    more = len(report.findings) - SHOWN
    parts += [Text(), Text(f"and {words.count(more, 'more finding', 'more findings')}")] if more > 0 else []
    parts += [Text(), Text(told)] if (told := words.reason(report) or words.bound_sentence(report)) else []
    return Panel(Group(*parts), title=side.title, border_style=colour)


def _bob(bob: Exchange) -> Text:
    told = Text.assemble(("Bob gets    ", "dim"), (f"HTTP {bob.status}  ", "bold"))
    if bob.prompt_tokens is not None:
        told.append(f"prompt_tokens {bob.prompt_tokens:,}  ")
    text = Text(words.line(bob.text, 300))
    text.highlight_words(MARKS, "bold reverse red")
    return told.append_text(text)


def _scenario(played: Played) -> Text:
    ends = ", ".join(f"{number} {how}" for how, number in sorted(played.how.items()))
    return Text.assemble(("            ", ""), f"{words.line(played.name, 40)}: {ends or played.reason}")


def _finding(finding: Finding) -> list[Text]:
    """What was seen, and the wrong answer with what is another's in reverse."""
    seen = f"{finding.evidence}, seen {words.count(finding.times, 'time')}; {words.chance(finding.p)}"
    told = [Text(words.sentence(finding.what, 240), style="bold"), Text(seen, style="dim")]
    for answer in finding.answers[:1]:
        if answer.text:
            quoted = Text()
            for piece in words.pieces(answer.text[:QUOTED], words.marked_pieces(finding, answer)):
                quoted.append(words.line(piece.text, QUOTED) + " ", "bold reverse red" if piece.whose else "")
            told.append(quoted)
    return told


__all__ = ["DrillError", "DrillOptions", "Exchange", "Side", "faults", "main", "show"]


if __name__ == "__main__":
    raise SystemExit(main())
