"""Each kind of evidence: what it calls a finding, and what it must not."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_answers import answered

from hermetic.audit.evidence import Evidence
from hermetic.audit.evidence import marker as marker_module
from hermetic.audit.evidence.differential import ahead, apart, resembles
from hermetic.audit.evidence.planted import Own, foreign
from hermetic.audit.evidence.reading import code_windows, read
from hermetic.audit.exchange import Answer, Ask, Token, Usage
from hermetic.audit.learned import Edge, Learned, Noise
from hermetic.audit.markers import Plant, Tenant
from hermetic.audit.result import Finding

QUIET = Noise(alone_runs=20, beside_runs=40, logprob_error=0.02)


class Bench:
    """An evidence, and tenants to ask in the name of."""

    def __init__(self, **learned: Any) -> None:
        self.plant, self.random = Plant(1), random.Random(1)
        self.evidence = Evidence(Learned(model="simulated", **learned), self.plant)
        self.number = 0

    def tenant(self) -> Tenant:
        return self.plant.tenant(self.random)

    def ask(self, prompt: str | tuple[int, ...] = "Say hello.", **fields: Any) -> Ask:
        return Ask(tenant=self.tenant().name, prompt=prompt, **fields)

    def answer(self, text: str = "hello", ask: Ask | None = None, **fields: Any) -> Answer:
        self.number += 1
        return answered(ask or self.ask(), text, self.number, **fields)

    def kinds(self) -> list[tuple[str, str]]:
        return [(f.evidence, f.detail["kind"]) for f in self.evidence.findings()]

    def only(self) -> Finding:
        (finding,) = self.evidence.findings()
        return finding


def tokens(*pieces: tuple[str, float]) -> list[Token]:
    """Pieces with their probabilities."""
    return [Token(text, 0.1 * i, math.log(p)) for i, (text, p) in enumerate(pieces)]


# ------------------------------------------------------------------------------------ reading


def test_words_are_read_without_case_and_punctuation_and_where_they_stand() -> None:
    reading = read('He said: "ABACUS", abdomen-abide!')
    assert reading.words == {
        "said": [(3, 7)],
        "abacus": [(10, 16)],
        "abdomen": [(19, 26)],
        "abide": [(27, 32)],
    }
    assert ("abacus", "abdomen", "abide") in reading.rows(3)


@pytest.mark.parametrize("text", ["abdom", "omen abdo", "theabdomenwas", "abdxmen", "Abdomen"])
def test_parts_of_words_are_read(text: str) -> None:
    assert "abdomen" in read(text).parts


@pytest.mark.parametrize("text", ["", "abd", "men", "abxxmen", "a b d o m e n", "\ud800\x00٣"])
def test_what_is_no_part_is_not_read(text: str) -> None:
    assert "abdomen" not in read(text).parts


@given(st.text())
def test_any_text_can_be_read_and_spans_lie_in_it(text: str) -> None:
    reading = read(text)
    for spans in (*reading.words.values(), *reading.parts.values()):
        assert all(0 <= a < b <= len(text) for a, b in spans)
    for gram, places in reading.syllables.items():
        for place in places:
            start, end = reading.span(place, 4)
            assert "".join(c for c in text[start:end].lower() if c.isascii() and c.isalpha()) == gram


def test_codes_are_read_with_and_without_hyphens() -> None:
    (first, *_) = code_windows("zuvo-kapi-deno-hira")
    assert first == "zuvokapi"
    for text in ("zuvo-kapi", "ZUVOKAPI.", "zuvo kapi", "zu.vo.ka.pi"):
        assert "zuvokapi" in read(text).syllables


# ------------------------------------------------------------------------------------ marker


def test_a_leak_names_whose_marker_stands_where() -> None:
    bench = Bench()
    victim, _ = bench.tenant(), bench.tenant()
    bench.evidence.seen(
        "mixing", bench.answer(victim.line, Ask(tenant=victim.name, prompt=victim.copy_task()))
    )
    text = f"It is {victim.line}, I think."
    wrong = bench.answer(text)
    bench.evidence.seen("mixing", wrong)
    finding = bench.only()
    assert (finding.evidence, finding.scenario) == ("marker", "mixing")
    assert finding.answers[0] is wrong
    assert finding.answers[1].ask.tenant == victim.name
    assert {text[h.start : h.end] for h in finding.highlights} >= {*victim.words, victim.codes[0]}
    assert {h.whose for h in finding.highlights} == {victim.name}
    assert finding.p is not None
    assert finding.p < 1e-9
    (coverage,) = [c for c in bench.evidence.coverage("mixing") if c.evidence == "marker"]
    assert (coverage.comparisons, coverage.findings, coverage.bound) == (2, 1, None)


def test_a_leak_in_an_error_is_a_leak() -> None:
    bench = Bench()
    victim = bench.tenant()
    bench.evidence.seen("s", bench.answer("", how="failed", error=f"bad prompt: {victim.line}", finish=None))
    assert bench.kinds() == [("marker", "planted markers")]
    assert bench.only().highlights == []


def test_a_leak_in_what_the_prefill_half_says_is_wrong_is_a_leak() -> None:
    bench = Bench()
    victim = bench.tenant()
    half = bench.answer("", how="failed", error=f"bad prompt: {victim.line}", finish=None)
    bench.evidence.seen("s", bench.answer("hello", prefill=half))
    assert ("marker", "planted markers") in bench.kinds()


def test_a_leak_in_what_cannot_be_read_as_an_answer_is_a_leak() -> None:
    bench = Bench()
    victim = bench.tenant()
    came = f"<p>{'-' * 100} {victim.line}</p>"
    bench.evidence.seen(
        "s", bench.answer("", how="garbled", error=f"no JSON object: {came[:80]}", excerpt=came)
    )
    assert bench.kinds() == [("marker", "planted markers")]


def test_one_s_own_markers_and_what_was_sent_are_no_leak() -> None:
    bench = Bench()
    a, b = bench.tenant(), bench.tenant()
    for ask in (
        Ask(tenant=a.name, prompt=(1, 2, 3)),
        Ask(tenant=b.name, prompt=a.copy_task()),
        Ask(tenant=b.name, prompt="Go on.", system=a.secret().system),
        Ask(tenant=b.name, prompt="Go on.", extra={"messages": [{"content": a.line}]}),
        Ask(tenant=b.name, prompt="Go on.", raw=a.copy_task().encode()),
    ):
        text = " ".join(a.words) if ask.system else a.line
        bench.evidence.seen("s", bench.answer(text, ask))
    assert bench.kinds() == []


def test_one_s_own_words_count_for_nobody_even_where_the_request_is_token_ids() -> None:
    """The list is dealt more than once in a long run: another tenant may have the same word."""
    bench = Bench()
    one = bench.tenant()
    own = Own(one, Ask(tenant=one.name, prompt=(1, 2)))
    words, parts = foreign(read(one.line + " abacus"), own)
    assert "abacus" in words
    assert not (words | parts) & set(one.words)
    assert own.excluded() == set(one.words)


def test_the_same_leak_a_hundred_times_is_one_finding() -> None:
    bench = Bench()
    for _ in range(100):
        victim = bench.tenant()
        bench.evidence.seen("s", bench.answer(victim.line))
    assert bench.only().times == 100
    assert len(bench.only().answers) <= 6


def test_what_is_kept_of_a_long_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marker_module, "KEPT_BYTES", 50_000)
    bench = Bench()
    for _ in range(200):
        tenant = bench.tenant()
        bench.evidence.seen(
            "s", bench.answer(tenant.line, Ask(tenant=tenant.name, prompt=tenant.copy_task(300)))
        )
    recent = bench.evidence._markers._recent
    assert sum(len(a.ask.prompt) for a, _ in recent._kept.values()) <= 50_000


def expect(bench: Bench, alone: list[str], beside: list[str], probability: float | None = None) -> None:
    for text in alone:
        bench.evidence.expects("letters", bench.answer(text), "K", (), "told K")
    for text in beside:
        given = [] if probability is None else tokens((text, probability))
        bench.evidence.expects("letters", bench.answer(text, tokens=given), "K", "KQZ", "told K")


def test_another_s_letter_is_a_finding_if_the_model_never_errs_alone() -> None:
    bench = Bench()
    expect(bench, ["K"] * 40, ["K"] * 20 + ["Q"] * 20)
    finding = bench.only()
    assert finding.detail["kind"] == "another's expected answer"
    # Fisher by hand: all 20 of 20 wrong ones among the last 40 of 80, times 1 / (0.02 * 0.4).
    assert finding.p == pytest.approx(math.comb(40, 20) / math.comb(80, 20) / 0.008)


def test_a_model_that_errs_by_itself_is_not_accused() -> None:
    bench = Bench()
    expect(bench, ["K"] * 20 + ["A"] * 20, ["K"] * 20 + ["Q"] * 20, 0.99)
    assert bench.kinds() == []


def test_rare_swaps_far_from_a_tie_are_enough_and_near_ties_are_not() -> None:
    bench = Bench()
    expect(bench, ["K"] * 8, ["K"] * 40 + ["Q"] * 2, 0.99)
    assert bench.kinds() == [("marker", "another's expected answer")]
    bench = Bench()
    expect(bench, ["K"] * 8, ["K"] * 40 + ["Q"] * 2, 0.55)
    assert bench.kinds() == []


# ------------------------------------------------------------------------------------ differential


def pair(bench: Bench, alone: list[Token], again: list[Token], **fields: Any) -> None:
    ask = bench.ask("Say what you like.", **fields)
    made = [bench.answer("".join(t.text for t in ts), ask, tokens=ts) for ts in (alone, again)]
    bench.evidence.same("mixing", *made, "beside others")


def test_a_near_tie_that_tips_is_arithmetic() -> None:
    bench = Bench(noise=QUIET)
    pair(bench, tokens((" one", 0.9), (" two", 0.51)), tokens((" one", 0.9), (" six", 0.5)))
    assert bench.kinds() == []
    assert bench.evidence.noise()["tipped"] == 1
    assert any("within arithmetic" in note for note in bench.evidence.notes())


def test_a_sure_token_that_becomes_another_sure_token_is_a_finding() -> None:
    bench = Bench(noise=QUIET)
    pair(bench, tokens((" one", 0.9), (" two", 0.95)), tokens((" one", 0.9), (" six", 0.9)))
    assert bench.kinds() == [("differential", "moved")]
    # ln(0.95/0.05) + ln(0.9/0.1) = 2.94 + 2.20
    assert bench.only().detail["moved"] == pytest.approx(5.14, abs=0.01)
    assert bench.only().detail["at"] == 5


def test_equal_text_with_other_logprobs_is_a_finding() -> None:
    bench = Bench(noise=QUIET)
    pair(bench, tokens((" one", 0.9), (" two", 0.9)), tokens((" one", 0.9), (" two", 0.3)))
    assert bench.kinds() == [("differential", "moved")]
    bench = Bench(noise=QUIET)
    pair(bench, tokens((" one", 0.9), (" two", 0.9)), tokens((" one", 0.9), (" two", 0.72)))
    assert bench.kinds() == []


def test_a_server_of_which_little_is_known_is_given_more_room() -> None:
    """ln(0.9 / 0.5) = 0.59: more than 0.25, less than 0.75."""
    for noise, kinds in (
        (Noise(beside_runs=8, logprob_error=0.0), [("differential", "moved")]),
        (Noise(beside_runs=7, logprob_error=0.0), []),
        (Noise(beside_runs=40, logprob_error=None), []),
    ):
        bench = Bench(noise=noise)
        pair(bench, tokens((" one", 0.9)), tokens((" one", 0.5)))
        assert bench.kinds() == kinds


def test_a_server_that_varies_much_by_itself_is_given_more_room() -> None:
    bench = Bench(noise=Noise(beside_runs=40, logprob_error=0.5))
    pair(bench, tokens((" one", 0.9)), tokens((" one", 0.1)))  # ln 9 = 2.2, below 6 * 0.5
    assert bench.kinds() == []


def test_an_answer_that_ends_where_it_surely_went_on_is_a_finding() -> None:
    bench = Bench(noise=QUIET)
    pair(bench, tokens((" one", 0.9), (" two", 0.99)), tokens((" one", 0.9)))
    assert bench.kinds() == [("differential", "moved")]


def test_other_temperatures_and_other_requests_are_not_compared() -> None:
    bench = Bench(noise=QUIET)
    pair(bench, tokens((" one", 0.99)), tokens((" six", 0.99)), temperature=1.0)
    a, b = (bench.answer(t, bench.ask(t), tokens=tokens((t, 0.99))) for t in ("one", "six"))
    bench.evidence.same("mixing", a, b, "")
    assert bench.kinds() == []
    assert bench.evidence.coverage("mixing") == []


def test_pieces_cut_otherwise_are_not_taken_for_a_difference() -> None:
    a = answered(Ask(tenant="a", prompt="x"), "one two", tokens=tokens(("one", 0.9), (" two", 0.9)))
    b = answered(Ask(tenant="a", prompt="x"), "one two", tokens=tokens(("one two", 0.8)))
    assert apart(a, b) == (None, None)


@given(st.floats(1e-6, 0.999))
def test_how_far_ahead_is_the_log_odds_and_never_below_nothing(p: float) -> None:
    assert ahead(math.log(p)) == pytest.approx(max(0.0, math.log(p / (1 - p))), abs=1e-6)


def copies(bench: Bench, broken: int, whole: int) -> None:
    """Copy tasks on a server without logprobs."""
    for number in range(broken + whole):
        tenant = bench.tenant()
        ask = Ask(tenant=tenant.name, prompt=tenant.copy_task())
        again = "I do not know what you mean" if number < broken else tenant.line
        bench.evidence.same(
            "mixing", bench.answer(tenant.line, ask), bench.answer(again, ask), "beside others"
        )


def test_broken_copies_without_logprobs_are_counted_against_the_calibrating_runs() -> None:
    bench = Bench(noise=Noise(alone_runs=20, beside_runs=40, beside_differ=1))
    copies(bench, 20, 20)
    assert bench.only().detail["kind"] == "broken copies"
    assert not any("copy tasks broke" in note for note in bench.evidence.notes())
    # By hand: at least 20 of 40 among 21 of 100 that differ, times 1 / 0.2.
    ways = sum(math.comb(21, k) * math.comb(79, 40 - k) for k in (20, 21))
    assert bench.only().p == pytest.approx(5 * ways / math.comb(100, 40))


def test_few_broken_copies_are_not_more_than_the_calibrating_runs_allow() -> None:
    bench = Bench(noise=Noise(alone_runs=20, beside_runs=40, beside_differ=1))
    copies(bench, 3, 37)
    assert bench.kinds() == []
    assert any("3 of 40 copy tasks broke" in note for note in bench.evidence.notes())


def test_resemblance_is_the_share_of_words_in_both() -> None:
    assert resembles("a b c d", "a b x y") == 0.5
    assert resembles("", "") == 1.0
    assert resembles("a", "") == 0.0


# ------------------------------------------------------------------------------------ contrast


def contrast(bench: Bench, a: str, b: str, how: str = "answered") -> None:
    """`a`, `b`: one letter for each answer after the one victim and after the other."""
    ask = bench.ask("Say a letter.")
    after = {name: [bench.answer(c, ask, how=how) for c in texts] for name, texts in (("A", a), ("B", b))}
    bench.evidence.contrast("after", after, "after another")


def test_answers_that_group_by_who_came_before_are_a_finding() -> None:
    bench = Bench()
    contrast(bench, "xxxxxxxxxxxx", "yyyyyyyyyyyy")
    # 2 of the C(24, 12) arrangements group as well, times 1 / 0.2.
    assert bench.only().p == pytest.approx(5 * 2 / math.comb(24, 12))


def test_several_small_comparisons_count_together() -> None:
    bench = Bench()
    for _ in range(6):
        contrast(bench, "xxx", "yyy")  # 2 of 20 each
    assert bench.only().p == pytest.approx(5 / 10**6)
    bench = Bench()
    contrast(bench, "xxx", "yyy")
    assert bench.kinds() == []


def test_answers_of_which_even_the_clearest_groups_would_be_no_finding_are_not_shown_as_compared() -> None:
    """2 of C(14, 7) = 3,432, times 1 / 0.2, is more than 0.001; 2 of C(16, 8) = 12,870 is less."""
    bench = Bench()
    contrast(bench, "xxxxxxx", "yyyyyyy")
    assert bench.kinds() == []
    assert bench.evidence.coverage("after") == []
    assert any("14 answers are too few" in note for note in bench.evidence.notes())
    bench = Bench()
    contrast(bench, "xxxxxxxx", "yyyyyyyy")
    assert bench.kinds() == [("contrast", "grouped")]
    assert not any("too few" in note for note in bench.evidence.notes())


@pytest.mark.parametrize(
    ("a", "b"), [("xyxyxyxyxyxy", "xyxyxyxyxyxy"), ("xxxxxxxxxxxx", "xxxxxxxxxxxx"), ("x", "y")]
)
def test_answers_that_do_not_group_are_none(a: str, b: str) -> None:
    bench = Bench()
    contrast(bench, a, b)
    assert bench.kinds() == []


def test_unanswered_requests_are_not_contrasted() -> None:
    bench = Bench()
    contrast(bench, "xxxxxxxxxxxx", "yyyyyyyyyyyy", how="failed")
    assert bench.kinds() == []
    assert bench.evidence.coverage("after") == []


def test_near_ties_that_group_are_arithmetic() -> None:
    bench = Bench(noise=QUIET)
    ask = bench.ask("Say a letter.")
    after = {n: [bench.answer(n, ask, tokens=tokens((n, 0.51))) for _ in range(12)] for n in "AB"}
    bench.evidence.contrast("after", after, "after another")
    assert bench.kinds() == []


# ------------------------------------------------------------------------------------ semantics

LEARNED = {"edges": {"chat": Edge(2000, 2001)}, "tokens_per_word": 1.6, "prefill": 1000.0}


def test_what_cannot_fit_must_not_be_answered() -> None:
    bench = Bench(**LEARNED)
    bench.evidence.must_refuse("over", bench.answer("-along with Alice"), 5000, "larger than the pool")
    assert bench.kinds() == [("semantics", "accepted")]


@pytest.mark.parametrize(
    "fields",
    [
        {"how": "refused", "status": 400},
        {"how": "failed", "status": 200},
        {"how": "limited"},
        {"how": "unreachable"},
        {"how": "answered", "finish": "abort"},
    ],
)
def test_a_refusal_is_in_order(fields: dict[str, Any]) -> None:
    bench = Bench(**LEARNED)
    bench.evidence.must_refuse("over", bench.answer("", **fields), 5000, "larger than the pool")
    assert bench.kinds() == []


def test_half_an_answer_to_what_cannot_fit_is_one() -> None:
    bench = Bench(**LEARNED)
    bench.evidence.must_refuse("over", bench.answer("Alice", how="left"), 5000, "larger than the pool")
    assert bench.kinds() == [("semantics", "accepted")]


@pytest.mark.parametrize(
    ("how", "found"),
    [("answered", 0), ("limited", 0), ("unreachable", 0), ("refused", 1), ("failed", 1), ("cut", 1)],
)
def test_what_is_in_order_must_be_served(how: Any, found: int) -> None:
    bench = Bench(**LEARNED)
    bench.evidence.must_serve("over", bench.answer("", how=how), "a plain request")
    assert len(bench.kinds()) == found


def semantics(bench: Bench, ask: Ask, **fields: Any) -> list[str]:
    bench.evidence.seen("s", bench.answer(fields.pop("text", "hello"), ask, **fields))
    return [kind for evidence, kind in bench.kinds() if evidence == "semantics"]


WORDS = " ".join(["house"] * 1000)


@pytest.mark.parametrize(
    ("prompt", "counted", "kind"),
    [
        (WORDS, 1, "fewer counted"),
        (WORDS, 699, "fewer counted"),
        (WORDS, 700, None),
        (WORDS, 1600, None),
        (WORDS, 5999 + 2049, "more counted"),
        ("Hello there", 1, None),
        (tuple(range(100)), 99, "fewer counted"),
        (tuple(range(100)), 100, None),
        (tuple(range(100)), 101, None),
        (tuple(range(100)), 165, "more counted"),
        (WORDS, None, None),
        (WORDS, 0, None),  # it does not count
        ("", 0, None),  # Ollama and llama.cpp: nothing was sent, and nothing is read
    ],
)
def test_counts_of_the_prompt(prompt: Any, counted: int | None, kind: str | None) -> None:
    bench = Bench(**LEARNED)
    ask = bench.ask(prompt, endpoint="completions")
    assert semantics(bench, ask, usage=Usage(prompt=counted), first=5.0) == ([kind] if kind else [])


def test_the_same_prompt_counts_the_same_every_time() -> None:
    bench = Bench(**LEARNED)
    ask = bench.ask("What is two and three?")
    assert semantics(bench, ask, usage=Usage(prompt=12)) == []
    assert semantics(bench, ask, usage=Usage(prompt=12)) == []
    assert semantics(bench, ask, usage=Usage(prompt=14)) == ["counts differ"]


def test_a_server_that_does_not_count_what_is_cached_is_not_accused_of_it() -> None:
    """As Ollama 0.30.0: llama-server's `prompt_n`, without `cache_n`."""
    bench = Bench(**LEARNED, counts_cached=False)
    ask = bench.ask(WORDS)
    assert semantics(bench, ask, usage=Usage(prompt=1600), first=5.0) == []
    assert semantics(bench, ask, usage=Usage(prompt=1), first=5.0) == []
    assert semantics(bench, bench.ask("x"), usage=Usage(prompt=3000)) == ["more counted"]
    with_fields = bench.ask(WORDS, extra={"cache_salt": "a"})
    first, again = (bench.answer(ask=with_fields, usage=Usage(prompt=n)) for n in (1600, 1))
    bench.evidence.same("s", first, again, "alone and in company")
    assert bench.kinds() == [("semantics", "more counted")]
    assert any("leaves out what it took from its cache" in note for note in bench.evidence.notes())


