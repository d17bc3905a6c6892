"""The handoff as an abstract protocol, once, as data: for any number of attempts, pages, slots, workers and messages.

Guards and effects are Python text over relations. `interpret.py` evaluates that text as it stands on finite relations;
`smt.py` translates the same text for z3. So what is proved, what recordings are compared with and what the explorer's
transitions are instances of is one thing.

The one thing to know: this is what may happen, not what does. An abort can come at any moment, any page that is ready may be
written into any credited slot, a message that was said stays said (so it may arrive late, twice, in any order) until it is
lost. A worker's incarnation is an element of its own: after a restart there is another one, with other attempts.

    sorts      attempt, index (of a page in a prompt), page (decode's), source (prefill's page), use (of a slot), slot, segment,
               rows (a lineage: what a page should contain), prefiller, decoder (incarnations of workers)
    effects    `r += (x, y)` and `r -= (x, y)` add and remove, `r -= [... for ...]` many at once, `phase[t] = x` moves;
               `holds[p] = lies[s]` copies bytes. All of an action's effects look at the state before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hermetic.proof.vocabulary import MESSAGES

LETTERS = {"t": "attempt", "b": "attempt", "i": "index", "j": "index", "p": "page", "q": "source", "u": "use", "v": "use",
           "s": "slot", "g": "segment", "n": "prefiller", "m": "decoder"}  # fmt: skip


@dataclass(frozen=True)
class Action:
    """`params` name: sort ("rel" followed by sorts for a choice of many). `guard`s must all hold. `does` are its effects."""

    name: str
    params: tuple[tuple[str, str], ...]
    says: str
    guard: tuple[str, ...]
    does: tuple[str, ...]


def _a(head: str, says: str, guard: str = "", does: str = "", choose: str = "") -> Action:
    """`head`: name and parameters, whose first letters are their sorts; guards and effects one a line; `choose`: "take: index
    page" for a parameter that is a relation."""
    name, _, params = head.partition("(")
    given = [(x.strip(), LETTERS[x.strip()[0]]) for x in params.rstrip(")").split(",")]
    if choose:
        chosen, _, sorts = choose.partition(":")
        given.append((chosen.strip(), f"rel {sorts.strip()}"))
    lines = [[line.strip() for line in text.splitlines() if line.strip()] for text in (guard, does)]
    return Action(name, tuple(given), says, tuple(lines[0]), tuple(lines[1]))


_FORGET_UNREADY = """
    kept -= [(q, b) for b, i, q in source if b == t and not ready(t, i)]
    source -= [(b, i, q) for b, i, q in source if b == t and not ready(t, i)]"""
_PREFILL_LETS_GO = """
    kept -= [(q, b) for q, b in kept if b == t]
    source -= [(b, i, q) for b, i, q in source if b == t]
    ready -= [(b, i) for b, i in ready if b == t]"""
_NO_WRITE = "not any(b == t for b, i, u, q in writing)"
_NO_COPY = """
    not any(b == t for b, i, u, p in copying)
    not any(b == t for b, i, u, p in checking)"""
_TAKE_SLOT = """
    not used(u)
    not fenced(segment(u))
    owner(segment(u)) == decoder(t)
    not any(slot(v) == slot(u) for v, b in granted)"""
_NEW_USE = """
    used += (u,)
    given += (u, t)
    granted += (u, t)"""

