"""Prefixes that are already in pages: where a full page of a prompt is, by lineage, so that it is not computed twice.

This is sharing, not a cache: a page is found while some request still holds it, and goes when the last lease goes. A
lineage covers tenant, salt, model and everything before the page, so a page that is found is the reader's own prefix.

The one thing to know: an entry proves nothing, it says where to look. Whether the page is held, clean, full and of this
lineage is asked of the pool at the moment of use; a page that was freed, quarantined or taken by somebody else needs no
word to the index. There is at most one entry a page.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from hermetic.kv.lineage import LINEAGE_BYTES, U64, Hasher
from hermetic.kv.pool import I32, Pool


class Leading:
    """Names of a prompt's leading full pages, computed as far as somebody asks, once."""

    def __init__(self, hasher: Hasher, root: bytes, tokens: npt.NDArray[np.int64], size: int) -> None:
        self._hasher, self._tokens, self._size = hasher, tokens, size
        self._digest = root  # of the last page named
        self._names: list[bytes] = []
        # The last token is always computed, and never into a page that is shared: at a full hit the last page stays out.
        self.limit = (len(tokens) - 1) // size

    def name(self, page: int) -> bytes:
        """lineage(page), 16 bytes, for 0 <= page < limit."""
        while len(self._names) <= page:
            at = len(self._names) * self._size
            self._digest = self._hasher.page(self._digest, self._tokens[at : at + self._size])
            self._names.append(self._digest[:LINEAGE_BYTES])
        return self._names[page]


class PrefixIndex:
    """lineage -> pages that were computed as part of a prompt and may still hold it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._pages: dict[bytes, list[int]] = {}
        self._names: dict[int, bytes] = {}  # the same, from page to lineage
        self.noted = 0  # pages ever noted; while it stands still, looking again finds no more

    def __len__(self) -> int:
        return len(self._names)

    def note(self, pages: I32, lineages: U64) -> None:
        """These pages are full, tagged and read-only now. pages int32 [n], lineages uint64 [n, 2]."""
        for page, lineage in zip(pages.tolist(), lineages, strict=True):
            name = lineage.tobytes()
            self._forget(page)
            self._names[page] = name
            self._pages.setdefault(name, []).append(page)
        self.noted += len(pages)

    def forget(self, pages: Iterable[int]) -> None:
        """Offer these pages to nobody from now on; whoever holds them is not concerned."""
        for page in pages:
            self._forget(page)

    def find(self, leading: Leading) -> I32:
        """The longest run of leading pages that can be leased now: int32 [n], n <= leading.limit."""
        while True:
            found: list[int] = []
            for page in range(leading.limit):
                holders = self._pages.get(leading.name(page))
                if holders is None:
                    break
                found.append(holders[-1])
            pages = np.array(found, np.int32)
            names = b"".join(leading.name(page) for page in range(len(found)))
            good = self._pool.shareable(pages, np.frombuffer(names, np.uint64).reshape(-1, 2))
            if good.all():
                return pages
            self.forget(pages[~good].tolist())  # what they held is gone; another page may hold it too

    def _forget(self, page: int) -> None:
        name = self._names.pop(page, None)
        if name is None:
            return
        holders = self._pages[name]
        holders.remove(page)
        if not holders:
            del self._pages[name]
