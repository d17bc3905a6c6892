"""Every scenario, against a server in the test process that is in order, and against such as break one thing each.

The one thing to know: the judge here is a plain one without statistics (the simulated server has no noise), written apart from
`evidence/`; what a scenario has to do is make the comparison in which the fault shows, and none that a clean server fails.
"""

from __future__ import annotations

import itertools
import json
import random

import msgspec
import pytest
import simulated_target as sim
from hypothesis import given
from hypothesis import strategies as st
from simulated_target import LEARNED, LIMIT, PAGE, Clean, Recorder, play

from hermetic.audit.evidence.semantics import Semantics
from hermetic.audit.exchange import Answer, Ask
from hermetic.audit.learned import Edge, Learned
from hermetic.audit.markers import Plant
from hermetic.audit.scenarios import NEEDS, SCENARIOS, chosen
from hermetic.audit.scenarios.asking import Ruler, copy, ids, words_for
from hermetic.audit.scenarios.capacity import overs
from hermetic.audit.scenarios.fields import bad_bodies
from hermetic.audit.stage import SIZES, Stage, changed
from hermetic.options import OptionError

TWO_KEYS = {"keys": 2}


def _stage(learned: Learned, target: Clean | None = None) -> Stage:
    return Stage("any", target or Clean(), learned, Plant(1), Recorder(), sim.TINY, 1, lambda: 100.0)


# ------------------------------------------------------------------------------------ in order


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(SCENARIOS))
async def test_on_a_server_in_order_a_scenario_ends_compares_something_and_nothing_is_wrong(
    name: str, seed: int
) -> None:
    show = await play(name, Clean(), seed=seed, **(TWO_KEYS if name == "keys" else {}))
    assert show.seen.kinds() == set()
    counts = {
        "marker": len(show.record.answers),
        "differential": len(show.record.sames),
        "contrast": len(show.record.contrasts),
        "semantics": len(show.record.refusals) + len(show.record.answers),
        "liveness": len(show.record.serves) + len(show.record.answers),
        "timing": len(show.record.timings),
    }
    assert all(counts[kind] for kind in SCENARIOS[name].evidence), counts
    assert all(answer.how in ("refused", "answered", "left") for answer in show.record.answers)
    assert not show.stage.notes


@pytest.mark.parametrize("name", sorted(SCENARIOS))
async def test_a_scenario_asks_one_by_one_and_beside_each_other(name: str) -> None:
    show = await play(name, Clean(), **(TWO_KEYS if name == "keys" else {}))
    assert show.target.most_open > 1
    assert show.target.most_open < len(show.target.asked)


@pytest.mark.parametrize("name", sorted(SCENARIOS))
@pytest.mark.parametrize(
    "learned",
    [
        msgspec.structs.replace(
            LEARNED, endpoints=("chat",), token_ids=False, page=None, edges={}, claimed=None
        ),
        msgspec.structs.replace(
            LEARNED, endpoints=("completions",), token_ids=False, streams=False, usage=False
        ),
        msgspec.structs.replace(LEARNED, endpoints=("chat", "completions", "generate"), prefill=None, page=1),
        msgspec.structs.replace(
            LEARNED, edges={"chat": Edge(90, 91), "completions": Edge(90, 91)}, claimed=90
        ),
    ],
    ids=["chat-alone", "no-streams", "sglang", "tiny-context"],
)
async def test_a_scenario_can_be_played_on_every_kind_of_server(name: str, learned: Learned) -> None:
    class Other(Clean):
        limit = learned.claimed or LIMIT

    show = await play(name, Other(), learned, **(TWO_KEYS if name == "keys" else {}))
    assert {ask.endpoint for ask in show.target.asked} <= set(learned.endpoints)
    assert not show.seen.kinds() & {"semantics", "marker", "timing"}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
async def test_without_time_a_scenario_still_ends_after_little(name: str) -> None:
    show = await play(name, Clean(), left=0.0, size=SIZES["standard"], **(TWO_KEYS if name == "keys" else {}))
    assert 0 < len(show.target.asked) < 250


