"""What is planted: drawn as the counting of chances assumes, and there in every prompt."""

from __future__ import annotations

import random
import re

import pytest

from hermetic.audit import markers
from hermetic.audit.evidence.reading import listed_in
from hermetic.audit.markers import COMMON, Plant, Tenant, pair, shared_prefix, word_list


def tenant(seed: int = 1) -> Tenant:
    return Plant(seed).tenant(random.Random(seed))


def test_words_are_not_dealt_twice_before_the_list_is_used_up() -> None:
    plant, randomly = Plant(1), random.Random(1)
    whole = len(word_list()) // markers.WORDS
    words = [w for _ in range(whole) for w in plant.tenant(randomly).words]
    assert len(set(words)) == len(words) == whole * markers.WORDS
    again = plant.tenant(randomly)
    assert set(again.words) <= set(word_list())
    assert len(set(again.words)) == markers.WORDS


def test_every_word_is_as_likely_as_every_other() -> None:
    """Chi-square of 3,000 first words over 30 equal parts of the list, 29 degrees: above 70 has probability below 1e-4."""
    place = {word: i for i, word in enumerate(word_list())}
    counts = [0] * 30
    for seed in range(3000):
        counts[place[tenant(seed).words[0]] * 30 // len(place)] += 1
    assert sum((c - 100) ** 2 / 100 for c in counts) < 70


def test_the_list_holds_no_word_of_our_own_texts() -> None:
    assert len(word_list()) > 7600
    assert not set(COMMON) & set(word_list())
    one = tenant()
    for text in (one.copy_task(80), one.story(80), one.secret().system, one.secret().prompt, one.after("")):
        assert listed_in(text) <= set(one.words)


def test_codes_are_eight_syllables_in_twos_from_a_large_space() -> None:
    assert len(markers.SYLLABLES) ** markers.EIGHT >= 2**40
    codes = [code for seed in range(500) for code in tenant(seed).codes]
    assert len(set(codes)) == len(codes)
    for code in codes:
        assert re.fullmatch("([bdfghjklmnprstvwz][aeiou][bdfghjklmnprstvwz][aeiou]-){3}[a-z]{4}", code)


def test_every_prompt_holds_its_owner_s_markers() -> None:
    one = tenant(7)
    assert one.line == " ".join((*one.words, one.codes[0]))
    assert one.line in one.copy_task()
    assert one.line in one.copy_task(200)
    assert one.line in one.after("a beginning", 30)
    assert set(one.words) <= listed_in(one.story(60))
    assert set(one.words) <= listed_in(one.secret().system)
    assert not listed_in(one.secret().prompt)


@pytest.mark.parametrize("words", [10, 100, 3000])
def test_filler_has_about_the_length_asked_and_markers_on_every_page(words: int) -> None:
    one = tenant(3)
    text = one.filler(words)
    assert words <= len(text.split()) <= words + 20
    mine = set(one.words) | {c.split("-")[0] for c in one.codes}
    pieces = text.split()
    for start in range(0, len(pieces) - 20):  # some 20 words: two pages of 16 tokens
        assert mine & set(re.findall("[a-z]+", " ".join(pieces[start : start + 20]).lower()))


def test_fillers_differ_from_their_first_word_on() -> None:
    plant, randomly = Plant(2), random.Random(2)
    firsts = {plant.tenant(randomly).filler(50).split()[0] for _ in range(50)}
    assert len(firsts) == 50
    one = plant.tenant(randomly)
    assert one.filler(50) == one.filler(50)
    assert one.filler(50, salt=1).split()[0] != one.filler(50).split()[0]


def test_a_pair_begins_alike_and_goes_on_apart() -> None:
    (a, b), (first, second) = pair(Plant(5), random.Random(5), 40)
    assert first.split()[:40] == second.split()[:40]
    assert not set(a.words) & set(b.words)
    assert not listed_in(shared_prefix(random.Random(5), 40))
    assert listed_in(first) == set(a.words)


def test_the_same_seed_draws_the_same_tenants_and_keys_go_in_turn() -> None:
    a, b = (Plant(9), Plant(9))
    first = [a.tenant(random.Random(4), 2) for _ in range(2)]
    second = [b.tenant(random.Random(4), 2) for _ in range(2)]
    assert first[0] == second[0]
    assert [t.key for t in first] == [0, 1]
    assert a.tenant(random.Random(1), 2, key=1).key == 1


def test_a_scenario_alone_draws_mostly_what_it_drew_among_others() -> None:
    """100 tenants before have taken 600 of 7,683 words: six stay with probability (1 - 600/7683)**6 = 0.61; of 40 tenants
    fewer than 12 have P(Binomial(40, 0.6) < 12) = 3e-5. Codes always stay."""
    busy, alone = Plant(9), Plant(9)
    for number in range(100):
        busy.tenant(random.Random(number))
    randomly, again = random.Random("mine"), random.Random("mine")
    both = [(busy.tenant(randomly), alone.tenant(again)) for _ in range(40)]
    assert all(a.codes == b.codes for a, b in both)
    assert sum(a.words == b.words for a, b in both) >= 12


def test_decoys_are_drawn_for_every_tenant_and_only_the_last_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant, randomly = Plant(1), random.Random(1)
    for _ in range(markers.REMEMBERED + 5):
        plant.tenant(randomly)
    assert len(plant.tenants) == len(plant.decoys) == markers.REMEMBERED
    assert [t.number for t in plant.tenants] == [d.number for d in plant.decoys]
    assert plant.tenants[0].number == 5
    assert all(d.name.startswith("decoy-") for d in plant.decoys)
