"""The statistics are right: simulated servers whose leak rate is known, from nought to one in five.

The one thing to know: a leak at rate r among n answers happens with probability 1 - (1 - r)**n. A server that never leaked must be called
clean, and one that has leaked a whole line must be found in exactly those runs in which it did.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_answers import (
    Garble,
    Server,
    answered,
    garbled,
    half_a_code,
    one_word,
    pieces,
    three_words,
    whole,
)

from hermetic.audit.evidence import ERROR, Evidence
from hermetic.audit.evidence.excess import PIECES_OF_CODES, Excess
from hermetic.audit.evidence.planted import Book, Own, foreign
from hermetic.audit.evidence.reading import read
from hermetic.audit.exchange import Ask
from hermetic.audit.learned import Learned
from hermetic.audit.markers import SYLLABLES, WORDS, Plant, word_list


def run(seed: int, answers: int, server: Server) -> Evidence:
    """An audit of so many copy tasks, each by a new tenant."""
    plant, randomly = Plant(seed), random.Random(seed)
    evidence = Evidence(Learned(model="simulated"), plant)
    for _ in range(answers):
        tenant = plant.tenant(randomly)
        evidence.seen("copy", server(Ask(tenant=tenant.name, prompt=tenant.copy_task())))
    return evidence


@pytest.mark.slow
@pytest.mark.parametrize("own", [0, 4, 25])
def test_servers_that_never_leak_are_never_called_leaky(own: int) -> None:
    """30 runs of 80 answers for each: a finding in any has probability 30 * ERROR = 0.03 at most, and less as counts are whole numbers."""
    for seed in range(30):
        evidence = run(seed, 80, Server(seed, 0.0, own=own))
        assert evidence.findings() == []
        assert evidence.noise()["decoys_called_findings"] == 0


@given(seed=st.integers(0, 2**32), rate=st.sampled_from([0.0, 1 / 20, 1 / 5]))
@settings(max_examples=40)
def test_a_whole_line_is_found_in_exactly_the_runs_in_which_it_leaked(seed: int, rate: float) -> None:
    server = Server(seed, rate)
    findings = run(seed, 40, server).findings()
    assert bool(findings) == (server.leaked > 0)
    assert sum(f.times for f in findings) == server.leaked
    assert all(f.p is not None and f.p <= ERROR for f in findings)


@pytest.mark.slow
def test_rare_leaks_are_found_as_often_as_they_happen() -> None:
    """One in twenty, 20 answers with somebody before them: 1 - 0.95**20 = 0.642 of the runs. Of 60 runs the count is within what
    has probability 1 - 1e-4, by the binomial distribution, on either side."""
    found = sum(bool(run(seed, 21, Server(seed, 1 / 20)).findings()) for seed in range(60))
    rate = 1 - 0.95**20
    chances = [math.comb(60, i) * rate**i * (1 - rate) ** (60 - i) for i in range(61)]
    assert sum(chances[: found + 1]) > 5e-5
    assert sum(chances[found:]) > 5e-5


@pytest.mark.parametrize("leak", [pieces, half_a_code, garbled])
def test_pieces_and_garbled_leaks_are_found(leak: Garble) -> None:
    """At one in ten of 60, no leak at all has probability 0.002 a run; nine of ten runs with one must be found out."""
    leaky = found = 0
    for seed in range(12):
        server = Server(seed, 0.1, leak)
        findings = run(seed, 60, server).findings()
        leaky += server.leaked > 0
        found += bool(findings) and server.leaked > 0
    assert leaky >= 10
    assert found >= 0.9 * leaky


def test_three_words_in_a_row_are_found_in_a_short_run() -> None:
    found = sum(bool(run(seed, 40, Server(seed, 0.2, three_words, own=0)).findings()) for seed in range(8))
    assert found == 8


@pytest.mark.slow
def test_a_server_that_leaks_a_word_at_a_time_is_found_by_how_often() -> None:
    """One foreign word in every fifth answer is nothing by itself; 300 answers are enough to see that there are too many: about
    60 more, where about 30 to 40 are met by chance."""
    for seed in range(3):
        (finding,) = run(seed, 300, Server(seed, 0.2, one_word, own=1)).findings()
        assert finding.detail["kind"] == "single words"
        assert finding.times > 1.5 * finding.detail["expected"]
        assert finding.highlights


@pytest.mark.slow
@pytest.mark.parametrize("listed", [6, 30, 200])
def test_under_the_null_p_values_are_not_too_small(listed: int) -> None:
    """Of 18,000 pairs of a fixed answer and a tenant who never met it, at most a share a has p <= a. Five standard deviations are allowed."""
    plant, randomly = Plant(3), random.Random(3)
    ps: list[float] = []
    text = " ".join(randomly.sample(word_list(), listed))
    letters = "".join(randomly.choice("bdfg") + randomly.choice("ae") for _ in range(100))
    reading = read(f"{text} {letters}")
    pairs = 18_000
    for _ in range(pairs // 600):
        book = Book(plant.tenants)
        for _ in range(600):
            plant.tenant(randomly)
        book.next = plant.drawn - 600
        book.catch_up()
        own = Own(None, Ask(tenant="nobody", prompt="a prompt"))
        ps += [match.p for match in book.matches(reading, own, *foreign(reading, own))]
    for level in (0.3, 0.1, 0.01, 0.001, 0.0001):
        small = sum(p <= level for p in ps)
        assert small <= pairs * level + 5 * math.sqrt(pairs * level)
    assert ps  # it could have failed


def test_the_single_word_sum_is_not_too_large_under_the_null() -> None:
    """Hits of neighbours' words over 40 runs lie within five standard deviations of the mean that is used, from below as from above."""
    hits = mean = 0.0
    for seed in range(40):
        noise = run(seed, 60, Server(seed, 0.0, own=12)).noise()
        hits, mean = hits + noise["single_words"], mean + noise["single_words_expected"]
    assert mean > 100
    assert (
        abs(hits - mean) < 5 * math.sqrt(mean) + 0.1 * mean
    )  # the mean is conservative by the askers' words