@pytest.mark.parametrize(
    "name", sorted(SCENARIOS.keys() - {"soak"})
)  # that one asks for as long as its seconds last
async def test_the_same_seed_asks_the_same(name: str) -> None:
    one, two = [await play(name, Clean(), seed=7, **(TWO_KEYS if name == "keys" else {})) for _ in range(2)]
    assert one.target.asked == two.target.asked


async def test_every_request_carries_the_bound_and_the_key_of_its_tenant() -> None:
    for name in sorted(SCENARIOS):
        show = await play(name, Clean(), keys=2)
        assert all(ask.within >= LEARNED.bound and ask.key in (0, 1) for ask in show.target.asked), name
        assert {ask.key for ask in show.target.asked} == {0, 1}, name


@pytest.mark.parametrize(("at_once", "seconds"), [(None, 30 + 3 * 1600 / 100), (4, 30 + 3 * 800 / 100)])
async def test_beside_others_each_is_waited_for_while_all_of_them_are_read(
    at_once: int | None, seconds: float
) -> None:
    """Eight prompts of 200 tokens at 100 tokens a second, which a server in a crowd may read a third as fast. Two real engines on two cores were
    called silent because eight long prompts took longer to read than one."""
    learned = Learned(model="m", tokens_per_word=2.0, prefill=100.0, bound=30.0)
    target, plant = Clean(), Plant(1)
    stage = Stage("sessions", target, learned, plant, Recorder(), sim.TINY, 1, lambda: 100.0)
    wave = [changed(copy(stage, stage.tenant()), prompt="word " * 100) for _ in range(8)]
    await stage.together([*wave[:-1], changed(wave[-1], within=500.0)], at_once)
    assert [ask.within for ask in target.asked] == [seconds] * 7 + [500.0]


async def test_the_quick_profile_makes_few_requests() -> None:
    """About 2 minutes at 0.3 s a request, with those beside each other counted as four at a time."""
    total = 0
    for name in sorted(SCENARIOS):
        total += (
            len((await play(name, Clean(), size=SIZES["quick"])).target.asked)
            if name not in ("soak", "keys")
            else 0
        )
    assert total < 2_000


# ------------------------------------------------------------------------------------ leaky

LEAKS = [
    ("mixing", sim.RowsSwapped, "marker"),
    ("mixing", sim.RowsSwapped, "differential"),
    ("lengths", sim.LongerBefore, "marker"),
    ("lengths", sim.LongerBefore, "differential"),
    ("first-token", sim.FirstTokens, "marker"),
    ("after-others", sim.WhoCameBefore, "contrast"),
    ("next-to-nothing", sim.ShortRead, "marker"),
    ("page-edges", sim.FullHitAtEdge, "differential"),
    ("shared-prefix", sim.HitTooLong, "marker"),
    ("identical", sim.Deduplicates, "differential"),
    ("abort-prefill", sim.AfterAbort, "marker"),
    ("abort-first-token", sim.AfterAbort, "marker"),
    ("abort-stream", sim.AfterAbort, "marker"),
    ("cancel-storm", sim.DeadAfterStorm, "liveness"),
    ("cancel-storm", sim.AfterAbort, "differential"),
    ("request-ids", sim.IdMeansSlot, "marker"),
    ("request-ids", sim.IdOutlives, "marker"),
    ("forged-fields", sim.Rooms, "differential"),
    ("grammar", sim.AfterBad, "differential"),
    ("grammar", sim.RowsSwapped, "marker"),
    ("malformed", sim.AfterBad, "differential"),
    ("keys", sim.OneCache, "timing"),
    ("salts", sim.OneCache, "timing"),
    ("sessions", sim.BadRestore, "differential"),
    ("soak", sim.Drifts, "differential"),
    ("soak", sim.Crowded, "differential"),
    ("long-prompts", sim.Advertised, "marker"),
    ("long-prompts", sim.Advertised, "differential"),
    ("long-prompts", sim.Advertised, "contrast"),
    ("over-capacity", sim.Placeholder, "marker"),
    ("over-capacity", sim.Placeholder, "semantics"),
    ("over-capacity", sim.Truncates, "semantics"),
    ("over-capacity", sim.RefusesChatOnly, "semantics"),
    ("over-capacity", sim.StuckAtEdge, "liveness"),
    ("exhaustion", sim.Overfull, "marker"),
    ("exhaustion", sim.Overfull, "differential"),
    ("exhaustion", sim.Waited, "differential"),
]


