"""Which fault is on in a leaky server, and whether it strikes now. A file, so that one running server plays all of them.

The one thing to know: a rare fault is counted, not diced. Of every `every` occasions on which it could strike it strikes
exactly once, at a place that the seed gives, so that no run of luck hides it and no run of bad luck repeats it.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

VARIABLE = "HERMETIC_LEAKY"  # the switch's file; only lab processes look at it
_LOG = "struck"  # beside the file: a line for each time that a fault has struck


class Switch:
    """One process's view of the file. `state` is the faults' own memory; it begins anew whenever the file changes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.state: dict[str, Any] = {}
        self.every = 1
        self._seen: tuple[int, int] | None = None
        self._fault, self._seed = "", 0
        self._occasions: Counter[str] = Counter()

    @classmethod
    def of_environment(cls) -> Switch:
        """Raises SystemExit when this process was not started by the lab."""
        file = os.environ.get(VARIABLE)
        if not file:
            raise SystemExit(
                f"{VARIABLE} names no file; start leaky servers with `python -m hermetic.lab leaky NAME`"
            )
        return cls(Path(file))

    def on(self, fault: str) -> bool:
        """Whether this fault is the one that is on."""
        self._look()
        return self._fault == fault

    def strikes(self, fault: str) -> bool:
        """One more occasion for this fault: whether it strikes on it. False when it is not on."""
        if not self.on(fault):
            return False
        block, place = divmod(self._occasions[fault], self.every)
        self._occasions[fault] += 1
        if place != random.Random(f"{self._seed}/{fault}/{block}").randrange(self.every):
            return False
        self.struck(fault)
        return True

    def struck(self, fault: str) -> None:
        """Note that it has struck; `strikes` does so by itself."""
        with (self.file.parent / _LOG).open("a") as log:
            log.write(f"{fault}\n")

    def _look(self) -> None:
        stat = os.stat(self.file)
        if (stat.st_ino, stat.st_mtime_ns) == self._seen:
            return
        said = json.loads(self.file.read_text())
        self._seen = stat.st_ino, stat.st_mtime_ns
        self._fault, self._seed, self.every = said["fault"], said["seed"], max(1, said["every"])
        self._occasions.clear()
        self.state.clear()


def turn(file: Path, fault: str, every: int, seed: int = 0) -> None:
    """Switch to this fault ("" for none), for every process that looks at the file. What was counted before is forgotten."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"fault": fault, "every": every, "seed": seed}))
    (file.parent / _LOG).write_text("")
    new.replace(file)


def struck(file: Path, fault: str) -> int:
    """How often a fault has struck since it was switched to."""
    log = file.parent / _LOG
    return log.read_text().split("\n").count(fault) if log.exists() else 0


__all__ = ["VARIABLE", "Switch", "struck", "turn"]
