"""What `hermetic prove` is asked to do. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from hermetic.proof.scopes import FAULTS, SCOPES, Scope


class ProveError(ValueError):
    """It cannot be run as asked; the message says why, and what can. Exit code 2."""


@dataclass(frozen=True)
class Sizes:
    """What a person changes in a scope; None leaves it as it is."""

    requests: int | None = None
    prompt_pages: int | None = None  # of the first request; the others have one
    pages: int | None = None
    slots: int | None = None
    prefills: int | None = None
    decodes: int | None = None
    at_most: int | None = None
    faults: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def __bool__(self) -> bool:
        return self != Sizes()


@dataclass(frozen=True)
class ProveOptions:
    """One of `replay`, `conform`, `mutant`, `mutants`, `growth`; or, with none of them, the whole proof of a scope."""

    scope: str = "default"
    sizes: Sizes = field(default_factory=Sizes)
    induction: bool = True
    processes: int = 2
    seed: int = 0
    seconds: float = 120.0  # of random walks
    replay: Path | None = None
    as_test: bool = False
    full: bool = False  # charts with every step
    conform: Path | None = None
    mutant: str = ""
    mutants: bool = False
    write_docs: bool = False
    growth: bool = False
    json: Path | None = None


def parts_of(name: str, sizes: Sizes) -> tuple[Scope, ...]:
    """The parts of a named scope, or one scope of the sizes that were given, the rest as in the first part of that scope.

    Raises ProveError."""
    parts = SCOPES.get(name)
    if parts is None:
        raise ProveError(f"there is no scope {name!r}; there are {', '.join(SCOPES)}")
    if not sizes:
        return parts
    if unknown := [fault for fault in sizes.faults if fault not in FAULTS]:
        raise ProveError(f"there is no fault {unknown[0]!r}; there are {', '.join(FAULTS)}")
    first = parts[0]
    pages = first.pages if sizes.pages is None else sizes.pages
    requests = len(first.prompts) if sizes.requests is None else sizes.requests
    if requests < 1:
        raise ProveError(f"--requests is {requests}; there must be at least 1")
    longest = sizes.prompt_pages or min(max(first.prompts), pages)
    prompts = (longest, *first.prompts[1:requests], *(1 for _ in range(requests - len(first.prompts))))
    faults = dict(first.faults) | dict(sizes.faults)
    at_most = first.at_most if sizes.at_most is None else sizes.at_most
    try:
        return (
            replace(
                first,
                name=f"{name}, changed",
                prompts=prompts[:requests],
                pages=pages,
                slots=first.slots if sizes.slots is None else sizes.slots,
                prefills=sizes.prefills or first.prefills,
                decodes=sizes.decodes or first.decodes,
                faults=faults,
                at_most=min(at_most, sum(faults.values())),
            ),
        )
    except ValueError as error:
        raise ProveError(f"such a scope cannot be: {error}") from error


__all__ = ["ProveError", "ProveOptions", "Sizes", "parts_of"]
