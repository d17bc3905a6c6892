"""All mutants against all catchers: the table of docs/proof.md, and what `hermetic prove --mutants` prints.

The one thing to know: a row is good when every catcher that the registry names for it has found it. A catcher that finds
what it need not find is shown all the same.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from hermetic.proof.mutants.catch import TRIES, Catch, catch
from hermetic.proof.mutants.patching import EXPLORER
from hermetic.proof.mutants.registry import CATCHERS, INDUCTION, LAB, SEAL, SIMULATOR, Mutant, find

Progress = Callable[[str], None]
HEADER = ("mutant", "the fault", "explorer", "steps", "induction", "simulator", "seals, lab")


@dataclass
class Row:
    """`catches` by catcher."""

    mutant: Mutant
    catches: dict[str, Catch] = field(default_factory=dict)

    @property
    def missed(self) -> tuple[str, ...]:
        """Catchers that should have found it and did not."""
        return tuple(by for by in self.mutant.caught_by if by in self.catches and not self.catches[by].found)

    @property
    def caught(self) -> bool:
        return not self.missed and any(c.found for c in self.catches.values())

    def cells(self) -> tuple[str, ...]:
        """As HEADER."""
        number = f"{self.mutant.number} " if self.mutant.number else ""
        explorer = self.catches.get(EXPLORER)
        steps = str(explorer.steps) if explorer is not None and explorer.found else ""
        return (
            number + self.mutant.name,
            self.mutant.fault,
            self._cell(EXPLORER),
            steps,
            self._cell(INDUCTION),
            self._simulator(),
            "; ".join(x for x in (self._cell(SEAL), self._cell(LAB)) if x),
        )

    def _cell(self, by: str) -> str:
        found = self.catches.get(by)
        if found is None:
            return ""
        return found.found or ("NOT FOUND" if by in self.mutant.caught_by else "")

    def _simulator(self) -> str:
        found = self.catches.get(SIMULATOR)
        if found is None or not found.found:
            return self._cell(SIMULATOR)
        return f"{found.found}, {found.steps} seed{'s' if found.steps != 1 else ''}"


def table(
    names: Iterable[str],
    progress: Progress | None = None,
    *,
    catchers: Sequence[str] = CATCHERS,
    processes: int = 2,
    tries: int = TRIES,
) -> list[Row]:
    """Every catcher that the registry names for each mutant. Raises MutantError."""
    rows = {name: Row(find(name)) for name in names}
    for result in _results(list(_wanted(rows.values(), catchers)), processes, tries):
        rows[result.mutant].catches[result.by] = result
        if progress is not None:
            progress(
                f"{result.mutant}: {result.by} {result.found or 'does not find it'} ({result.seconds:.1f} s)"
            )
    return list(rows.values())


def _wanted(rows: Iterable[Row], catchers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Long ones first, so that processes end together."""
    pairs = [(row.mutant.name, by) for row in rows for by in row.mutant.caught_by if by in catchers]
    yield from sorted(pairs, key=lambda pair: pair[1] != SIMULATOR)


def _results(wanted: list[tuple[str, str]], processes: int, tries: int) -> Iterator[Catch]:
    if processes < 2 or len(wanted) < 2:
        for name, by in wanted:
            yield catch(name, by, tries=tries)
        return
    # Started afresh, not forked: a mutant must not find another one applied, or threads of torch.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        jobs = [pool.submit(catch, name, by, tries=tries) for name, by in wanted]
        for job in as_completed(jobs):
            yield job.result()


def lines(rows: Sequence[Row], width: int = 100) -> list[str]:
    """For a terminal: two lines a mutant."""
    said = []
    for row in rows:
        name, fault, explorer, steps, *others = row.cells()
        by = [f"explorer {explorer}" + (f" in {steps} steps" if steps else "")] if explorer else []
        by += [
            f"{label} {cell}"
            for label, cell in zip(("induction", "simulator", "lab"), others, strict=True)
            if cell
        ]
        said += [
            f"{'caught' if row.caught else 'MISSED'}  {name}: {fault}"[:width],
            f"        {'; '.join(by)}",
        ]
    caught = sum(row.caught for row in rows)
    return [*said, f"{caught} of {len(rows)} mutants are caught"]


def markdown(rows: Sequence[Row]) -> str:
    """For docs/proof.md."""
    head = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    return "\n".join([*head, *("| " + " | ".join(row.cells()) + " |" for row in rows)]) + "\n"


__all__ = ["HEADER", "Row", "lines", "markdown", "table"]
