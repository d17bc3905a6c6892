"""Lineage against a second implementation, written from the docstring with hashlib alone."""

from __future__ import annotations

import hashlib
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic.kv.lineage import Binder, Chain, Hasher, Scope, Secret

SECRET = Secret(bytes(range(32)))
HASHER, BIND = Hasher(SECRET), Binder(SECRET)
SCOPE = Scope("tenant", "", "model", "weights=bf16", "", "layout", "rope", SECRET.key_id)
MASK64 = 2**64 - 1

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)
sizes = st.integers(1, 9)


def chain(ids: list[int], size: int, root: bytes | None = None) -> Chain:
    made = Chain(HASHER, root or HASHER.root(SCOPE), size, BIND)
    made.extend(ids)
    return made


def seen(c: Chain) -> tuple[list[list[int]], list[int], list[int]]:
    n = c.pages
    return c.lineages[:n].tolist(), c.words[:n].tolist(), c.binds[:n].tolist()


# --------------------------------------------------------------- the second implementation
def second_key(secret: bytes) -> bytes:
    return hashlib.shake_256(secret + b"lineage").digest(64)


def second_root(scope: Scope, secret: bytes = SECRET.key) -> bytes:
    fields = ("tenant", "salt", "model", "numeric", "adapter", "layout", "position", "key_id")
    data = b"R"
    for name in fields:
        for raw in (name.encode(), getattr(scope, name).encode()):
            data += len(raw).to_bytes(8, "little") + raw
    return hashlib.blake2b(data, key=second_key(secret), digest_size=24).digest()


def second_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def second_bind(token: int, position: int) -> int:
    raw = hashlib.shake_256(SECRET.key + b"bind").digest(16)
    token_key, position_key = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")
    return second_mix(second_mix((token + token_key) & MASK64) ^ ((position + position_key) & MASK64))


def second_pages(ids: list[int], size: int, root: bytes) -> tuple[list[list[int]], list[int], list[int]]:
    lineages, words, binds, previous = [], [], [], root
    for first in range(0, len(ids), size):
        part = ids[first : first + size]
        data = b"P" + previous[:16] + b"".join(t.to_bytes(8, "little") for t in part)
        digest = hashlib.blake2b(data, key=second_key(SECRET.key), digest_size=24).digest()
        lineages.append([int.from_bytes(digest[i : i + 8], "little") for i in (0, 8)])
        words.append(int.from_bytes(previous[16:24], "little"))
        binds.append(sum(second_bind(t, first + i) for i, t in enumerate(part)) & MASK64)
        previous = digest
    return lineages, words, binds


@settings(max_examples=80)
@given(ids=tokens, size=sizes)
def test_a_chain_is_what_its_docstring_says(ids: list[int], size: int) -> None:
    assert HASHER.root(SCOPE) == second_root(SCOPE)
    assert seen(chain(ids, size)) == second_pages(ids, size, second_root(SCOPE))


@settings(max_examples=80)
@given(ids=tokens, size=sizes)
def test_pages_named_one_at_a_time_have_the_names_and_words_of_a_chain(ids: list[int], size: int) -> None:
    lineages, words, _ = second_pages(ids, size, second_root(SCOPE))
    digest = HASHER.root(SCOPE)
    for page, first in enumerate(range(0, len(ids), size)):
        assert int.from_bytes(digest[16:], "little") == words[page]
        digest = HASHER.page(digest, np.array(ids[first : first + size], np.int64))
        assert np.frombuffer(digest, np.uint64, 2).tolist() == lineages[page]


