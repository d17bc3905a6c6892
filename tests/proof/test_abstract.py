"""The abstract protocol as it stands: what its text says, by the interpreter and by z3, is one thing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hermetic.proof.abstract import ACTIONS, FORGETTING, HOSTILE, Action
from hermetic.proof.instances import Instance
from hermetic.proof.interpret import NotAllowed, State
from hermetic.proof.invariant import ALONE, CONJUNCTS, MOMENTS, PROMISES
from hermetic.proof.vocabulary import RELATIONS

ATTEMPTS, INDEXES, PAGES, USES = ("A", "B"), (0, 1), ("d0", "d1", "d2"), tuple(product((0, 1), (1, 2)))
FUNCTIONS: dict[str, Any] = {
    "slot": lambda u: f"s{u[0]}",
    "segment": lambda u: "g",
    "owner": lambda g: "decode-0",
    "prefiller": lambda t: "prefill-0",
    "decoder": lambda t: "decode-0",
    "lineage": lambda t, i: (t, i),
}
UNIVERSE: dict[str, tuple[Any, ...]] = {
    "attempt": ATTEMPTS, "index": INDEXES, "page": PAGES, "source": ("p0", "p1", "p2"), "use": USES, "slot": ("s0", "s1"),
    "segment": ("g",), "rows": tuple(product(ATTEMPTS, INDEXES)), "prefiller": ("prefill-0",), "decoder": ("decode-0",),
}  # fmt: skip
NEEDED = (("A", 0), ("A", 1), ("B", 0))
# Taken seldom, or little else would be seen.
SELDOM = {
    "fence", "prefill_dies", "decode_dies", "prefill_aborts", "decode_aborts", "never_reserved", "prefill_fenced",
    "in_doubt", "ask_again",
}  # fmt: skip


def beginning() -> State:
    state = State.first(FUNCTIONS, NEEDED, ("g",))
    for t in ATTEMPTS:
        state.now["prefill"][t], state.now["decode"][t] = "new", "none"
    return state


def ways(action: Action, state: State) -> Iterator[dict[str, Any]]:
    """Parameters with which it can happen."""
    choices: list[list[Any]] = []
    for name, sort in action.params:
        if not sort.startswith("rel"):
            choices.append(list(UNIVERSE[sort]))
        elif name == "junk":
            choices.append([frozenset(), frozenset({("A", 0)})])
        else:
            places = UNIVERSE[sort.split()[2]]
            choices.append([frozenset(), *(frozenset({(0, p)}) for p in places)])
            choices[-1] += [frozenset({(0, p), (1, o)}) for p in places for o in places]
    for values in product(*choices):
        args = dict(zip((name for name, _ in action.params), values, strict=True))
        if state.refuses(action, args) is None:
            yield args


def walk(
    seed: int, steps: int, actions: dict[str, Action]
) -> Iterator[tuple[Action, dict[str, Any], State, State]]:
    """Part of a good request, then whatever comes."""
    draw = random.Random(seed)
    state = beginning()
    for name, args in good_request()[: draw.randrange(len(good_request()) + 1)]:
        after = state.after(name, **args)
        yield ACTIONS[name], args, state, after
        state = after
    for _ in range(steps):
        calm = [
            n for n in actions if n not in {*SELDOM, *FORGETTING, *HOSTILE} and not n.startswith("repeat")
        ]
        rest = [n for n in actions if n not in calm]
        draw.shuffle(calm)
        draw.shuffle(rest)
        names = calm if draw.randrange(6) else rest
        for name in names:
            found = list(ways(actions[name], state))
            args = draw.choice(found) if found else None
            # What says again what was said changes nothing: go on to something else.
            if args is not None and state.after(actions[name], **args) != state:
                after = state.after(actions[name], **args)
                yield actions[name], args, state, after
                state = after
                break


@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_whatever_happens_every_conjunct_holds(seed: int) -> None:
    for action, args, _, after in walk(seed, 50, ACTIONS):
        assert not after.broken(), (action.name, args)
        assert all(after.holds(promise) for promise in PROMISES.values())


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_with_a_lying_prefill_and_a_broken_transport_what_is_said_of_pages_still_holds(seed: int) -> None:
    for action, args, _, after in walk(seed, 40, {**ACTIONS, **HOSTILE}):
        assert all(after.holds(CONJUNCTS[name]) for name in ALONE), (action.name, args)


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
def test_z3_reads_each_step_as_the_interpreter_takes_it(seed: int) -> None:
    for action, args, before, after in walk(seed, 25, ACTIONS):
        assert Instance(action, args, before, after).holds(), (action.name, args)


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**32))
@example(117)  # a page that had no rows is copied from a slot without any
def test_z3_refuses_a_step_whose_guard_the_interpreter_refuses_or_whose_result_is_another(seed: int) -> None:
    draw = random.Random(seed)
    for action, args, before, after in walk(seed, 12, ACTIONS):
        wrong = before.copy()
        for line in action.does[:1]:
            name = line.replace("[", " ").split()[0]
            if before.facts()[name] != after.facts()[name]:
                wrong.now = {**after.now, name: before.now[name]}
                assert not Instance(action, args, before, wrong).holds(), (action.name, args)
        other = ACTIONS[draw.choice(list(ACTIONS))]
        values = {n: draw.choice(UNIVERSE[s]) for n, s in other.params if not s.startswith("rel")}
        if len(values) == len(other.params) and before.refuses(other, values):
            assert not Instance(other, values, before, before).holds(), (other.name, values)


PAGE = ({"i": 0, "u": (0, 1), "p": "d0", "q": "p0"}, {"i": 1, "u": (0, 2), "p": "d1", "q": "p1"})


def good_request() -> list[tuple[str, dict[str, Any]]]:
    """Two pages through one slot, from the beginning to the end, in the words of the protocol."""
    steps: list[tuple[str, dict[str, Any]]] = [
        ("submitted", {}),
        ("reserve", {"take": frozenset({(0, "d0"), (1, "d1")})}),
        ("grant_received", {}),
        ("start", {"take": frozenset({(0, "p0"), (1, "p1")})}),
        ("started_received", {}),
    ]
    for page in PAGE:
        to = {k: page[k] for k in ("i", "u", "q")}
        at = {k: page[k] for k in ("i", "u", "p")}
        steps += [
            ("make", {"i": page["i"], "q": page["q"]}),
            ("grant_use", {"u": page["u"]}),
            ("credit_received", {"u": page["u"]}),
            ("write", to), ("bytes_arrive", to), ("write_ends", to),
            ("announce", {"i": page["i"], "u": page["u"]}),
            ("landed_received", at), ("copy", at), ("verify_good", at),
        ]  # fmt: skip
    steps += [(name, {}) for name in ("completes", "complete_received", "enter", "ack_received")]
    return [(name, {"t": "A", **args}) for name, args in steps]


def test_a_whole_good_request_is_a_run_of_the_protocol() -> None:
    state = beginning()
    for name, args in good_request():
        state.take(name, **args)
        assert not state.broken(), name
    assert {state.now["holds"][p] for _, _, p in state.now["table"]} == {
        frozenset({("A", 0)}),
        frozenset({("A", 1)}),
    }
    state.take("finish", t="A")
    assert (state.now["prefill"]["A"], state.now["decode"]["A"]) == ("ended", "ended")
    assert not any(state.now[name] for name in ("leased", "granted", "kept", "writing", "table", "source"))


@pytest.mark.parametrize("left_out", [name for name, _ in good_request() if name not in ("bytes_arrive",)])
def test_without_any_one_of_its_steps_a_good_request_does_not_come_to_its_end(left_out: str) -> None:
    state, steps = beginning(), good_request()
    steps.pop(next(i for i, (name, _) in enumerate(steps) if name == left_out))
    if left_out == "ack_received":
        for name, args in steps:
            state.take(name, **args)
        assert state.now["prefill"]["A"] == "complete"
        return
    refused = next((s for s in steps if _refuses(state, *s)), None)
    assert refused is not None


def _refuses(state: State, name: str, args: dict[str, Any]) -> bool:
    """Takes the step, or says that it is not possible."""
    refused = state.refuses(name, args) is not None
    if not refused:
        state.take(name, **args)
    return refused


def test_a_refusal_names_the_line_of_the_guard_and_changes_nothing() -> None:
    state = beginning()
    with pytest.raises(NotAllowed, match=r"every page is verified.*decode\[t\] == 'landing'"):
        state.take("enter", t="A")
    assert state == beginning()


def test_only_a_copy_changes_decode_pages_only_computing_source_pages_and_only_writes_slots() -> None:
    def writers(contents: str) -> set[str]:
        return {a.name for a in ACTIONS.values() if any(line.startswith(f"{contents}[") for line in a.does)}

    assert (writers("holds"), writers("contains"), writers("lies")) == ({"copy"}, {"make"}, {"bytes_arrive"})


def test_every_action_relation_conjunct_and_moment_is_said_in_words() -> None:
    said = [*(a.says for a in ACTIONS.values()), *(r.says for r in RELATIONS.values())]
    said += [*(c.says for c in (CONJUNCTS | PROMISES).values()), *(m.says for m in MOMENTS.values())]
    assert all(len(text.split()) > 2 for text in said)
    assert MOMENTS.keys() <= ACTIONS.keys()