def test_the_sum_of_pieces_of_codes_is_not_too_large_under_the_null() -> None:
    """10,000 rows of four syllables, and 3,000 tenants who were drawn without them: 2 x 5 x 10,000 / 85**4 for each, 5.7 in all."""
    plant, randomly = Plant(6), random.Random(6)
    rows = {"".join(randomly.choice(SYLLABLES) for _ in range(4)) for _ in range(10_000)}
    hits = mean = 0.0
    for _ in range(30):
        excess = Excess(PIECES_OF_CODES)
        excess.add(-1, [plant.tenant(randomly) for _ in range(100)], rows)
        hits, mean = hits + excess.hits, mean + excess.mean
    assert mean == pytest.approx(3_000 * 10 * len(rows) / 85**4, rel=1e-3)
    assert abs(hits - mean) < 3 * math.sqrt(mean)


def test_a_model_that_stammers_half_a_neighbours_code_twice_is_found() -> None:
    """What a small model makes of another's page: four syllables of a code again and again. Once may be chance."""
    plant, randomly = Plant(7), random.Random(7)
    evidence = Evidence(Learned(model="simulated"), plant)
    tenants = [plant.tenant(randomly) for _ in range(40)]
    for number, tenant in enumerate(tenants[:30]):
        evidence.seen("s", answered(Ask(tenant=tenant.name, prompt=tenant.copy_task()), tenant.line, number))
    for number in (30, 31):
        stammer = "-".join(tenants[number].codes[0].split("-")[1:3]) + "-"
        ask = Ask(tenant=tenants[number + 5].name, prompt="Say hello.")
        evidence.seen("s", answered(ask, stammer * 9, number))
        evidence.seen("s", answered(ask, stammer * 9, number))  # the same code counts once
        if number == 30:
            assert evidence.findings() == []
    (finding,) = evidence.findings()
    assert (finding.detail["kind"], finding.times) == ("pieces of codes", 2)
    assert finding.highlights


def test_an_answer_that_only_holds_what_it_was_sent_is_no_finding() -> None:
    """The same bytes sent by two tenants: the second's answer holds the first's line, and may."""
    plant, randomly = Plant(1), random.Random(1)
    evidence = Evidence(Learned(model="simulated"), plant)
    a, b = plant.tenant(randomly), plant.tenant(randomly)
    evidence.seen("twice", answered(Ask(tenant=a.name, prompt=a.copy_task()), a.line, 1))
    evidence.seen("twice", answered(Ask(tenant=b.name, prompt=a.copy_task()), a.line, 2))
    assert evidence.findings() == []
    evidence.seen("twice", answered(Ask(tenant=b.name, prompt=b.copy_task()), a.line, 3))
    assert len(evidence.findings()) == 1


def test_correction_grows_with_the_pairs_compared() -> None:
    """Three words in a row (p about 4e-10 for an answer of three) are a finding early, and none after very many comparisons."""
    plant, randomly = Plant(4), random.Random(4)
    evidence = Evidence(Learned(model="simulated"), plant)
    tenants = [plant.tenant(randomly) for _ in range(70)]
    leak = " ".join(tenants[-1].words[:3])
    evidence.seen("s", answered(Ask(tenant=tenants[0].name, prompt="Say hello."), leak, 1))
    (finding,) = evidence.findings()
    assert finding.p is not None
    row = 4 * (WORDS - 2) / math.perm(len(word_list()) - WORDS, 3)
    near = finding.detail["pairs"]
    assert finding.p == pytest.approx(4 * row / 4 * near / (0.45 * 0.4))
    for number in range(2, 400):
        text = " ".join(randomly.sample(word_list(), 2))
        evidence.seen("s", answered(Ask(tenant=tenants[1].name, prompt="Say hello."), text, number))
    later = evidence.findings()
    assert not later or (later[0].p or 0) > 50 * finding.p


def test_whole_is_whole() -> None:
    assert whole(random.Random(1), "a line") == "a line"
