"""Whose bytes a page holds, as a keyed hash chain over everything that determines them.

    lineage(-1) = H_k(scope)                          scope: tenant, salt, model, numeric mode, adapter, layout, ...
    lineage(i)  = H_k(lineage(i-1), token ids of page i)

`lineage(i)` names a page that holds exactly those tokens behind exactly that prefix; a tail page with f rows has the
lineage of its f tokens, and another one when the next row is written. Both sides of a handoff compute it by
themselves from what the gateway gave them. One encoder: every field is tagged and carried at full width, so that two
different inputs never encode to the same bytes. H is BLAKE2b, keyed; 128 bits name the page, and 64 further bits of
the same digest (the *word*) feed the seal masks of the page that follows, so the word never doubles as a name.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

LINEAGE_BYTES = 16
_DIGEST = LINEAGE_BYTES + 8  # the name, then the mask word
_ROOT, _PAGE = b"R", b"P"

U64 = npt.NDArray[np.uint64]


class Secret(msgspec.Struct, frozen=True):
    """The cluster's seal secret (32 bytes). Everything keyed is derived from it by label; it is never sent in clear."""

    key: bytes

    def __post_init__(self) -> None:
        if len(self.key) != 32:
            raise ValueError(f"a seal secret has 32 bytes, not {len(self.key)}")

    @classmethod
    def random(cls) -> Secret:
        return cls(os.urandom(32))

    def derive(self, label: str, size: int) -> bytes:
        """`size` bytes that depend on the secret and the label alone (SHAKE-256, keyed by prefix)."""
        return hashlib.shake_256(self.key + label.encode()).digest(size)

    @property
    def key_id(self) -> str:
        """Public name of this secret: says whether two parties share it, not what it is."""
        return self.derive("key id", 8).hex()

    def __repr__(self) -> str:  # never in a log or a traceback
        return f"Secret(key_id={self.key_id})"


class Scope(msgspec.Struct, frozen=True):
    """Everything but the tokens that determines a page's content. Two scopes that differ anywhere share nothing."""

    tenant: str  # the tenant's scope
    salt: str  # the request's own, empty when it has none
    model: str  # fingerprint of weights and config
    numeric: str  # weight and compute dtypes
    adapter: str
    layout: str  # fingerprint of the page geometry, KV dtype included
    position: str  # position encoding
    key_id: str

    def encode(self) -> bytes:
        parts = []
        for name in self.__struct_fields__:
            for text in (name, getattr(self, name)):
                raw = text.encode()
                parts.append(len(raw).to_bytes(8, "little") + raw)
        return b"".join(parts)


class Hasher:
    """H_k for one secret."""

    def __init__(self, secret: Secret) -> None:
        self._key = secret.derive("lineage", 64)

    def root(self, scope: Scope) -> bytes:
        """lineage(-1) and its word: 24 bytes."""
        return hashlib.blake2b(_ROOT + scope.encode(), digest_size=_DIGEST, key=self._key).digest()

    def begin(self, previous: bytes) -> hashlib.blake2b:
        """The hash of a page behind `previous` (a 24-byte digest), before its first token."""
        return hashlib.blake2b(_PAGE + previous[:LINEAGE_BYTES], digest_size=_DIGEST, key=self._key)

    def page(self, previous: bytes, tokens: npt.NDArray[np.int64]) -> bytes:
        """The 24-byte digest of a page with these tokens behind `previous`: what a Chain has for it, without its sums."""
        digest = self.begin(previous)
        digest.update(tokens.tobytes())
        return digest.digest()