def test_a_remembered_prompt_is_kept_in_part_alone() -> None:
    """Of thousands of prompts, some with a million tokens: 4,096 whole ones would be gigabytes."""
    bench = Bench(**LEARNED)
    ask = bench.ask("house " * 100_000)
    assert semantics(bench, ask, usage=Usage(prompt=100_000), first=500.0) == []
    assert semantics(bench, ask, usage=Usage(prompt=100_001), first=500.0) == ["counts differ"]
    before = bench.only().answers[1]
    assert len(before.ask.prompt) < 21_000


def test_two_halves_must_count_alike_and_refuse_alike() -> None:
    bench = Bench(**LEARNED)
    half = bench.answer("", usage=Usage(prompt=12))
    assert semantics(bench, bench.ask(), usage=Usage(prompt=12), prefill=half) == []
    assert semantics(bench, bench.ask("Hello."), usage=Usage(prompt=13), prefill=half) == ["halves differ"]
    refused = bench.answer("", how="refused", error="too long")
    assert semantics(bench, bench.ask(), prefill=refused)[-1] == "refused by one half"


def test_ends_that_hide_something() -> None:
    assert semantics(Bench(**LEARNED), Ask(tenant="a", prompt="x"), finish=None) == ["no finish reason"]
    assert semantics(Bench(**LEARNED), Ask(tenant="a", prompt="x"), error="KV load failed") == [
        "hidden error"
    ]
    short = {"finish": "length", "usage": Usage(prompt=10, completion=3)}
    assert semantics(Bench(**LEARNED), Ask(tenant="a", prompt="x"), **short) == ["short"]
    full = {"finish": "length", "usage": Usage(prompt=1990, completion=3)}
    assert semantics(Bench(**LEARNED), Ask(tenant="a", prompt=WORDS), **full, first=9.0) == []


