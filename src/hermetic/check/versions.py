"""Versions of engines, as they stand in logs, images and answers: 0.5.19, 0.5.20.post1, v0.5.23-cu126, 0.32.0+cpu.

The one thing to know: a build of the release itself before it came out (0.5.20rc1, 0.5.20.dev7) may have a fix of 0.5.20 or not, so whether
it is before 0.5.20 is not known; and a name that is no version (latest, a commit) is never compared.
"""

from __future__ import annotations

from packaging.version import InvalidVersion, Version

from hermetic.check import facts
from hermetic.check.facts import NotKnown, Sheet

MOST = 1_000  # a first number above this is a date or a commit, not a version


def parse(text: str) -> Version:
    """Raises NotKnown for what is no version. What follows a dash and is not of a version (-cu126, -rocm700-mi30x) is left out."""
    said = text.strip()
    while said:
        if (found := _parse(said)) is not None:
            return found
        said = said.rpartition("-")[0]
    raise NotKnown(f"{text.strip()[:60]!r} is no version that can be compared")


def _parse(text: str) -> Version | None:
    if not text.isascii() or len(text) > 100:
        return None
    try:
        found = Version(text)
    except InvalidVersion:
        return None
    # setuptools_scm gives 0.0.0 or 0.1.dev0 where it could not find out
    return found if len(found.release) >= 2 and found.release[0] < MOST and found.release > (0, 1) else None


def before(version: Version, release: str) -> bool:
    """Whether it is older than a release. Raises NotKnown for a build made on the way to that very release."""
    wanted = Version(release)
    if version.is_prerelease and Version(version.base_version) == wanted:
        raise NotKnown(
            f"{version} was built before {release} was released; whether it has what {release} has is not known"
        )
    return version < wanted


def of(node: Sheet) -> Version:
    """A node's version. Raises NotKnown, with the node's name."""
    try:
        return parse(node[facts.VERSION])
    except NotKnown as unknown:
        raise NotKnown(_of(node, str(unknown)), unknown.lacks, unknown.ask) from None


def older(node: Sheet, release: str) -> bool:
    """Whether a node's engine is older than a release. Raises NotKnown, with the node's name."""
    version = of(node)
    try:
        return before(version, release)
    except NotKnown as unknown:
        raise NotKnown(_of(node, str(unknown)), unknown.lacks, unknown.ask) from None


def _of(node: Sheet, said: str) -> str:
    return said if said.startswith(f"{node.name}:") else f"{node.name}: the version {said}"


__all__ = ["before", "of", "older", "parse"]