@pytest.mark.parametrize(("name", "leaky", "kind"), LEAKS, ids=[f"{n}-{c.__name__}-{k}" for n, c, k in LEAKS])
async def test_a_server_that_leaks_is_compared_where_it_shows(
    name: str, leaky: type[Clean], kind: str
) -> None:
    show = await play(name, leaky(), **(TWO_KEYS if name == "keys" else {}))
    assert kind in show.seen.kinds()
    assert kind in SCENARIOS[name].evidence


def test_every_scenario_has_a_leak_that_it_finds() -> None:
    assert {name for name, _, _ in LEAKS} == SCENARIOS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mixing", "lengths", "abort-stream", "shared-prefix", "request-ids", "sessions"]
)
async def test_a_leak_of_one_request_in_twenty_shows_in_the_standard_profile(name: str) -> None:
    class Rare(sim.Sometimes):
        every = 20

    show = await play(name, Rare(), size=SIZES["standard"])
    assert len(show.seen.marker) >= 3


# ------------------------------------------------------------------------------------ what each of them says


async def test_only_what_surely_cannot_fit_must_be_refused() -> None:
    """By this server's own count, which is no estimate of ours: every text or list of ids said to be too long is."""
    show = await play("over-capacity", Clean())
    assert show.record.refusals
    for answer, tokens, _ in show.record.refusals:
        assert len(sim.pieces(answer.ask.prompt)) > LIMIT
        assert len(sim.pieces(answer.ask.prompt)) >= tokens


async def test_over_capacity_tries_each_endpoint_with_and_without_streaming_from_the_edge_to_far_beyond() -> (
    None
):
    show = await play("over-capacity", Clean())
    tried = {(a.ask.endpoint, a.ask.stream) for a, _, _ in show.record.refusals}
    assert tried == set(itertools.product(("chat", "completions"), (True, False)))
    exact = {len(a.ask.prompt) for a, _, _ in show.record.refusals if isinstance(a.ask.prompt, tuple)}
    assert {LIMIT + 1, LIMIT + 2, 608, 609, 624} == exact  # 608 = 38 pages of 16, the first boundary past 601
    assert max(tokens for _, tokens, _ in show.record.refusals) == 4 * (LIMIT + 1)


async def test_the_edge_is_tried_from_below_to_the_token() -> None:
    show = await play("over-capacity", Clean())
    lengths = {
        len(a.prompt) for a in show.target.asked if isinstance(a.prompt, tuple) and len(a.prompt) <= LIMIT
    }
    assert {LIMIT, LIMIT - 1, 592, 591, 593, LIMIT - PAGE} <= lengths  # 592 = 37 pages of 16


async def test_after_the_server_is_stuck_nothing_more_is_asked_of_it() -> None:
    show = await play("over-capacity", sim.StuckAtEdge())
    assert sum(a.how == "silent" for a in show.record.answers) <= 3


async def test_what_was_silent_while_it_was_learned_is_asked_once_more_also_without_time() -> None:
    """Else an audit that has seen a hang could end with nothing found."""
    learned = msgspec.structs.replace(
        LEARNED, edges={"completions": Edge(LIMIT - 3, LIMIT + 1, silent=(LIMIT,))}
    )
    show = await play("over-capacity", sim.StuckAtEdge(), learned, left=0.0)
    assert "silent" in [a.how for a in show.record.answers]


