"""How a fault is put into the running objects, and taken out again; nothing in product code knows of it.

The one thing to know: a patch that patches nothing proves nothing. A target that is not there (renamed, moved) raises at
once, and every patch counts whether its code was reached, in this process and in those that are forked from it.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

Function = Callable[..., Any]

ANYWHERE, WORKERS, EXPLORER = "anywhere", "workers", "explorer"
"""Where patched code can run: machines and slots run in every search and simulation; workers, engine and gateway only where
those run; the explorer's stand-ins for worker code only there."""


class MutantError(RuntimeError):
    """A mutant changes nothing, or what it changes was not reached: it would be missed for the wrong reason."""


@dataclass(frozen=True)
class Patch:
    """`target`: "module:Class.method" or "module:function". `make` is given what stands there and returns what replaces it."""

    target: str
    make: Callable[[Function], Function]
    runs: str = ANYWHERE


def replaces(target: str, runs: str = ANYWHERE) -> Callable[[Callable[[Function], Function]], Patch]:
    """Decorates a function from the original to its replacement."""
    return lambda make: Patch(target, make, runs)


class Reached:
    """Which patches were reached. The memory is shared with processes that are forked while the mutant is applied."""

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = tuple(patches)
        self._seen = mmap.mmap(-1, max(1, len(patches)))

    def counting(self, number: int, function: Function) -> Function:
        seen = self._seen

        @functools.wraps(function)
        def counted(*args: Any, **named: Any) -> Any:
            seen[number] = 1
            return function(*args, **named)

        return counted

    def missed(self, runs: str) -> list[str]:
        """Targets that should have been reached where `runs` says, and were not."""
        return [
            patch.target
            for patch, seen in zip(self.patches, self._seen, strict=False)
            if patch.runs in (ANYWHERE, runs) and seen == b"\0"
        ]


@contextmanager
def patched(patches: Sequence[Patch], runs: str = "") -> Iterator[Reached]:
    """Put these in until the block is left. `runs`: only those that can run there ("" for all). Raises MutantError."""
    chosen = [p for p in patches if not runs or p.runs in (ANYWHERE, runs)]
    if not chosen:
        raise MutantError(f"this mutant changes nothing of what runs in the {runs}")
    reached = Reached(chosen)
    with ExitStack() as stack:
        for number, patch in enumerate(chosen):
            owner, name = _found(patch.target)
            original = vars(owner)[name]
            replacement = reached.counting(number, patch.make(original))
            if isinstance(owner, type):
                stack.enter_context(mock.patch.object(owner, name, replacement))
            else:
                stack.enter_context(_everywhere(name, original, replacement))
        yield reached


def _found(target: str) -> tuple[Any, str]:
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part, None)
    if owner is None or not callable(vars(owner).get(name)):
        raise MutantError(
            f"{target} is not there any more: this mutant would change nothing; mend its target"
        )
    return owner, name


@contextmanager
def _everywhere(name: str, original: Function, replacement: Function) -> Iterator[None]:
    """A function in every module that has imported it, those that are imported meanwhile as well."""

    def put(old: Function, new: Function) -> None:
        for module in list(sys.modules.values()):
            if module.__name__.startswith("hermetic.") and vars(module).get(name) is old:
                setattr(module, name, new)

    put(original, replacement)
    try:
        yield
    finally:
        put(replacement, original)
