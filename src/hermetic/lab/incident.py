"""The incident, staged with a real model and text, and the table of faults and walls, for a person to read.

    python -m hermetic.lab.incident

Alice's prompt says "PELICAN-7731 is Alice." Bob asks about the weather, and the prefill worker does what the provider's
did: it replaces his prompt by one token, fills one page, and reports all of them complete. The one thing to know: with no
wall standing, the witness finds the rows of Alice's own tokens in what Bob's attention read. Exit code 0 when every cell
is as it was worked out beforehand (`expected.py`), 1 when one is not.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hermetic.handoff.outcome import Completed, Failed, Outcome
from hermetic.lab.expected import TABLE_OF_FAULTS
from hermetic.lab.faults import replace_prompts
from hermetic.lab.pair import LabPair
from hermetic.lab.scene import SETTINGS, Setting, StageError, Verdict, play
from hermetic.lab.walls import without
from hermetic.lab.witness import Witness
from hermetic.model.source import locate
from hermetic.model.tokenizer import Tokenizer

MARKER = "PELICAN-7731 is Alice."
SECRET_PROMPT = f"{MARKER} " * 8
QUESTION = (
    "The weather this week. On Monday it rained in the north and the wind came from the sea. On Tuesday the sky was grey "
    "until noon, then the sun came through and the streets dried. On Wednesday there was fog in the valley, and the "
    "hills stood above it like islands. On Thursday a storm crossed the coast in the evening and took some roofs with "
    "it. On Friday it was calm again, cold and clear, with frost on the fields in the morning. For the weekend, the "
    "forecast says that"
)
HARMLESS_QUESTION = "The capital of France is Paris. The capital of Italy is"
ANSWER = 16  # tokens


@dataclass(frozen=True)
class Told:
    """What came of the incident under one setting."""

    setting: Setting
    verdict: Verdict
    outcome: Outcome | None
    text: str  # what Bob got
    other_text: str  # what Carol got, on the same workers at the same time
    marker_rows: int  # K and V rows of Alice's tokens that Bob's attention read and that spell the marker
    marker_read: str  # those tokens, in the order of Alice's prompt, once each position
    usage: int  # prompt tokens that the answer would have been billed for


@functools.cache
def _tokenizer(model: str) -> Tokenizer:
    return Tokenizer.load(locate(model))


def stage(setting: Setting, disturbed: bool = True, model: str = "smollm2") -> Told:
    """Alice, then Bob and Carol, on one pair of workers. `disturbed` False: the same without the fault."""
    tokenizer = _tokenizer(model)
    alice, bob, carol = (tokenizer.encode(t) for t in (SECRET_PROMPT, QUESTION, HARMLESS_QUESTION))
    pair, witness = LabPair(model, verify=setting.verify, threads=1), Witness()
    witness.watch(pair)
    pair.ask(alice, "alice", max_tokens=2)
    if disturbed:
        replace_prompts(pair.prefill, lambda job: job.tokens.tolist() == bob)
    with without(pair, set(setting.away)):
        asked = pair.submit(bob, "bob", max_tokens=ANSWER)
        beside = pair.submit(carol, "carol", max_tokens=ANSWER)
        pair.run()
    pair.check()
    answer, other = pair.answer(asked), pair.answer(beside)
    assert isinstance(other.outcome, Completed), other.outcome
    assert not witness.read_by(beside.ticket)
    spelt = set(tokenizer.encode(MARKER)) | set(tokenizer.encode(f" {MARKER}"))
    rows = [o for o in witness.leaked_to(asked.ticket) if o.owner.tenant == "alice" and o.token in spelt]
    tokens = {o.place.position: o.token for o in rows}
    read = "".join(tokenizer.token_text(tokens[p]) for p in sorted(tokens))
    if isinstance(answer.outcome, Failed) and answer.outcome.code == "kv_integrity":
        verdict = Verdict.CAUGHT
    elif rows:
        verdict = Verdict.LEAK
    else:
        verdict = Verdict.WRONG if witness.read_by(asked.ticket) else Verdict.HARMLESS
    text, beside_text = tokenizer.decode(answer.tokens), tokenizer.decode(other.tokens)
    return Told(setting, verdict, answer.outcome, text, beside_text, len(rows), read, len(bob))


_COLOURS = {
    Verdict.CAUGHT: "green",
    Verdict.HARMLESS: "green",
    Verdict.LEAK: "bold red",
    Verdict.WRONG: "red",
}


_LETTERS = {Verdict.CAUGHT: "c", Verdict.HARMLESS: "h", Verdict.LEAK: "L", Verdict.WRONG: "W"}


def tell(console: Console) -> bool:
    """The story. True when it went as it must."""
    default, bare = SETTINGS[0], SETTINGS[-1]
    console.print(
        f"[bold]Alice[/] says (and her request ends, and her pages are freed): {SECRET_PROMPT[:45]}..."
    )
    console.print(f"[bold]Bob[/] says: ...{QUESTION[-80:]}\n")
    good = True
    for setting, disturbed, must in (
        (default, False, Verdict.HARMLESS),
        (bare, True, Verdict.LEAK),
        (default, True, Verdict.CAUGHT),
    ):
        told = stage(setting, disturbed)
        fault = "faulty prefill" if disturbed else "sound prefill"
        console.print(f"[bold]{setting.name}, {fault}[/]: [{_COLOURS[told.verdict]}]{told.verdict.value}[/]")
        if isinstance(told.outcome, Completed):
            console.print(f"  Bob gets 200, usage.prompt_tokens {told.usage}: {told.text!r}")
        elif told.outcome is not None:
            console.print(f"  Bob gets {told.outcome.code}: {told.outcome.reason}")
        if told.marker_rows:
            console.print(
                f"  His attention read {told.marker_rows} K and V rows of Alice's tokens: {told.marker_read!r}"
            )
        console.print(f"  Carol, beside him, gets: {told.other_text!r}\n")
        good &= told.verdict is must
    return good


def show_table(console: Console) -> bool:
    """Play every cell and print the table. True when all are as expected; one that is not shows both."""
    table = Table(title="fault x walls", show_lines=False, padding=(0, 0))
    table.add_column("fault", ratio=1)
    for number, _ in enumerate(SETTINGS, start=1):
        table.add_column(str(number), justify="center", min_width=2)
    good = True
    console.print(f"playing {len(TABLE_OF_FAULTS) * len(SETTINGS)} cells, some two minutes ...")
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("playing", total=len(TABLE_OF_FAULTS) * len(SETTINGS))
        for fault, verdicts in TABLE_OF_FAULTS:
            cells = []
            for setting, expected in zip(SETTINGS, verdicts, strict=True):
                try:
                    found = play(fault, setting).verdict
                    text = f"[{_COLOURS[found]}]{_LETTERS[found]}[/]"
                except StageError as error:
                    found, text = None, f"[bold yellow]{error}[/]"
                if found is not expected:
                    text += f"[bold yellow]!{_LETTERS[expected]}[/]"
                    good = False
                cells.append(text)
                progress.advance(task)
            table.add_row(fault.name, *cells)
    console.print(table)
    for number, setting in enumerate(SETTINGS, start=1):
        console.print(f"  {number}  {setting.name}")
    console.print("  " + ", ".join(f"{letter} {verdict.value}" for verdict, letter in _LETTERS.items()))
    console.print("  (! before a letter: this was expected instead)")
    return good


def main() -> int:
    console = Console()
    good = tell(console) & show_table(console)
    console.print(
        "[green]everything as worked out beforehand[/]" if good else "[bold yellow]not as expected[/]"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