@pytest.mark.parametrize(
    "told",
    [{"raw": b'{"max_tokens": 3}'}, {"extra": {"max_tokens": 3}}, {"extra": {"max_completion_tokens": 40}}],
)
def test_where_the_body_says_another_limit_the_length_is_not_judged(told: dict[str, object]) -> None:
    ask = Ask(tenant="a", prompt="x", **told)  # type: ignore[arg-type]
    for completion in (3, 40):  # Ask.max_tokens is 32
        assert (
            semantics(Bench(**LEARNED), ask, finish="length", usage=Usage(prompt=10, completion=completion))
            == []
        )


def test_more_tokens_than_asked_for() -> None:
    ask = Ask(tenant="a", prompt="x", max_tokens=4)
    assert semantics(Bench(), ask, usage=Usage(completion=5)) == ["more than asked"]
    assert semantics(Bench(), ask, usage=Usage(completion=4)) == []
    assert semantics(Bench(), ask, text="a b c d e", tokens=tokens(*[(" a", 0.5)] * 5)) == ["more than asked"]


def test_a_new_prompt_cannot_be_read_four_times_as_fast_as_the_best() -> None:
    """1,000 words are 1,600 tokens by our measure: 1.6 s at 1,000 tokens a second, and 0.4 s is four times as fast."""
    bench = Bench(**LEARNED)
    assert semantics(bench, bench.ask(WORDS), first=0.41) == []
    assert semantics(bench, bench.ask(WORDS), first=0.001) == []  # it may be cached now
    assert semantics(bench, bench.ask("A " + WORDS), first=0.39) == ["too fast"]
    assert semantics(Bench(), Ask(tenant="a", prompt=WORDS), first=0.001) == []  # nothing was measured