@pytest.mark.parametrize("ids", [True, False])
async def test_and_at_exactly_the_length_that_was_silent(ids: bool) -> None:
    """A prompt that is a token shorter is answered, and one that is longer refused; those of token ids, of which there is no doubt, come first."""

    class OneLength(sim.StuckAtEdge):
        def answer(self, ask: Ask, number: int) -> Answer:
            if len(sim.pieces(ask.prompt)) == LIMIT:
                return self.made(ask, number, how="silent")
            return Clean.answer(self, ask, number)

    edge = Edge(LIMIT - 1, LIMIT + 1, silent=(LIMIT,))
    learned = msgspec.structs.replace(
        LEARNED, edges={"chat": edge, "completions": edge}, token_ids=ids, tokens_per_word=1.7
    )
    show = await play("over-capacity", OneLength(), learned, left=0.0)
    silent = [a for a in show.record.answers if a.how == "silent"]
    assert silent
    assert isinstance(silent[0].ask.prompt, tuple) == ids


async def test_what_waited_for_room_is_asked_again_also_where_the_time_ends_meanwhile() -> None:
    target, record, plant = sim.Waited(), Recorder(), Plant(1)
    stage = Stage(
        "exhaustion", target, LEARNED, plant, record, sim.TINY, 1,
        lambda: 100.0 if len(target.asked) <= 2 else -1.0,
    )  # fmt: skip
    await SCENARIOS["exhaustion"].play(stage)
    assert sim.judged(record, plant).differential
    fill = {ask.prompt for ask in target.asked if ask.max_tokens > 24}  # no other request asks for as much
    assert len(fill) == 2 * sim.TINY.requests


def test_a_limit_that_is_only_claimed_is_tested_too() -> None:
    learned = msgspec.structs.replace(
        LEARNED, edges={"chat": Edge(500, None)}, claimed=1000, endpoints=("chat",)
    )
    assert {over.tokens for over in overs(_stage(learned))} == {int(1001 * 1.3) + 8, 2002, 4004}


def test_where_prompts_are_cut_short_and_answered_is_where_they_had_to_be_refused() -> None:
    learned = msgspec.structs.replace(
        LEARNED, edges={"chat": Edge(500, None, cut=501)}, claimed=None, endpoints=("chat",)
    )
    assert {over.tokens for over in overs(_stage(learned))} == {int(501 * 1.3) + 8, 1002, 2004}


async def test_a_prompt_that_was_cut_and_answered_while_it_was_learned_is_asked_again_at_the_beginning() -> (
    None
):
    """Nothing is risked with it, so a server that cuts prompts short is found in the first minutes."""
    learned = msgspec.structs.replace(LEARNED, edges={"chat": Edge(500, None, cut=501)}, endpoints=("chat",))
    show = await play("long-prompts", Clean(), learned)
    assert [tokens for _, tokens, _ in show.record.refusals] == [int(501 * 1.3) + 8]
    assert show.record.answers[0].ask is show.record.refusals[0][0].ask
    show = await play("long-prompts", Clean())
    assert not show.record.refusals


@pytest.mark.parametrize("limit", [900, 2048, 3000, 4096, 5000, 7000, 8192])
async def test_long_prompts_are_not_called_too_fast_where_the_server_was_slow_while_it_was_learned(
    limit: int,
) -> None:
    """It reads 1,000 tokens a second, and 100 were measured: whatever is accepted, two prompts of the right length show it."""

    class Long(Clean):
        pass

    Long.limit = 2 * limit  # its words may have more than a token
    edges = {endpoint: Edge(limit, limit + 1) for endpoint in LEARNED.endpoints}
    learned = msgspec.structs.replace(
        LEARNED, edges=edges, claimed=limit, prefill=100.0, first=0.01, tokens_per_word=1.0
    )
    show = await play("long-prompts", Long(), learned)
    judge = Semantics(learned)
    for answer in show.record.answers:
        judge.seen("long-prompts", answer)
    assert max(len(sim.pieces(ask.prompt)) for ask in show.target.asked) > 0.85 * limit
    assert [finding.what for finding in judge.findings()] == []


async def test_a_server_without_a_limit_is_said_to_be_so() -> None:
    learned = msgspec.structs.replace(LEARNED, edges={}, claimed=None)
    show = await play("over-capacity", Clean(), learned)
    assert not show.record.refusals
    assert any("no limit" in note for note in show.stage.notes)


