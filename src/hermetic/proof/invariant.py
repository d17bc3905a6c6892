"""What holds in every state of the abstract protocol: the promises I1-I3, and what else is needed to prove them.

Each line is Python text over the relations of `abstract.py`. The one thing to know: most promises are conjuncts like any other,
and what is proved is that every action keeps all conjuncts true; promises that `follow` are implied by the others.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True)
class Conjunct:
    """`promise`: I1, I2, I3, or "" for what only helps to prove those. `follows`: from the others, at once; not assumed."""

    name: str
    says: str
    holds: str
    promise: str = ""
    follows: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Every name that it uses."""
        return frozenset(node.id for node in ast.walk(ast.parse(self.holds)) if isinstance(node, ast.Name))


_MAY_START = "prefill[t] in BEFORE and not spent(t, u) and not fenced(segment(u))"

_LIST = (
    # ---------------------------------------------------------------------- promises
    Conjunct("read-own", "every page in the table of a running request is leased by it and holds its own rows",
             "all(leased(p, t) and lineage(t, i) in holds[p] for t, i, p in table if decode[t] == 'entered')",
             "I1", follows=True),
    Conjunct("read-whole", "every page of a running request's prompt is verified",
             "all(verified(t, i) for t, i in needed if decode[t] == 'entered')", "I1"),
    Conjunct("verified-is-own", "a page that is verified holds the rows of its own prompt",
             "all(lineage(t, i) in holds[p] for t, i, p in table if verified(t, i))", "I1"),
    Conjunct("one-holder", "a decode page is leased by one attempt at most",
             "all(t == b for p, t in leased for p2, b in leased if p == p2)", "I2"),
    Conjunct("one-place", "a decode page stands for one page of one prompt at most",
             "all(t == b and i == j for t, i, p in table for b, j, p2 in table if p == p2)", "I2"),
    Conjunct("copy-to-unverified", "no copy is made, or checked, for a page that is verified already",
             "all(not verified(t, i) for t, i, u, p in copying) and all(not verified(t, i) for t, i, u, p in checking)", "I2"),
    Conjunct("sent-is-frozen", "a source page that a write reads, or that is leased for sending, holds its own rows and stays so",
             "all(final(q) and lineage(t, i) in contains[q] for t, i, q in source if ready(t, i)) and "
             "all(final(q) and lineage(t, i) in contains[q] for t, i, u, q in writing)", "I2"),
    Conjunct("write-into-own-slot", "where a write may still arrive, the slot is granted to its attempt, in this use",
             "all(granted(u, t) or fenced(segment(u)) for t, i, u, q in writing)", "I3"),
    Conjunct("one-grant", "a slot is granted to one attempt, in one use",
             "all(u == v and t == b for u, t in granted for v, b in granted if slot(u) == slot(v))", "I3"),
    Conjunct("write-reads-held", "the source of a write that may still run is held for it",
             "all(kept(q, t) for t, i, u, q in writing)", "I3", follows=True),
    Conjunct("copy-is-in-table", "a copy goes into the page that stands in its attempt's table",
             "all(table(t, i, p) for t, i, u, p in copying) and all(table(t, i, p) for t, i, u, p in checking)", "I3"),
    Conjunct("copy-is-granted", "a copy comes from a slot that is granted to its attempt, in this use",
             "all(granted(u, t) for t, i, u, p in copying) and all(granted(u, t) for t, i, u, p in checking)", "I3"),
    Conjunct("table-is-leased", "what stands in a page table is leased by its attempt",
             "all(leased(p, t) for t, i, p in table)", "I3"),
    # ------------------------------------------------------------------- decode's half
    Conjunct("table-has-one-page", "a page of a prompt has one decode page at most",
             "all(p == p2 for t, i, p in table for b, j, p2 in table if t == b and i == j)"),
    Conjunct("table-is-needed", "a page table has only pages of the prompt",
             "all(needed(t, i) for t, i, p in table)"),
    Conjunct("nothing-before", "before it is reserved an attempt holds no page; before landing it is given no slot and verifies nothing",
             "all(decode[t] != 'none' for p, t in leased) and all(decode[t] not in ('none', 'reserved') for u, t in given) and "
             "all(decode[t] not in ('none', 'reserved') for t, i in verified)"),
    Conjunct("one-copy", "a page of a prompt, and a slot, is in one copy at most",
             "all(u == v and i == j for t, i, u, p in copying for b, j, v, p2 in copying if t == b and (i == j or u == v)) and "
             "all(u == v and i == j for t, i, u, p in checking for b, j, v, p2 in checking if t == b and (i == j or u == v))"
             " and not any(t == b and (i == j or u == v) for t, i, u, p in copying for b, j, v, p2 in checking)"),
    Conjunct("asked-is-open", "a page that is asked for once more is not verified",
             "all(not verified(t, i) for t, i, u in asked if decode[t] in ('landing', 'entered'))"),
    Conjunct("asked-is-needed", "only pages of the prompt are asked for once more",
             "all(needed(t, i) for t, i, u in asked)"),
    # ------------------------------------------------------------------- uses of slots
    Conjunct("given-in-own-segment", "a use is in a segment of its attempt's decode worker",
             "all(owner(segment(u)) == decoder(t) for u, t in given)"),
    Conjunct("named-is-given", "credits, resends, writes and news of them name uses that were given to that attempt",
             "all(given(u, t) for t, u in say_credit) and all(given(u, t) for t, i, u in say_resend) and "
             "all(given(u, t) for t, i, u in say_landed) and all(given(u, t) for t, u in credited) and "
             "all(given(u, t) for t, i, u in asked) and all(given(u, t) for t, u in known) and "
             "all(given(u, t) for t, u in spent) and all(given(u, t) for t, i, u in wrote) and "
             "all(given(u, t) for t, i, u, q in writing)"),
    Conjunct("credit-is-granted", "a credit that prefill may still use is granted",
             f"all(granted(u, t) for t, u in say_credit if {_MAY_START}) and "
             f"all(granted(u, t) for t, u in credited if {_MAY_START}) and "
             f"all(granted(u, t) for t, u in known if {_MAY_START})"),
    Conjunct("resend-is-granted", "a resend that prefill may still answer is granted",
             "all(granted(u, t) for t, i, u in say_resend "
             "if prefill[t] in ACTIVE and not spent(t, u) and not fenced(segment(u)))"),
    Conjunct("resend-is-asked", "while it is landing, decode waits for what prefill may still answer a resend with",
             "all(asked(t, i, u) for t, i, u in say_resend "
             "if decode[t] == 'landing' and prefill[t] in ACTIVE and not spent(t, u))"),
    Conjunct("asked-comes-there", "a page that was asked for into another slot is copied from that slot only",
             "all(u == v for t, i, u in asked for b, j, v, p in copying if t == b and i == j) and "
             "all(u == v for t, i, u in asked for b, j, v, p in checking if t == b and i == j)"),
    Conjunct("asked-is-granted", "a slot that a page is asked into once more is granted until it is written",
             "all(granted(u, t) for t, i, u in asked "
             "if prefill[t] in ACTIVE and not spent(t, u) and not fenced(segment(u)))"),
    # ------------------------------------------------------------------- prefill's half
    Conjunct("write-is-spent", "the use of a write that may still run counts as spent, as long as prefill goes on",
             "all(spent(t, u) or prefill[t] not in ACTIVE for t, i, u, q in writing)"),
    Conjunct("one-write", "a use of a slot, and a page of a prompt, is in one write at most",
             "all(i == j and u == v and q == q2 for t, i, u, q in writing for b, j, v, q2 in writing "
             "if t == b and (u == v or i == j))"),
    Conjunct("wrote-is-over", "a write that has ended is not running any more, and its use is spent",
             "all(not any(v == u and b == t for b, j, v, q in writing) for t, i, u in wrote) and "
             "all(spent(t, u) or prefill[t] not in ACTIVE for t, i, u in wrote)"),
    Conjunct("landed-is-over", "what was announced is not being written any more, and never will be",
             "all(not any(v == u and b == t for b, j, v, q in writing) for t, i, u in say_landed) and "
             "all(spent(t, u) or prefill[t] not in ACTIVE for t, i, u in say_landed)"),
    Conjunct("copied-is-over", "a slot that is copied from is not being written any more, and never will be",
             "all(not any(v == u and b == t for b, j, v, q in writing) for t, i, u, p in copying) and "
             "all(spent(t, u) or prefill[t] not in ACTIVE for t, i, u, p in copying) and "
             "all(not any(v == u and b == t for b, j, v, q in writing) for t, i, u, p in checking) and "
             "all(spent(t, u) or prefill[t] not in ACTIVE for t, i, u, p in checking)"),
    Conjunct("written-is-over", "a page that is written is not being written",
             "all(not any(j == i and b == t for b, j, u, q in writing) for t, i in written)"),
    Conjunct("complete-is-past", "once complete is said, only resends are written",
             "all(prefill[t] not in BEFORE for t in say_complete) and all(prefill[t] not in BEFORE for t in heard)"),
    Conjunct("complete-is-quiet", "after complete, a write that may still run is one that decode asked for",
             "all(asked(t, i, u) for t, i, u, q in writing "
             "if decode[t] == 'landing' and (prefill[t] == 'complete' or say_complete(t) or heard(t)))"),
    Conjunct("over-when-drained", "prefill has ended what it calls drained, and what decode takes for drained",
             "all(prefill[t] == 'ended' for t in say_drained) and all(prefill[t] == 'ended' for t in quiet)"),
    Conjunct("over-is-over", "an attempt that has ended at prefill has no write",
             "all(prefill[t] != 'ended' for t, i, u, q in writing)"),
    Conjunct("doubt-is-stuck", "an attempt with a write in doubt is stuck",
             "all(prefill[t] in ('stuck', 'ended') for t, u in doubtful)"),
    Conjunct("source-is-kept", "what stands in a source table is held for its attempt",
             "all(kept(q, t) for t, i, q in source)"),
    Conjunct("source-has-one-place", "an attempt has a source page in one place at most",
             "all(i == j for t, i, q in source for b, j, q2 in source if t == b and q == q2)"),
    Conjunct("write-from-table", "a write reads the page in its attempt's source table",
             "all(source(t, i, q) and ready(t, i) for t, i, u, q in writing)"),
    Conjunct("source-has-one-page", "a page of a prompt has one source page at most",
             "all(q == q2 for t, i, q in source for b, j, q2 in source if t == b and i == j)"),
    Conjunct("source-is-needed", "a source table has only pages of the prompt",
             "all(needed(t, i) for t, i, q in source)"),
    Conjunct("final-is-own", "a source page that is final holds the rows of everyone who has it in a table",
             "all(lineage(t, i) in contains[q] for t, i, q in source if final(q))"),
    Conjunct("nothing-without-source", "before its pages are taken, prefill holds none for an attempt",
             "all(prefill[t] not in ('new', 'has_request', 'has_grant', 'queued') for q, t in kept) and "
             "all(prefill[t] not in ('new', 'has_request', 'has_grant', 'queued') for t, i in ready)"),
)  # fmt: skip