@pytest.mark.parametrize("before", [True, False])
def test_a_server_that_was_busy_while_it_was_measured_may_be_faster_later(before: bool) -> None:
    """A short prompt took 0.2 s then and takes 0.05 s now: so may others take a quarter. 1,600 tokens at 1,000 a second are 1.6 s, then 0.4 s; and a
    quarter of that is 0.1 s. What is learned of it later counts as well."""
    bench = Bench(**{**LEARNED, "first": 0.2})
    quick = bench.ask("a few words")
    if before:
        semantics(bench, quick, first=0.05)
    fast = semantics(bench, bench.ask("A " + WORDS), first=0.11)
    assert fast == ([] if before else ["too fast"])
    semantics(bench, quick, first=0.05)
    assert bench.kinds() == []
    assert semantics(bench, bench.ask("B " + WORDS), first=0.09) == ["too fast"]


def test_an_answer_without_a_word_says_nothing_of_how_fast_a_server_is() -> None:
    """To an empty prompt Ollama answers at once and with nothing: that its model is loaded."""
    bench = Bench(**{**LEARNED, "first": 0.2})
    bench.evidence.seen("s", bench.answer("", bench.ask(""), first=0.001, finish="load"))
    assert semantics(bench, bench.ask("A " + WORDS), first=0.11) == ["too fast"]


