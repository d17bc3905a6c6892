"""A saved counterexample once more: does it still fail? And the lines of a test that asks this for ever.

The one thing to know: "it no longer fails" is said only when every saved move could be made and nothing broke. A move that
is not possible any more is neither: the protocol has changed, and the search has to be run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hermetic.proof.mutants.patching import EXPLORER, WORKERS, MutantError
from hermetic.proof.mutants.registry import applied, find
from hermetic.proof.saved import Counterexample, SavedError

if TYPE_CHECKING:
    from hermetic.proof.induction import InductionResult

TEST = '''
def test_{name}_does_not_come_back() -> None:
    """{text}"""
    found = load(Path(__file__).parent / {file})
    assert replay(found) is None
'''


def replay(found: Counterexample) -> Counterexample | None:
    """What breaks now, or None. Raises SavedError when it cannot be made again, with the step that is not there any more."""
    match found.source:
        case "explorer":
            return _explored(found)
        case "simulator":
            return _simulated(found)
        case "induction":
            return _induced(found)
        case _:
            return _conformed(found)


def _explored(found: Counterexample) -> Counterexample | None:
    from hermetic.proof.story import again

    refused: SavedError | None = None
    # A mutant is searched for without reductions, and so its path may need states that are reduced away.
    for reduce in (True, False):
        with applied(_known(found), EXPLORER):
            try:
                return again(found, reduce)
            except SavedError as error:
                refused = error
    assert refused is not None
    raise refused


def _simulated(found: Counterexample) -> Counterexample | None:
    from hermetic.proof.simulation.command import replay as simulated
    from hermetic.proof.simulation.options import SimulationError

    try:
        with applied(_known(found), WORKERS):
            return simulated(found)
    except SimulationError as error:
        raise SavedError(str(error)) from error


def _known(found: Counterexample) -> str:
    """The name of its mutant, or "". Raises SavedError for one that is not there any more."""
    try:
        return find(found.mutant).name if found.mutant else ""
    except MutantError as error:
        raise SavedError(f"it was found with a mutant: {error}") from error


def _induced(found: Counterexample) -> Counterexample | None:
    from hermetic.proof.induction import prove_induction

    result = prove_induction(_known(found) or None, full=False)
    return None if result.closed else of_induction(result)


def of_induction(result: InductionResult) -> Counterexample:
    """What does not close, in the protocol's own words: one state, and the action that breaks a conjunct in it."""
    lines = (result.counterexample or "").splitlines()
    text = next((line.partition(":")[2].strip() for line in lines if line.lstrip().startswith("broken:")), "")
    if not text:
        wrong = [f"{q.action} and {q.conjunct}: {q.verdict}" for q in result.queries if q.verdict != "holds"]
        wrong += [f"{name} does not follow" for name, implied in result.implied.items() if not implied]
        wrong += [f"{action} can never happen" for action in result.impossible]
        text = (
            "; ".join(wrong)
            or "the first states do not fulfil it, or I1 rests on more than decode's own steps"
        )
    return Counterexample("induction", text, mutant=result.mutant, source="induction", shows=tuple(lines[1:]))


def _conformed(found: Counterexample) -> Counterexample | None:
    from hermetic.proof.conform import TraceError, conform

    file = found.scope.get("file")
    if not isinstance(file, str):
        raise SavedError("this counterexample does not say which recording it was found in")
    try:
        return conform(Path(file)).violation
    except TraceError as error:
        raise SavedError(str(error)) from error


def as_test(found: Counterexample, file: str) -> str:
    """A pytest module that replays `file`, which is to be kept beside it."""
    name = "".join(c if c.isalnum() else "_" for c in Path(file).stem).strip("_").lower() or "it"
    text = found.text.replace("\\", "\\\\").replace('"', "'")
    body = TEST.format(name=name, text=f"{found.kind}: {text}", file=json.dumps(file))
    return (
        "from pathlib import Path\n\nfrom hermetic.proof.replay import replay\nfrom hermetic.proof.saved import load\n\n"
        + body
    )


__all__ = ["as_test", "of_induction", "replay"]