_LIST = (
    # ------------------------------------------------------------------ how a handoff begins
    _a("submitted(t)", "prefill gets the gateway's request",
       "prefill[t] in ('new', 'has_grant')",
       "prefill[t] = 'queued' if prefill[t] == 'has_grant' else 'has_request'"),
    _a("reserve(t)", "decode leases all pages of the prompt and says grant",
       """decode[t] == 'none'
       all(needed(t, i) for i, p in take)
       all(any(i == j for j, p in take) for b, i in needed if b == t)
       not any(p == p2 for i, p in take for p2, b in leased)
       all((i == j) == (p == p2) for i, p in take for j, p2 in take)""",
       """decode[t] = 'reserved'
       leased += [(p, t) for i, p in take]
       table += [(t, i, p) for i, p in take]
       say_grant += (t,)""", choose="take: index page"),
    _a("repeat_grant(t)", "decode says grant again", "decode[t] == 'reserved'", "say_grant += (t,)"),
    _a("grant_received(t)", "prefill gets decode's grant",
       "say_grant(t)\nprefill[t] in ('new', 'has_request')",
       "prefill[t] = 'queued' if prefill[t] == 'has_request' else 'has_grant'"),
    _a("start(t)", "prefill takes its pages, free ones or ones that hold the same rows already, and says started",
       """prefill[t] == 'queued'
       all(needed(t, i) for i, q in take)
       all((i == j) == (q == q2) for i, q in take for j, q2 in take)
       all(final(q) and lineage(t, i) in contains[q] for i, q in take for q2, b in kept if q2 == q)""",
       """prefill[t] = 'sending'
       kept += [(q, t) for i, q in take]
       source += [(t, i, q) for i, q in take]
       final -= [(q,) for i, q in take if not any(q2 == q for q2, b in kept)]
       say_started += (t,)""", choose="take: index source"),
    _a("repeat_started(t)", "prefill says started again", "prefill[t] == 'sending'", "say_started += (t,)"),
    _a("started_received(t)", "decode gets prefill's started, and may give slots",
       "say_started(t)\ndecode[t] == 'reserved'", "decode[t] = 'landing'"),
    # ------------------------------------------------------------------ slots
    _a("grant_use(t, u)", "decode grants a free slot as credit",
       f"decode[t] == 'landing'{_TAKE_SLOT}",
       f"{_NEW_USE}\ncredited += (t, u)\nsay_credit += (t, u)"),
    _a("repeat_credit(t, u)", "decode says a credit again",
       "decode[t] == 'landing'\ncredited(t, u)", "say_credit += (t, u)"),
    _a("credit_received(t, u)", "prefill takes a credit that it has not seen",
       "say_credit(t, u)\nprefill[t] == 'sending'\nnot known(t, u)", "known += (t, u)"),
    # ------------------------------------------------------------------ computing and writing
    _a("make(t, i, q)", "prefill has computed a page, which nobody else holds, and leases it for sending",
       """prefill[t] == 'sending'
       source(t, i, q)
       not ready(t, i)
       not final(q)
       all(b == t for q2, b in kept if q2 == q)""",
       "contains[q] = {lineage(t, i)}\nready += (t, i)\nfinal += (q,)"),
    _a("find(t, i, q)", "prefill has a page that was computed for a like prompt, and leases it for sending",
       "prefill[t] == 'sending'\nsource(t, i, q)\nfinal(q)", "ready += (t, i)"),
    _a("write(t, i, u, q)", "prefill begins to write a page into a credited slot",
       """prefill[t] == 'sending'
       known(t, u)
       not spent(t, u)
       ready(t, i)
       source(t, i, q)
       not written(t, i)
       not any(b == t and j == i for b, j, v, q2 in writing)""",
       "writing += (t, i, u, q)\nspent += (t, u)"),
    _a("write_again(t, i, u, q)", "prefill writes a page that was asked for once more",
       """prefill[t] in ('sending', 'complete')
       say_resend(t, i, u)
       not spent(t, u)
       written(t, i)
       ready(t, i)
       source(t, i, q)""",
       "writing += (t, i, u, q)\nspent += (t, u)\nwritten -= (t, i)"),
    _a("bytes_arrive(t, i, u, q)", "bytes of a write arrive in its slot, as they are in its source now",
       "writing(t, i, u, q)\nnot fenced(segment(u))", "lies[slot(u)] = contains[q]"),
    _a("write_ends(t, i, u, q)", "a write has ended well",
       "writing(t, i, u, q)\nnot doubtful(t, u)",
       "writing -= (t, i, u, q)\nwrote += (t, i, u)\nwritten += (t, i)"),
    _a("write_fails(t, i, u, q)", "a write has failed, and no byte of it follows; prefill's half ends with it",
       "writing(t, i, u, q)\nnot doubtful(t, u)\nprefill[t] not in ACTIVE", "writing -= (t, i, u, q)"),
    _a("in_doubt(t, i, u, q)", "a write has failed, and may still be running: prefill's half is stuck",
       "writing(t, i, u, q)\nnot doubtful(t, u)",
       f"doubtful += (t, u)\nprefill[t] = 'stuck'{_FORGET_UNREADY}"),
    _a("announce(t, i, u)", "prefill says landed, for the first time or again",
       "wrote(t, i, u)\nprefill[t] in ('sending', 'complete')", "say_landed += (t, i, u)"),
    _a("completes(t)", "prefill says complete: every page is written",
       "prefill[t] == 'sending'\nall(written(t, i) for b, i in needed if b == t)",
       "prefill[t] = 'complete'\nsay_complete += (t,)"),
    _a("repeat_complete(t)", "prefill says complete again", "prefill[t] == 'complete'", "say_complete += (t,)"),
    # ------------------------------------------------------------------ landing
    _a("landed_received(t, i, u, p)", "decode gets landed, and will copy the page out of its slot",
       """say_landed(t, i, u)
       decode[t] == 'landing'
       granted(u, t)
       table(t, i, p)
       not verified(t, i)
       not any(b == t and (j == i or v == u) for b, j, v, p2 in copying)
       not any(b == t and (j == i or v == u) for b, j, v, p2 in checking)
       all((j == i) == (v == u) for b, j, v in asked if b == t and (j == i or v == u))""",
       "copying += (t, i, u, p)"),
    _a("copy(t, i, u, p)", "decode copies slot to page",
       "copying(t, i, u, p)",
       "holds[p] = lies[slot(u)]\ncopying -= (t, i, u, p)\nchecking += (t, i, u, p)"),
    _a("drop_copy(t, i, u, p)", "decode has ended, and does not make a copy that was to be made; the slot is free",
       "copying(t, i, u, p)\ndecode[t] in WAITING",
       "copying -= (t, i, u, p)\ngranted -= (u, t)\nquarantined -= (u,)"),
    _a("verify_good(t, i, u, p)", "decode hashes the page, finds it its own, and tags it; the slot is free",
       "checking(t, i, u, p)\ndecode[t] == 'landing'\nlineage(t, i) in holds[p]",
       """checking -= (t, i, u, p)
       verified += (t, i)
       granted -= (u, t)
       asked -= [(b, j, v) for b, j, v in asked if b == t and j == i]"""),
    _a("verify_bad(t, i, u, p)", "the page is not its own, or nobody needs it any more; the slot is free",
       "checking(t, i, u, p)",
       "checking -= (t, i, u, p)\ngranted -= (u, t)\nquarantined -= (u,)"),
    _a("ask_again(t, i, u)", "decode grants another slot and asks for a page once more",
       f"""decode[t] == 'landing'
       needed(t, i)
       not verified(t, i)
       not any(b == t and j == i for b, j, v in asked)
       not any(b == t and j == i for b, j, v, p in copying)
       not any(b == t and j == i for b, j, v, p in checking){_TAKE_SLOT}""",
       f"{_NEW_USE}\nasked += (t, i, u)\nsay_resend += (t, i, u)"),
    _a("repeat_resend(t, i, u)", "decode asks for a page once more, again",
       "decode[t] == 'landing'\nasked(t, i, u)", "say_resend += (t, i, u)"),
    _a("complete_received(t)", "decode gets prefill's complete, with the counts that it reserved",
       "say_complete(t)\ndecode[t] == 'landing'", "heard += (t,)"),
    _a("enter(t)", "every page is verified: the request enters a batch, decode says ack; slots beyond need return",
       """decode[t] == 'landing'
       heard(t)
       all(verified(t, i) for b, i in needed if b == t)""",
       """decode[t] = 'entered'
       went_on += (t,)
       granted -= [(u, b) for u, b in granted if b == t]
       say_ack += (t,)"""),
    _a("repeat_ack(t)", "decode says ack again", "went_on(t)", "say_ack += (t,)"),
    _a("ack_received(t)", "prefill gets decode's ack, has nothing in flight, and closes its send leases",
       "say_ack(t)\nprefill[t] == 'complete'\nnot any(b == t and not doubtful(t, u) for b, i, u, q in writing)",
       f"prefill[t] = 'ended'{_PREFILL_LETS_GO}"),
    _a("finish(t)", "the answer is whole: the request's pages go back",
       "decode[t] == 'entered'",
       """decode[t] = 'ended'
       leased -= [(p, b) for p, b in leased if b == t]
       table -= [(b, i, p) for b, i, p in table if b == t]"""),
    # ------------------------------------------------------------------ ends
    _a("prefill_aborts(t)", "prefill's half ends for its client (told to, or on its own), and stops computing",
       "prefill[t] in ACTIVE", f"prefill[t] = 'draining'{_FORGET_UNREADY}"),
    _a("prefill_drains(t)", "prefill's writes have ended: it closes its send leases and says drained",
       "prefill[t] == 'draining'\nnot any(b == t and not doubtful(t, u) for b, i, u, q in writing)",
       f"prefill[t] = 'ended'\nsay_drained += (t,){_PREFILL_LETS_GO}"),
    _a("prefill_fenced(t)", "the sender that prefill wrote with is closed: whatever waited for writes ends",
       f"prefill[t] != 'ended'\n{_NO_WRITE}",
       f"prefill[t] = 'ended'\nsay_drained += (t,){_PREFILL_LETS_GO}"),
    _a("repeat_drained(t)", "prefill, asked about what has ended, says drained",
       "prefill[t] == 'ended'", "say_drained += (t,)"),
    _a("never_reserved(t)", "decode's half ends before it has pages", "decode[t] == 'none'", "decode[t] = 'ended'"),
    _a("decode_aborts(t)", "decode's half ends for its client (told to, or on its own)",
       "decode[t] in OPEN", "decode[t] = 'draining'"),
    _a("close_pages(t)", "decode's pages go back: no copy of its own into them is to come",
       f"decode[t] in WAITING{_NO_COPY}",
       """leased -= [(p, b) for p, b in leased if b == t]
       table -= [(b, i, p) for b, i, p in table if b == t]"""),
    _a("drained_received(t)", "decode gets prefill's drained",
       "say_drained(t)\ndecode[t] in WAITING", "quiet += (t,)"),
    _a("quarantine(t)", "drained did not come in time: the slots go out of use",
       "decode[t] == 'draining'",
       "decode[t] = 'quarantined'\nquarantined += [(u,) for u, b in granted if b == t]"),
    _a("decode_ends(t)", "nobody can write for it any more (drained, fenced, or no slot is open): its slots are free",
       f"""decode[t] in WAITING
       not any(b == t for p, b in leased)
       quiet(t) or all(fenced(segment(u)) for u, b in granted if b == t){_NO_COPY}""",
       """decode[t] = 'ended'
       quarantined -= [(u,) for u, b in granted if b == t]
       granted -= [(u, b) for u, b in granted if b == t]"""),
    # ------------------------------------------------------------------ fences and death
    _a("fence(g)", "decode proves that nothing written to this segment arrives any more", "", "fenced += (g,)"),
    _a("drop(g)", "prefill is told of the fence, and closes the sender of that segment",
       "fenced(g)", "writing -= [(t, i, u, q) for t, i, u, q in writing if segment(u) == g]"),
    _a("prefill_dies(n)", "a prefill worker's process ends: its writes are over, its pages are gone",
       "",
       """prefill |= {t: 'ended' for t in prefill if prefiller(t) == n}
       writing -= [(t, i, u, q) for t, i, u, q in writing if prefiller(t) == n]
       kept -= [(q, t) for q, t in kept if prefiller(t) == n]
       source -= [(t, i, q) for t, i, q in source if prefiller(t) == n]
       ready -= [(t, i) for t, i in ready if prefiller(t) == n]"""),
    _a("decode_dies(m)", "a decode worker's process ends, and its memory with it",
       "",
       """decode |= {t: 'ended' for t in decode if decoder(t) == m}
       fenced += [(g,) for g in segments if owner(g) == m]
       leased -= [(p, t) for p, t in leased if decoder(t) == m]
       table -= [(t, i, p) for t, i, p in table if decoder(t) == m]
       verified -= [(t, i) for t, i in verified if decoder(t) == m]
       copying -= [(t, i, u, p) for t, i, u, p in copying if decoder(t) == m]
       checking -= [(t, i, u, p) for t, i, u, p in checking if decoder(t) == m]
       quarantined -= [(u,) for u, t in granted if decoder(t) == m]
       granted -= [(u, t) for u, t in granted if decoder(t) == m]"""),
    # ------------------------------------------------------------------ what may always be forgotten
    _a("prefill_forgets(t)", "a half that has ended for its client needs its books no more",
       "prefill[t] not in ACTIVE",
       """known -= [(b, u) for b, u in known if b == t]
       spent -= [(b, u) for b, u in spent if b == t]
       wrote -= [(b, i, u) for b, i, u in wrote if b == t]
       written -= [(b, i) for b, i in written if b == t]"""),
    _a("decode_forgets(t)", "the same for decode",
       "decode[t] in ('draining', 'quarantined', 'ended')",
       """credited -= [(b, u) for b, u in credited if b == t]
       asked -= [(b, i, u) for b, i, u in asked if b == t]
       verified -= [(b, i) for b, i in verified if b == t]
       heard -= (t,)"""),
    _a("forget_entered(t)", "that a request went on need not be known for ever", "decode[t] == 'ended'",
       "went_on -= (t,)\nquiet -= (t,)\nverified -= [(b, i) for b, i in verified if b == t]"),
    _a("forget_use(u)", "a use that nobody can name any more",
       """not any(v == u for v, b in granted)
       not any(v == u for b, v in say_credit)
       not any(v == u for b, i, v in say_resend)
       not any(v == u for b, i, v in say_landed)
       not any(v == u for b, v in credited)
       not any(v == u for b, v in known)
       not any(v == u for b, v in spent)
       not any(v == u for b, i, v in asked)
       not any(v == u for b, i, v in wrote)
       not any(v == u for b, i, v, q in writing)""",
       "given -= [(v, b) for v, b in given if v == u]\ndoubtful -= [(b, v) for b, v in doubtful if v == u]"),
)  # fmt: skip


