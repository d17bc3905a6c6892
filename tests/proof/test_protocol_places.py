"""Product code changes pools, slots and pages only where it performs an action of the protocol.

A place is file:function and what it calls. A new one fails here: either it belongs to an action of `proof/abstract.py`, and is
added beside it, or it goes round the protocol.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hermetic
from hermetic.proof.abstract import ACTIONS

ROOT = Path(hermetic.__file__).parent
BELOW_OR_BESIDE = {
    "kv",
    "kernels",
    "lab",
    "proof",
    "audit",
    "check",
}  # the objects themselves; faults on purpose; this
CHANGES = {
    "pool": {"allocate", "lease", "extend", "convert", "close", "quarantine", "set_tags", "zero_unfilled"},
    "slots": {"grant", "consume", "release", "quarantine", "fence"},
    "kernels": {"write", "copy_rows"},
    "sender": {"write"},
    "np": {"copyto"},
}
REQUEST = (
    "a running request's own pages, of which no handoff knows any more, or of an engine that serves alone"
)
DAMAGE = "a page that was damaged after it was verified"

PLACES = {
    # the engine: pages of prompts, taken as `Reserved` (decode) and `Started` (prefill) say
    "engine/engine.py:_place pool.allocate": ("reserve", "start"),
    "engine/engine.py:_place pool.lease": ("start",),
    "engine/engine.py:_empty pool.allocate": (REQUEST,),  # of no page: an empty lease
    "engine/engine.py:_commit pool.set_tags": ("make", REQUEST),
    "engine/engine.py:_commit pool.convert": ("make", REQUEST),
    "engine/engine.py:enter pool.convert": ("enter",),
    "engine/engine.py:enter pool.close": ("enter",),
    "engine/engine.py:_drop pool.close": (
        "finish",
        "close_pages",
        "prefill_aborts",
        "prefill_drains",
        REQUEST,
    ),
    "engine/engine.py:_settle_reads pool.quarantine": (DAMAGE,),
    "engine/engine.py:_fork pool.lease": (REQUEST,),
    "engine/engine.py:_fork pool.allocate": (REQUEST,),
    "engine/engine.py:_fork pool.set_tags": (REQUEST,),
    "engine/engine.py:_fork kernels.copy_rows": (REQUEST,),
    "engine/engine.py:_make_room pool.extend": (REQUEST,),
    "engine/runner.py:run kernels.write": ("make", REQUEST),
    # decode's slots
    "handoff/decode.py:credit slots.grant": ("grant_use",),
    "handoff/decode.py:overdue slots.quarantine": ("quarantine",),
    "handoff/decode.py:_copied slots.grant": ("ask_again",),
    "handoff/decode.py:_copied slots.consume": ("verify_good", "verify_bad", "drop_copy"),
    "handoff/decode.py:_enter_if_whole slots.release": ("enter",),
    "handoff/decode.py:_end_if_quiet slots.release": ("decode_ends",),
    "worker/decode.py:_fence slots.fence": ("fence",),
    # landing
    "worker/decode.py:_land_few np.copyto": ("copy",),
    "worker/decode.py:_land_few pool.set_tags": ("verify_good",),
    # sending
    "worker/prefill.py:_freeze pool.zero_unfilled": ("make",),
    "worker/prefill.py:_freeze pool.lease": ("make", "find"),
    "worker/prefill.py:_write sender.write": ("write", "write_again"),
    "worker/prefill.py:_perform pool.close": ("ack_received", "prefill_drains", "prefill_fenced"),
    "transport/shm.py:write np.copyto": ("bytes_arrive",),
}


def places(root: Path) -> set[str]:
    """Where in this package something is called that changes pools, slots or pages."""
    found = set()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if inside.parts[0] not in BELOW_OR_BESIDE:
            tree = ast.parse(path.read_text())
            scopes = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
            for function in (f for scope in scopes for f in scope.body):
                if not isinstance(function, ast.ClassDef):
                    name = getattr(function, "name", "module")
                    found |= {f"{inside.as_posix()}:{name} {call}" for call in _calls(function)}
    return found


def _calls(function: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of = ast.unparse(node.func.value).rpartition(".")[2].lstrip("_")
            named = of == "np" and "memory" not in ast.unparse(node)
            if node.func.attr in CHANGES.get(of, ()) and not named:
                found.add(f"{of}.{node.func.attr}")
    return found


def test_pools_slots_and_pages_are_changed_at_the_listed_places_only() -> None:
    assert places(ROOT) == PLACES.keys()


def test_each_listed_place_performs_actions_of_the_protocol_or_says_what_else_it_does() -> None:
    for place, performed in PLACES.items():
        assert set(performed) <= ACTIONS.keys() | {REQUEST, DAMAGE}, place


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("self._slots.release(key)", "slots.release"),
        ("record.peer.slots.fence()", "slots.fence"),
        ("worker.engine.pool.close(lease)", "pool.close"),
        ("np.copyto(pool.memory[1], other)", "np.copyto"),
    ],
)
def test_a_new_place_is_seen(line: str, call: str, tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "new.py").write_text(f"class New:\n    def shortcut(self):\n        {line}\n")
    assert places(tmp_path) == {f"worker/new.py:shortcut {call}"}