@pytest.mark.parametrize(("words", "judged"), [(200, []), (600, ["too fast"]), (40, ["too fast"])])
def test_what_prompts_of_half_that_length_were_seen_to_take_counts_as_well(
    words: int, judged: list[str]
) -> None:
    """200 words are 320 tokens, in 0.05 s: at 6,400 a second 1,600 tokens are 0.25 s, and 0.1 s is not four times as fast. 600 words are 960 tokens, more
    than half, and 40 are 64: neither says how fast 1,600 can be read."""
    bench = Bench(**{**LEARNED, "first": 0.01})
    assert semantics(bench, bench.ask("A " + WORDS), first=0.1) == ["too fast"]
    semantics(bench, bench.ask(" ".join(["garden"] * words)), first=0.05)
    assert [kind for evidence, kind in bench.kinds() if evidence == "semantics"] == judged


def test_a_time_is_judged_by_the_fewest_tokens_that_can_be_meant() -> None:
    """Of 1,600 by our measure and 1,000 by the server's count: 1 s, so 0.3 s is not four times as fast. At 10,000 tokens a
    second 0.02 s would be, but a gap of 0.14 s is what a busy moment makes."""
    bench = Bench(**LEARNED)
    assert semantics(bench, bench.ask(WORDS), first=0.3, usage=Usage(prompt=1000)) == []
    assert semantics(bench, bench.ask("A " + WORDS), first=0.2, usage=Usage(prompt=1000)) == ["too fast"]
    fast = Bench(**{**LEARNED, "prefill": 10_000.0})
    assert semantics(fast, fast.ask(WORDS), first=0.02) == []