def _losses() -> tuple[Action, ...]:
    """A message may be lost: one action for each kind."""
    found = []
    for name, relation in MESSAGES.items():
        names = [{"attempt": "t", "index": "i", "use": "u"}[sort] for sort in relation.sorts]
        said = f"{name}({', '.join(names)})"
        does = f"{name} -= ({', '.join(names)},)"
        found.append(_a(said.replace("say_", "lose_"), f"a message is lost: {name[4:]}", said, does))
    return tuple(found)


ACTIONS: dict[str, Action] = {a.name: a for a in (*_LIST, *_losses())}
FORGETTING = tuple(
    name for name in ACTIONS if name.startswith(("lose_", "forget_")) or name.endswith("_forgets")
)


# What a transport that breaks its promises, or damage, may do to a slot. The promises about *pages* hold all the same.
STRAY = Action("stray", (("s", "slot"), ("junk", "rel rows")), "bytes change in a slot, against the transport's promises",
               (), ("lies[s] = junk",))  # fmt: skip
LIES = (
    _a("lie_landed(t, i, u)", "prefill says landed, and it is not true", "", "say_landed += (t, i, u)"),
    _a("lie_complete(t)", "prefill says complete, and it is not true", "", "say_complete += (t,)"),
    _a("lie_started(t)", "prefill says started, and it is not true", "", "say_started += (t,)"),
    _a("lie_drained(t)", "prefill says drained, and it is not true", "", "say_drained += (t,)"),
)
HOSTILE: dict[str, Action] = {a.name: a for a in (STRAY, *LIES)}
