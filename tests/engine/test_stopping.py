"""How a choice ends: by its own stop tokens, the model's end token, or its limits."""

from __future__ import annotations

import pytest
from engine_world import Bench, bench, greedy, prompt

from hermetic.engine.sequence import Done

PROMPT = prompt(21)


@pytest.fixture
def b(tiny: str) -> Bench:
    return bench(tiny, 16)


@pytest.fixture
def answer(tiny: str) -> list[int]:
    return greedy(tiny, PROMPT, 12)


def first_new(answer: list[int], at: int) -> int:
    """Index of the first output from `at` on that did not come before."""
    return next(i for i in range(at, len(answer)) if answer[i] not in answer[:i])


def test_the_last_allowed_token_is_emitted_and_ends_the_answer(b: Bench, answer: list[int]) -> None:
    for limit in (1, 2, 12):
        key = b.submit(PROMPT, max_tokens=limit)
        b.run()
        assert b.outputs[key][0] == answer[:limit]
        assert b.done[key][0] == Done(key, 0, "length", None)
        assert b.ended.count(key) == 1
    b.check_idle()


def test_a_stop_token_ends_the_answer_and_is_named(b: Bench, answer: list[int]) -> None:
    at = first_new(answer, 3)
    key = b.submit(PROMPT, max_tokens=12, stop_token_ids=(answer[at], 511))
    b.run()
    assert b.outputs[key][0] == answer[: at + 1]
    assert b.done[key][0] == Done(key, 0, "stop", answer[at])
    b.check_idle()


def test_the_models_end_token_ends_the_answer_unless_it_is_ignored(b: Bench, answer: list[int]) -> None:
    at = first_new(answer, 2)
    b.engine.eos = (answer[at],)
    stops, goes_on = (b.submit(PROMPT, max_tokens=12, ignore_eos=x) for x in (False, True))
    b.run()
    assert b.outputs[stops][0] == answer[: at + 1]
    assert b.done[stops][0] == Done(stops, 0, "stop", answer[at])
    assert b.outputs[goes_on][0] == answer
    assert b.done[goes_on][0].reason == "length"


@pytest.mark.parametrize("kind", ["end token", "stop token"])
def test_before_min_tokens_no_token_that_would_end_the_answer_is_chosen(
    b: Bench, answer: list[int], kind: str
) -> None:
    at = first_new(answer, 2)
    stop = answer[at]
    options = {"ignore_eos": False} if kind == "end token" else {"stop_token_ids": (stop,)}
    if kind == "end token":
        b.engine.eos = (stop,)
    key = b.submit(PROMPT, max_tokens=12, min_tokens=at + 2, **options)
    b.run()
    got = b.outputs[key][0]
    assert got[:at] == answer[:at]
    assert stop not in got[: at + 2]
    assert len(got) >= at + 2


def test_a_request_that_was_preempted_elsewhere_goes_on_from_what_it_had(b: Bench, answer: list[int]) -> None:
    key = b.submit(PROMPT + answer[:5], given=5, max_tokens=12)
    b.run()
    assert b.outputs[key][0] == answer[5:]
    assert b.done[key][0].reason == "length"


def test_an_answer_may_fill_the_window_to_its_last_token(tiny: str) -> None:
    b = bench(tiny, 2)  # 32 tokens in all
    key = b.submit(prompt(20), max_tokens=12)
    b.run()
    assert len(b.outputs[key][0]) == 12
    b.check_idle()


def test_logprobs_belong_to_the_tokens_that_were_chosen(b: Bench) -> None:
    from hermetic.engine.sequence import Emit

    key = b.submit(PROMPT, max_tokens=4, logprobs=3)
    b.run()
    emits = [e for e in b.events if isinstance(e, Emit) and e.key == key]
    assert len(emits) == 4
    for emit in emits:
        assert emit.top is not None
        assert emit.logprob is not None
        assert emit.top[0] == (emit.token, emit.logprob)  # greedy: the most likely is the chosen one
        assert [p for _, p in emit.top] == sorted((p for _, p in emit.top), reverse=True)


def test_penalties_count_the_answers_own_tokens_and_not_the_prompts(b: Bench) -> None:
    """With the strongest penalty and a bias that lets few tokens compete, each comes once before any comes twice."""
    few = {t: 100.0 for t in PROMPT[:4]}
    plain, penal = (b.submit(PROMPT, max_tokens=4, logit_bias=few, presence_penalty=p) for p in (0.0, 2.0))
    b.run()
    assert set(b.outputs[plain][0]) <= set(few)
    assert set(b.outputs[penal][0]) <= set(few)
    again = b.submit(
        PROMPT + b.outputs[penal][0][:2], given=2, max_tokens=4, logit_bias=few, presence_penalty=2.0
    )
    b.run()
    assert b.outputs[again][0] == b.outputs[penal][0][2:]  # tokens of an earlier attempt count as well
    assert len(set(b.outputs[penal][0])) > len(set(b.outputs[plain][0]))