async def test_page_edges_are_met_to_the_token() -> None:
    show = await play("page-edges", Clean(), size=sim.Size(6, (4,), 8, 1.0))
    lengths = {(a.ask.endpoint, len(sim.pieces(a.ask.prompt)) % PAGE) for a, _, _ in show.record.sames}
    assert lengths == set(itertools.product(("chat", "completions"), (PAGE - 1, 0, 1)))
    assert any(isinstance(a.ask.prompt, tuple) for a, _, _ in show.record.sames)


async def test_a_shared_beginning_is_measured_where_it_can_be() -> None:
    show = await play("shared-prefix", Clean(), size=sim.Size(6, (4,), 8, 1.0))
    shared = [a.prompt for a in show.target.asked if a.endpoint == "completions" and a.max_tokens > 1]
    begins = {len(sim.pieces(p.split("\n")[0])) % PAGE for p in shared}
    assert begins == {PAGE - 1, 0, 1}


async def test_no_tenant_sends_another_tenants_marker() -> None:
    """Else its answer would hold it in order, and be called a leak."""
    for name in sorted(SCENARIOS):
        target, plant = Clean(), Plant(3)
        stage = Stage(name, target, LEARNED, plant, Recorder(), sim.TINY, 3, lambda: 100.0, 2)
        stage.pause = lambda seconds: sim.asyncio.sleep(0)  # type: ignore[method-assign]
        await SCENARIOS[name].play(stage)
        codes = {code: tenant.name for tenant in plant.tenants for code in tenant.codes}
        for ask in target.asked:
            text = f"{ask.system} {ask.prompt} {(ask.raw or b'').decode(errors='replace')}"
            assert {owner for code, owner in codes.items() if code in text} <= {ask.tenant}, (name, ask)


async def test_victims_have_filled_the_pool_before_the_first_prompt_that_does_not_fit() -> None:
    show = await play("over-capacity", Clean())
    first = next(i for i, ask in enumerate(show.target.asked) if len(sim.pieces(ask.prompt)) > LIMIT)
    before = [ask for ask in show.target.asked[:first] if len(sim.pieces(ask.prompt)) > LIMIT / 5]
    assert len({ask.tenant for ask in before}) >= 4


@pytest.mark.parametrize("name", ["abort-prefill", "abort-first-token", "abort-stream"])
async def test_right_behind_one_that_left_come_somebody_new_and_a_retry_and_a_retry_in_quiet(
    name: str,
) -> None:
    show = await play(name, Clean())
    asked = show.target.asked
    left = [i for i, ask in enumerate(asked) if ask.leave_seconds is not None or ask.leave_tokens is not None]
    alone = [i for i in left if asked[i + 2].prompt == asked[i].prompt and i + 2 not in left]
    assert len(alone) == sim.TINY.rounds
    for i in alone:
        assert asked[i + 1].tenant not in {ask.tenant for ask in asked[: i + 1]}
        assert sum(ask.prompt == asked[i].prompt for ask in asked[i + 3 :]) == 1


class AnswersAtOnce(Clean):
    """Nobody can leave it in mid-answer, as behind a proxy that holds answers back until they are whole."""

    def answer(self, ask: Ask, number: int) -> Answer:
        return super().answer(changed(ask, leave_seconds=None, leave_tokens=None), number)


@pytest.mark.parametrize("name", ["abort-prefill", "abort-first-token", "abort-stream", "cancel-storm"])
async def test_where_nobody_could_leave_that_is_said(name: str) -> None:
    show = await play(name, AnswersAtOnce())
    assert show.record.sames
    (note,) = show.stage.notes
    assert "clients could leave" in note


@pytest.mark.parametrize(
    ("name", "what"), [("forged-fields", "forged fields"), ("grammar", "broken grammars")]
)
async def test_kinds_that_had_no_turn_are_counted(name: str, what: str) -> None:
    show = await play(name, Clean(), left=0.0)
    kinds = {"forged-fields": 12, "grammar": 16}[name]  # as written in fields.py
    sent = {"forged-fields": 1, "grammar": 4}[name]  # in the one round that is always played
    assert show.stage.notes == [f"{kinds - sent} of {kinds} {what} had no turn in the time there was"]