# ------------------------------------------------------------------------------------ liveness


def test_silence_is_a_finding_and_says_whether_others_are_served() -> None:
    bench = Bench()
    bench.evidence.seen("over", bench.answer("", how="silent", sent=10.0, finish=None, tokens=[]))
    assert "nothing sent afterwards was answered" in bench.only().what
    bench.evidence.seen("over", bench.answer(sent=20.0))  # sent while the silent one was open
    assert "nothing sent afterwards was answered" in bench.only().what
    bench.evidence.seen("later", bench.answer(sent=71.0))
    assert "1 requests sent afterwards were answered" in bench.only().what
    assert bench.only().detail["answered_after"] == 1


def test_a_slow_answer_is_not_silent_and_hanging_up_says_nothing() -> None:
    bench = Bench()
    late = [Token("a", 50.0)]
    bench.evidence.seen("s", bench.answer("a", how="silent", tokens=late, finish=None))
    bench.evidence.seen("s", bench.answer("a", how="left", finish=None))
    bench.evidence.seen("s", bench.answer("", how="unreachable", finish=None))
    assert bench.kinds() == []
    assert any("slow" in note for note in bench.evidence.notes())
    (liveness,) = [c for c in bench.evidence.coverage("s") if c.evidence == "liveness"]
    assert liveness.comparisons == 1