class Chain:
    """The lineage of one sequence, growing token by token; what its readers expect of every page.

    Arrays have one entry a page, `pages` of them valid; the last may be partly filled:
      lineages uint64 [*, 2]  name of the page at its present fill
      words    uint64 [*]     mask word: of the page before (the root for page 0)
      binds    uint64 [*]     sum of bind(token, position) over its rows (filled by the seal key given)
    """

    def __init__(self, hasher: Hasher, root: bytes, page_size: int, bind: Binder) -> None:
        self._hasher, self._bind, self.page_size = hasher, bind, page_size
        self._before = root  # digest in front of the tail page
        self._tail = hasher.begin(root)
        self.length = 0
        self._fixed = False  # the arrays belong to somebody else and cannot grow
        self.lineages: U64 = np.zeros((8, 2), np.uint64)
        self.words: U64 = np.zeros(8, np.uint64)
        self.binds: U64 = np.zeros(8, np.uint64)

    @property
    def pages(self) -> int:
        return -(-self.length // self.page_size)

    def _grow(self, pages: int) -> None:
        if pages > len(self.words):
            if self._fixed:
                raise ValueError(f"{pages} pages, but the arrays given to `adopt` hold {len(self.words)}")
            room = max(pages, 2 * len(self.words)) - len(self.words)
            self.lineages = np.concatenate([self.lineages, np.zeros((room, 2), np.uint64)])
            self.words = np.concatenate([self.words, np.zeros(room, np.uint64)])
            self.binds = np.concatenate([self.binds, np.zeros(room, np.uint64)])

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> U64:
        """Append tokens; returns bind(token, position) of each: uint64 [len(tokens)]."""
        ids = np.asarray(tokens, np.int64)
        terms = self._bind(
            ids.astype(np.uint64), np.arange(self.length, self.length + len(ids), dtype=np.uint64)
        )
        self._grow(-(-(self.length + len(ids)) // self.page_size))
        at = 0
        while at < len(ids):
            page, row = divmod(self.length, self.page_size)
            count = min(self.page_size - row, len(ids) - at)
            if row == 0:
                self.words[page] = int.from_bytes(self._before[LINEAGE_BYTES:], "little")
                self.binds[page] = 0
            self._tail.update(ids[at : at + count].tobytes())
            digest = self._tail.digest()
            self.lineages[page] = np.frombuffer(digest, np.uint64, 2)
            self.binds[page : page + 1] += terms[at : at + count].sum(dtype=np.uint64)
            self.length += count
            at += count
            if row + count == self.page_size:
                self._before, self._tail = digest, self._hasher.begin(digest)
        return terms

    def append(self, token: int, term: int) -> None:
        """`extend` for one token whose bind term (for position `length`) the caller computed with its batch."""
        page, row = divmod(self.length, self.page_size)
        if row == 0:
            self._grow(page + 1)
            self.words[page] = int.from_bytes(self._before[LINEAGE_BYTES:], "little")
            self.binds[page] = term
        else:
            self.binds[page] = (int(self.binds[page]) + term) & 0xFFFFFFFFFFFFFFFF
        self._tail.update(token.to_bytes(8, "little"))
        digest = self._tail.digest()
        self.lineages[page] = np.frombuffer(digest, np.uint64, 2)
        self.length += 1
        if row + 1 == self.page_size:
            self._before, self._tail = digest, self._hasher.begin(digest)

    def adopt(self, lineages: U64, words: U64, binds: U64) -> None:
        """Keep the arrays in this memory from now on (a row of the batch's), so that appending updates it in place.

        lineages uint64 [P, 2], words and binds uint64 [P], P >= the pages that will ever be needed."""
        pages = self.pages
        lineages[:pages], words[:pages], binds[:pages] = (
            self.lineages[:pages],
            self.words[:pages],
            self.binds[:pages],
        )
        self.lineages, self.words, self.binds, self._fixed = lineages, words, binds, True

    def fork(self) -> Chain:
        """An independent copy: what a child that continues this sequence starts from."""
        child = object.__new__(Chain)
        child._hasher, child._bind, child.page_size = self._hasher, self._bind, self.page_size
        child._before, child._tail, child.length = self._before, self._tail.copy(), self.length
        child._fixed = False
        child.lineages, child.words, child.binds = self.lineages.copy(), self.words.copy(), self.binds.copy()
        return child


class Binder:
    """bind(token, position): the term that ties a row to its token and place. Keyed, vectorised; see seals.py."""

    def __init__(self, secret: Secret) -> None:
        raw = np.frombuffer(secret.derive("bind", 16), np.uint64)
        self.token_key, self.position_key = np.uint64(raw[0]), np.uint64(raw[1])

    def __call__(self, tokens: U64, positions: U64) -> U64:
        """uint64 [n] x uint64 [n] -> uint64 [n]."""
        return mix(mix(tokens + self.token_key) ^ (positions + self.position_key))


def mix(x: U64) -> U64:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words that spreads every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