async def test_the_probe_after_each_storm_of_cancels_has_to_be_served() -> None:
    show = await play("cancel-storm", Clean())
    storms = [answer.number for answer, why in show.record.serves if "in silence" in why]
    assert len(storms) == 2
    assert all(show.target.asked[number - 1].leave_seconds is None for number in storms)


async def test_conversations_come_back_after_more_than_they_hold_themselves() -> None:
    show = await play("sessions", Clean())
    pairs = [(a, b) for a, b, why in show.record.sames if "before and after" in why]
    assert pairs
    for before, back in pairs:
        between = show.target.asked[before.number : back.number - 1]
        strangers = [ask for ask in between if ask.max_tokens == 12]  # pressure; a turn has more tokens
        assert sum(len(sim.pieces(ask.prompt)) for ask in strangers) > 1000


async def test_an_id_is_given_to_new_tenants_while_it_is_in_use_and_afterwards() -> None:
    show = await play("request-ids", Clean())
    by_id: dict[str, list[Ask]] = {}
    for ask in show.target.asked:
        by_id.setdefault(ask.request_id, []).append(ask)
    del by_id[""]
    assert len(by_id) == sim.TINY.rounds
    for asked in by_id.values():
        tenants = [ask.tenant for ask in asked]
        assert sum(tenants.count(name) == 1 for name in tenants) >= 4  # three at once, one afterwards


async def test_refused_forgeries_are_not_compared_and_every_kind_has_its_turn() -> None:
    class Strict(Clean):
        def answer(self, ask: Ask, number: int) -> sim.Answer:
            odd = set(ask.extra) | set(ask.headers)
            return self.made(ask, number, how="refused", status=400) if odd else super().answer(ask, number)

    show = await play("forged-fields", Strict())
    assert not show.record.sames
    assert not show.seen.kinds()
    kinds = {(*ask.extra, *ask.extra.get("kv_transfer_params", ())) for ask in show.target.asked if ask.extra}
    assert len(kinds) == 11  # and one in headers alone


async def test_a_pair_without_a_router_is_not_sent_forged_rooms() -> None:
    learned = msgspec.structs.replace(LEARNED, facts={"pair": "sglang-pd"})
    show = await play("forged-fields", Clean(), learned)
    assert not any({"bootstrap_room", "kv_transfer_params"} & ask.extra.keys() for ask in show.target.asked)


async def test_letters_are_asked_for_only_as_this_model_answers_them() -> None:
    class Deaf(Clean):
        def text(self, ask: Ask) -> str:
            return super().text(ask) if "Line: " in str(ask.prompt) else "I do not know."

    show = await play("first-token", Deaf())
    assert not show.record.expected
    assert show.record.sames
    assert show.stage.notes == [
        "this model does not answer with a letter it is told; single tokens were only compared"
    ]


async def test_letters_have_a_quiet_baseline_beside_the_wave() -> None:
    show = await play("first-token", Clean())
    alone = sum(not others for _, _, others, _ in show.record.expected)
    assert alone >= len(show.record.expected) / 2 - 1


async def test_both_tenants_of_a_contrast_come_before_it_equally_often() -> None:
    show = await play("after-others", Clean())
    (after,) = show.record.contrasts
    assert [len(answers) for answers in after.values()] == [12, 12]


async def test_a_timing_has_a_control_and_equal_trials() -> None:
    show = await play("keys", Clean(), keys=2)
    ((other, nobody, own),) = show.record.timings
    assert len(other) == len(nobody) == len(own) >= 12  # one of which may be out of place
    assert max(own) < min(nobody)  # the simulated cache: 0.01 s against a millisecond a token more


# ------------------------------------------------------------------------------------ the pieces


@given(st.integers(1, 400), st.integers(0, 2**32))
def test_token_ids_are_as_many_as_asked(count: int, seed: int) -> None:
    made = ids(random.Random(seed), count)
    assert len(made) == count
    assert made == ids(random.Random(seed), count)
    assert all(500 <= i < 16_000 for i in made)