def test_an_answer_that_stopped_long_ago_is_silent() -> None:
    bench = Bench()
    bench.evidence.seen("s", bench.answer("a", how="silent", tokens=[Token("a", 3.0)], finish=None))
    assert bench.kinds() == [("liveness", "silent")]


def test_what_was_under_way_when_the_server_went_is_not_called_silent() -> None:
    """Nobody knows what it would have got. It is one as soon as the server turns out to be there."""
    bench = Bench()
    for sent in (10.0, 11.0):  # both had 60 s
        bench.evidence.seen("s", bench.answer("", how="silent", sent=sent, finish=None, tokens=[]))
    bench.evidence.seen("s", bench.answer("", how="unreachable", sent=70.5, finish=None, tokens=[]))
    assert bench.kinds() == []
    bench.evidence.seen("s", bench.answer(sent=12.0))  # it was answered before the server went
    assert bench.kinds() == []
    bench.evidence.seen("s", bench.answer(sent=75.0))
    assert bench.kinds() == [("liveness", "silent")]
    assert bench.only().times == 2


def test_a_silence_long_before_the_server_went_is_one() -> None:
    bench = Bench()
    bench.evidence.seen("s", bench.answer("", how="silent", sent=10.0, finish=None, tokens=[]))
    bench.evidence.seen("s", bench.answer("", how="unreachable", sent=90.0, finish=None, tokens=[]))
    assert bench.kinds() == [("liveness", "silent")]


