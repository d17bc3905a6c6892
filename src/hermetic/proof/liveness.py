"""L1 and L2 over a whole search: from every state, is a good end reachable by calm moves alone?

Backwards from the good ends along the calm moves. What is left can never end well, however fair the deliveries.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt


def unreached(parts: list[Path]) -> int | None:
    """The fingerprint of a first state (by depth, then order) from which no good end can be reached, or None.

    Each part holds `order` uint64 [n] (its states in the order of their discovery), `good` bool [n], and the calm moves:
    `sources` uint32 [m] (index in `order`), `targets` uint64 [m] (fingerprint)."""
    loaded = [np.load(part) for part in parts]
    order = np.concatenate([part["order"] for part in loaded])
    reaches = np.concatenate([part["good"] for part in loaded])
    offsets = np.cumsum([0, *(len(part["order"]) for part in loaded)])
    sources = np.concatenate(
        [part["sources"].astype(np.int64) + offset for part, offset in zip(loaded, offsets, strict=False)]
    )
    by_value = np.argsort(order)
    targets = by_value[
        np.searchsorted(order, np.concatenate([p["targets"] for p in loaded]), sorter=by_value)
    ]
    _spread(reaches, sources, targets)
    left = np.flatnonzero(~reaches)
    if not len(left):
        return None
    # Parts are in order of depth each; the first of each part is the shallowest there.
    firsts = [left[(left >= a) & (left < b)][:1] - a for a, b in pairwise(offsets)]
    part = min((i for i, first in enumerate(firsts) if len(first)), key=lambda i: int(firsts[i][0]))
    return int(order[offsets[part] + firsts[part][0]])


@numba.njit(cache=True)
def _spread(
    reaches: npt.NDArray[np.bool_], sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]
) -> None:
    """Mark every source of a move into a marked state, until nothing changes. Moves mostly lead to later states."""
    changed = True
    while changed:
        changed = False
        for i in range(len(sources) - 1, -1, -1):
            if reaches[targets[i]] and not reaches[sources[i]]:
                reaches[sources[i]] = True
                changed = True