@given(st.integers(1, 200))
async def test_a_ruler_makes_prompts_of_exactly_so_many_tokens(more: int) -> None:
    stage = _stage(LEARNED)
    ask = Ask(tenant="t", prompt=stage.tenant().copy_task())
    measured = await Ruler(stage).measure(ask)
    assert measured is not None
    padded = Ruler(stage).to(ask, measured, measured + more)
    assert len(sim.pieces(padded.prompt)) == measured + more


async def test_a_ruler_cannot_shorten() -> None:
    with pytest.raises(ValueError, match="has 40 tokens and cannot be made 39"):
        Ruler(_stage(LEARNED)).to(Ask(tenant="t", prompt="x"), 40, 39)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_body_that_is_never_a_request_is_none(endpoint: str) -> None:
    """By json of the standard library and the fields' types in OpenAI's API."""
    for bad in bad_bodies("m", endpoint, "a text of some length"):
        assert sim._sane(bad.body, endpoint) is False or not bad.never, bad.what
    assert sum(bad.never for bad in bad_bodies("m", endpoint, "a text")) == 9


@pytest.mark.parametrize(("said", "wrong"), [("", False), ("Alice", True)])
async def test_a_body_without_a_prompt_may_be_answered_with_nothing_and_with_nothing_else(
    said: str, wrong: bool
) -> None:
    """Ollama answers `{"model": ...}` to /v1/completions with 200, no text, and finish_reason "load"."""

    class Loads(Clean):
        def answer(self, ask: Ask, number: int) -> sim.Answer:
            value = json.loads(ask.raw) if ask.raw and ask.prompt == "no prompt" else None
            if value is None:
                return super().answer(ask, number)
            return self.made(ask, number, how="answered", status=200, text=said, finish="load")

    show = await play("malformed", Loads())
    answered = [answer for answer, _, _ in show.record.refusals if answer.how == "answered"]
    assert bool(answered) == wrong
    assert any(
        answer.ask.prompt == "no prompt" and answer.how == "answered" for answer in show.record.answers
    )


@given(st.floats(0.5, 8.0), st.integers(1, 10_000))
def test_words_for_tokens_are_never_none(per_word: float, tokens: int) -> None:
    learned = msgspec.structs.replace(LEARNED, tokens_per_word=per_word)
    assert 1 <= words_for(_stage(learned), tokens) <= 2 * tokens + 1


# ------------------------------------------------------------------------------------ the registry


def test_what_may_take_a_server_down_comes_last() -> None:
    names = [one.name for one, _ in chosen((), "quick", LEARNED, 2)]
    assert names[-2:] == ["over-capacity", "exhaustion"]
    assert len(names) == len(SCENARIOS)


def test_an_unknown_scenario_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        OptionError, match=r"'overcapacity' is not known \(did you mean over-capacity\?\); there are abort-"
    ):
        chosen(("overcapacity",), "quick", LEARNED)


def test_what_cannot_be_played_is_given_back_with_the_reason() -> None:
    bare = msgspec.structs.replace(LEARNED, engine="llama.cpp", streams=False)
    reasons = {one.name: reason for one, reason in chosen((), "standard", bare, 1) if reason}
    assert reasons == {
        "keys": "needs the key of a second customer: --second-key, beside --api-key",
        "salts": "this server is not known to read `cache_salt`",
        "abort-first-token": "this server does not stream, so nobody can leave in mid-answer",
        "abort-stream": "this server does not stream, so nobody can leave in mid-answer",
    }


def test_named_scenarios_are_played_in_the_safe_order_whatever_the_profile() -> None:
    names = [one.name for one, _ in chosen(("over-capacity", "mixing"), "quick", LEARNED)]
    assert names == ["mixing", "over-capacity"]


def test_every_scenario_says_what_it_tries_in_a_sentence() -> None:
    for one in SCENARIOS.values():
        assert one.says.endswith((".", "?")), one.name
        assert len(one.says) < 140, one.name
        assert one.evidence, one.name
        assert set(one.needs) <= NEEDS.keys()