@settings(max_examples=80)
@given(ids=tokens, size=sizes, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_extending_in_any_pieces_is_appending_one_by_one(ids: list[int], size: int, cuts: list[int]) -> None:
    pieces = chain([], size)
    edges = sorted({0, len(ids), *(c for c in cuts if c < len(ids))})
    terms = [int(t) for a, b in itertools.pairwise(edges) for t in pieces.extend(ids[a:b])]
    single = chain([], size)
    for position, token in enumerate(ids):
        single.append(token, int(BIND(np.array([token], np.uint64), np.array([position], np.uint64))[0]))
    assert seen(pieces) == seen(single) == seen(chain(ids, size))
    assert terms == [second_bind(t, i) for i, t in enumerate(ids)]
    assert pieces.length == single.length == len(ids)


@settings(max_examples=60)
@given(ids=st.lists(st.integers(0, 99), min_size=1, max_size=20), size=sizes, data=st.data())
def test_one_other_token_renames_its_page_and_all_behind_it_but_none_before(
    ids: list[int], size: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids]
    other[at] += 1
    one, two = seen(chain(ids, size)), seen(chain(other, size))
    page = at // size
    assert one[0][:page] == two[0][:page]
    assert all(a != b for a, b in zip(one[0][page:], two[0][page:], strict=True))
    assert one[1][: page + 1] == two[1][: page + 1]  # a mask word is of the page before
    assert all(a != b for a, b in zip(one[1][page + 1 :], two[1][page + 1 :], strict=True))


def test_each_fill_of_a_page_has_its_own_name() -> None:
    names = [tuple(chain(list(range(n)), 16).lineages[0]) for n in range(1, 17)]
    assert len(set(names)) == 16


def test_the_mask_word_is_not_part_of_the_name() -> None:
    c = chain(list(range(40)), 16)
    assert not set(c.words[:3].tolist()) & set(c.lineages[:3].ravel().tolist())


scopes = st.builds(Scope, *[st.sampled_from(["", "a", "b", "ab", "c", "bc", "a\0", "tenant"])] * 8)


@settings(max_examples=200)
@given(one=scopes, two=scopes)
def test_two_scopes_have_one_root_only_if_they_are_equal(one: Scope, two: Scope) -> None:
    assert (HASHER.root(one) == HASHER.root(two)) == (one == two)


@pytest.mark.parametrize("field", Scope.__struct_fields__)
def test_a_scope_that_differs_in_any_field_shares_no_page(field: str) -> None:
    other = msgspec.structs.replace(SCOPE, **{field: "other"})
    ids = list(range(40))
    one, two = chain(ids, 16), chain(ids, 16, HASHER.root(other))
    assert not set(map(tuple, one.lineages[:3].tolist())) & set(map(tuple, two.lineages[:3].tolist()))
    assert not set(one.words[:3].tolist()) & set(two.words[:3].tolist())


@pytest.mark.parametrize("pair", [("tenant", "salt"), ("salt", "model"), ("position", "key_id")])
def test_text_cannot_move_from_one_field_to_the_next(pair: tuple[str, str]) -> None:
    roots = {
        HASHER.root(msgspec.structs.replace(SCOPE, **dict(zip(pair, values, strict=True))))
        for values in (("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"))
    }
    assert len(roots) == 4


def test_another_secret_names_everything_otherwise_and_never_shows_itself() -> None:
    other = Secret(bytes(32))
    assert Hasher(other).root(SCOPE) != HASHER.root(SCOPE)
    assert other.key_id != SECRET.key_id
    assert SECRET.key.hex() not in repr(SECRET)
    assert repr(SECRET.key) not in repr(SECRET)
    with pytest.raises(ValueError, match="32 bytes"):
        Secret(b"short")


@settings(max_examples=40)
@given(ids=tokens, more=tokens, else_=tokens, size=sizes)
def test_a_fork_goes_its_own_way(ids: list[int], more: list[int], else_: list[int], size: int) -> None:
    parent = chain(ids, size)
    child = parent.fork()
    parent.extend(more)
    child.extend(else_)
    assert seen(parent) == seen(chain(ids + more, size))
    assert seen(child) == seen(chain(ids + else_, size))


@settings(max_examples=40)
@given(
    ids=st.lists(st.integers(0, 99), max_size=20), more=st.lists(st.integers(0, 99), max_size=12), size=sizes
)
def test_adopted_arrays_hold_the_chain_from_then_on_and_cannot_be_outgrown(
    ids: list[int], more: list[int], size: int
) -> None:
    room = -(-(len(ids) + len(more)) // size)
    row = np.zeros((room, 2), np.uint64), np.zeros(room, np.uint64), np.zeros(room, np.uint64)
    c = chain(ids, size)
    c.adopt(*row)
    for i, token in enumerate(more, start=len(ids)):
        c.append(token, second_bind(token, i))
    wanted = seen(chain(ids + more, size))
    assert (row[0].tolist(), row[1].tolist(), row[2].tolist()) == wanted
    fill = room * size - c.length
    c.extend(list(range(fill)))  # up to the edge it goes
    with pytest.raises(ValueError, match="adopt"):
        c.extend([1])
    with pytest.raises(ValueError, match="adopt"):
        c.append(1, 0)
    assert c.length == room * size
    child = c.fork()
    child.extend([1, 2])  # a child has its own arrays and may grow
    assert child.pages == -(-(room * size + 2) // size)