# ------------------------------------------------------------------------------------ timing

FAST, SLOW = [0.10 + i / 1000 for i in range(12)], [0.30 + i / 1000 for i in range(12)]


def test_another_key_s_prompt_that_makes_one_s_own_faster_is_a_finding() -> None:
    bench = Bench()
    bench.evidence.timing("keys", FAST, SLOW, FAST, "the same prompt")
    finding = bench.only()
    # All 12 fast ones in the lower half of 24: 1 of C(24, 12), times 1 / 0.2.
    assert finding.p == pytest.approx(5 / math.comb(24, 12))
    assert finding.detail["ratio"] == pytest.approx(0.1055 / 0.3055)
    assert finding.detail["cliffs_delta"] == 1.0


def test_without_the_positive_control_nothing_is_said() -> None:
    bench = Bench()
    bench.evidence.timing("keys", FAST, SLOW, SLOW, "the same prompt")
    assert bench.kinds() == []
    assert bench.evidence.coverage("keys") == []
    assert any("cannot be told by time" in note for note in bench.evidence.notes())


def test_times_of_which_even_the_clearest_would_be_no_finding_are_not_shown_as_compared() -> None:
    """All 7 in the lower half of 14: 1 of C(14, 7) = 3,432, times 1 / 0.2, is more than 0.001; of 16 it is 1 of 12,870, and less."""
    bench = Bench()
    bench.evidence.timing("keys", FAST[:7], SLOW[:7], FAST[:7], "the same prompt")
    assert bench.kinds() == []
    assert bench.evidence.coverage("keys") == []
    assert any("7 trials" in note and "too few" in note for note in bench.evidence.notes())
    bench = Bench()
    bench.evidence.timing("keys", FAST[:8], SLOW[:8], FAST[:8], "the same prompt")
    assert bench.kinds() == [("timing", "prefix cache")]


def test_a_cache_that_only_serves_its_own_key_is_clean() -> None:
    bench = Bench()
    bench.evidence.timing("keys", SLOW, SLOW, FAST, "the same prompt")
    assert bench.kinds() == []
    (coverage,) = bench.evidence.coverage("keys")
    assert (coverage.evidence, coverage.comparisons, coverage.bound) == ("timing", 12, 0.25)


def test_what_is_not_told_apart_from_one_s_own_repeat_is_not_known() -> None:
    """Of 12 repeats 9 are fast, the other key's as well as one's own: in the lower half of 24 lie 9 of them and 3 new ones. That is (220 * 220 + 66 * 66 + 12 * 12
    + 1) / C(24, 12) = 0.0196, visible for a control; times 1 / 0.2 it is no finding. But the two are as fast as each other."""
    busy = [*FAST[:9], *(0.4 + i / 1000 for i in range(3))]
    bench = Bench()
    bench.evidence.timing("keys", busy, SLOW, busy, "the same prompt")
    assert bench.kinds() == []
    assert bench.evidence.coverage("keys") == []
    assert any("neither clearly faster" in note for note in bench.evidence.notes())


def test_a_difference_too_small_to_use_is_none() -> None:
    bench = Bench()
    slightly = [t * 0.95 for t in SLOW]
    bench.evidence.timing("keys", slightly, SLOW, FAST, "the same prompt")
    assert bench.kinds() == []