CONJUNCTS: dict[str, Conjunct] = {c.name: c for c in _LIST if not c.follows}
PROMISES: dict[str, Conjunct] = {c.name: c for c in _LIST if c.promise}


@dataclass(frozen=True)
class Moment:
    """What is so whenever `action` can happen, of its own parameters: the promises at the moments at which bytes move or
    memory changes hands."""

    action: str
    promise: str
    says: str
    holds: str

    @property
    def name(self) -> str:
        return f"when-{self.action}"


MOMENTS: dict[str, Moment] = {m.action: m for m in (
    Moment("bytes_arrive", "I3", "bytes arrive only in a slot that is granted to their attempt, from a source page held for it",
           "granted(u, t) and kept(q, t)"),
    Moment("copy", "I2", "only an unverified page, leased by the attempt, is copied to, from a slot that nobody writes any more",
           "leased(p, t) and not verified(t, i) and granted(u, t) and not any(b == t and v == u for b, j, v, q in writing)"),
    Moment("make", "I2", "a source page is written by its only holder, and no write reads it",
           "all(b == t for q2, b in kept if q2 == q) and not any(q2 == q for b, j, u, q2 in writing)"),
    Moment("reserve", "I3", "a decode page that is taken is in no copy and in no other table",
           "not any(p == p2 for i, p in take for b, j, u, p2 in copying) and "
           "not any(p == p2 for i, p in take for b, j, u, p2 in checking) and "
           "not any(p == p2 for i, p in take for b, j, p2 in table)"),
    Moment("start", "I3", "a source page that is taken is read by no write, or holds these rows and stays so",
           "all(final(q) and lineage(t, i) in contains[q] for i, q in take for b, j, u, q2 in writing if q2 == q)"),
    Moment("grant_use", "I3", "no write may still arrive in a slot that is granted",
           "not any(slot(v) == slot(u) and not fenced(segment(v)) for b, i, v, q in writing)"),
    Moment("ask_again", "I3", "no write may still arrive in a slot that is granted for a resend",
           "not any(slot(v) == slot(u) and not fenced(segment(v)) for b, j, v, q in writing)"),
)}  # fmt: skip

# These alone are kept by every action even when the transport breaks its promises and prefill lies (`abstract.HOSTILE`).
ALONE = (
    "read-whole", "verified-is-own", "one-holder", "one-place", "copy-to-unverified", "table-is-leased",
    "table-has-one-page", "table-is-needed", "nothing-before", "one-copy", "copy-is-in-table",
)  # fmt: skip
