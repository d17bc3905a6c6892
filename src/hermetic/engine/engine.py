"""The engine of one worker: who computes next, under which pages, and what may be said about it.

One object for every role. A unified worker submits jobs and gets tokens; a prefill worker submits jobs and gets pages
and first tokens (`PagesReady`, `PromptDone`); a decode worker reserves pages, has them filled from outside, and lets the
job `enter`. Each `step` computes one token for every running sequence and up to `chunk` prompt tokens beside them.

The one thing to know: nothing of a step leaves it before its verification is clean. Events are made after the check,
for sequences that passed it; a page that fails takes down exactly the jobs whose page tables hold it.

Waiting. Jobs are admitted by age. One that does not fit now lets younger ones pass, at most MAX_PASSED of them; then
everybody behind it waits until it is placed, which running requests guarantee by ending. One that can never fit is
refused at the door (`admit`), so nobody waits for pages that cannot come.

Running again. A job may bring output tokens, made by an earlier attempt. Its prompt is computed as a prompt and they are
fed to decode steps, as the first time, so every row has the bits that it had and the answer goes on as it would have.

Sharing. When a job is placed, leading full pages of its prompt that somebody holds already (`prefix.py`) are leased and
not computed again, on unified and prefill engines. Only pages whose rows were all computed as part of a prompt are
offered, so that an answer has the same bits whether its prefix was shared or not. Nobody waits for a page to be computed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from hermetic.engine.batch import Piece, build, check_piece, check_rows, unwritable
from hermetic.engine.prefix import Leading, PrefixIndex
from hermetic.engine.runner import Result, Runner
from hermetic.engine.sequence import (
    Done,
    Emit,
    Event,
    First,
    Job,
    JobDone,
    JobFailed,
    PagesReady,
    Phase,
    Preempted,
    PromptDone,
    Reserved,
    Sequence,
    Started,
)
from hermetic.handoff.messages import Key
from hermetic.handoff.outcome import Refused
from hermetic.kv.lineage import Chain, Hasher
from hermetic.kv.pool import I32, Kind, Lease, OwnershipError, PoolExhausted
from hermetic.kv.seals import SealKey
from hermetic.model.errors import NonFiniteLogits
from hermetic.model.sampling import Sampled, SampleRow, sample

MAX_PASSED = 16  # younger requests that may overtake a waiting one
_NONE: I32 = np.empty(0, np.int32)


class Role(Enum):
    UNIFIED = "unified"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass
class EngineCounters:
    """Running totals of this engine."""

    steps: int = 0
    prompt_tokens: int = 0  # computed here; without those that were shared
    prefix_pages_shared: int = 0
    prefix_tokens_shared: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    tag_checks: int = 0  # page tables compared with the tags, sequences x steps
    tiles_verified_read: int = 0
    requests_verified_read: int = 0  # requests of which at least one step's reads were verified clean
    sequence_steps_verified_read: int = 0  # sequences x steps
    kv_integrity_failures: int = 0
    forks: int = 0
    requests: int = 0


class Engine:
    """Scheduler over one runner. Not thread-safe: one loop drives it."""

    def __init__(
        self,
        runner: Runner,
        hasher: Hasher,
        key: SealKey,
        role: Role,
        window: int,
        eos: Iterable[int],
        chunk: int = 512,
    ) -> None:
        self.runner, self.role, self.chunk = runner, role, chunk
        self.pool, self.rows, self._hasher, self._key = runner.pool, runner.rows, hasher, key
        self.size = self.pool.geometry.page_size
        self.eos = tuple(eos)
        self.counters = EngineCounters()
        # What one sequence can ever be here: the model's window, the pool, and a row's table.
        self.max_tokens = min(window, self.pool.count * self.size)
        self._waiting: list[Sequence] = []  # by age
        self._prefilling: list[Sequence] = []  # by age
        self._running: list[Sequence] = []  # by age
        self._reserved: dict[Key, Sequence] = {}
        # Dicts in place of sets here and below: what is done for each of several is done in the same order in every process.
        self._live: dict[Key, dict[Sequence, None]] = {}
        self._read_verified: set[Key] = set()  # live jobs counted in requests_verified_read
        self._rows_promised = 0  # rows that admitted jobs will need and do not have yet
        self._events: list[Event] = []
        self._prefixes = PrefixIndex(self.pool)
        self._room_seen: tuple[int, ...] | None = self._room()

    # ---------------------------------------------------------------- entering

    def admit(self, job: Job) -> Refused | None:
        """Whether this engine could ever serve the job: a refusal by its own numbers, before anything is allocated."""
        tokens, wanted = len(job.tokens), job.prompt + job.params.max_tokens
        if tokens < 1 or job.prompt < 1:
            return Refused("empty_prompt", "the prompt has no tokens")
        if job.prompt > tokens or tokens - job.prompt >= job.params.max_tokens:
            return Refused(
                "invalid_request",
                f"{tokens} tokens came, {job.prompt} of them the prompt's, for at most {job.params.max_tokens} output "
                "tokens: a prompt is not longer than what came, and at least one output token is still to be made",
            )
        if max(tokens + 1, wanted) > self.max_tokens:
            return Refused(
                "context_length_exceeded",
                f"{job.prompt} prompt tokens and up to {job.params.max_tokens} output tokens make {wanted}; "
                f"this {self.role.value} worker holds at most {self.max_tokens} tokens of one request "
                f"({self.pool.count} pages of {self.size})",
            )
        vocab = self.runner.model.config.vocab
        if int(job.tokens.min()) < 0 or int(job.tokens.max()) >= vocab:
            return Refused("invalid_token_id", f"token ids must be from 0 to {vocab - 1}")
        if tokens > job.prompt and job.n != 1:
            return Refused("invalid_request", f"{job.n} choices cannot go on from the same output tokens")
        if not 1 <= job.n <= self.rows.capacity:
            return Refused(
                "invalid_request",
                f"n is {job.n}; this worker runs at most {self.rows.capacity} choices at once",
            )
        if job.key in self._live:
            return Refused("duplicate_attempt", f"attempt {job.key} is here already")
        return None

    def submit(self, job: Job) -> None:
        """Queue an admitted job: for computing, or on a decode worker for its reservation."""
        assert self.admit(job) is None
        seq = Sequence(job, job.choice, job.tokens.tolist(), self._chain(job))
        self._live[job.key] = {seq: None}
        bisect.insort(self._waiting, seq, key=lambda s: s.job.age)
        self.counters.requests += 1
        self._room_seen = None  # there is somebody new to try

    def reserved(self, key: Key) -> Sequence:
        """Decode: the sequence whose pages are being filled; its chain says what each page must hold."""
        return self._reserved[key]

    def pages(self, key: Key) -> I32:
        """The page table of a job that has one sequence here (a prompt being computed or landing)."""
        (seq,) = self._live[key]
        return seq.pages

    def enter(self, key: Key, firsts: tuple[First, ...]) -> None:
        """Decode: all pages of the prompt are tagged and verified; go on from the first tokens."""
        seq = self._reserved.pop(key)
        if len(firsts) != seq.job.n:
            self._fail(key, "kv_integrity", f"{len(firsts)} first tokens came for {seq.job.n} choices")
            return
        vocab = self.runner.model.config.vocab
        if not all(0 <= first.token < vocab for first in firsts):
            self._fail(key, "kv_integrity", f"a first token came that is not from 0 to {vocab - 1}")
            return
        assert seq.growing is not None
        assert seq.full is not None
        tail = seq.job.prompt // self.size  # first page that a row may still be added to
        landed = seq.growing
        self.pool.convert(landed, seq.pages[:tail], seq.full)
        seq.growing = self._empty(Kind.APPEND, key)
        self.pool.convert(landed, seq.pages[tail:], seq.growing)
        self.pool.close(landed)
        seq.computed = seq.job.prompt
        self._begin(seq, firsts)

    def cancel(self, key: Key, choice: int | None = None) -> bool:
        """Drop a job, or one of its choices. No event follows for what was dropped. False if it is not here."""
        live = self._live.get(key)
        if live is None:
            return False
        for seq in [s for s in live if choice is None or s.choice == choice]:
            self._drop(seq)
        if not live:
            del self._live[key]
            if choice is not None:
                self._events.append(JobDone(key))
        return True

    def fail(self, key: Key, code: str, reason: str) -> None:
        """End a job by a fault that was found outside (a page that did not land)."""
        self._fail(key, code, reason)

    def withhold(self, pages: I32) -> None:
        """Share these pages with no later job: one that held them has failed, and its own end says why."""
        self._prefixes.forget(pages.tolist())

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._events or self._prefilling or self._running or self._room() != self._room_seen)

    def _room(self) -> tuple[int, ...]:
        """What admission depends on; while it does not change, trying again is idle work."""
        return (
            len(self._waiting),
            self.pool.free,
            self.rows.free - self._rows_promised,
            self._prefixes.noted,
        )

    def depth(self) -> dict[str, int]:
        """How many sequences are in each phase."""
        return {
            "waiting": len(self._waiting),
            "reserved": len(self._reserved),
            "prefilling": len(self._prefilling),
            "running": len(self._running),
        }

    # -------------------------------------------------------------------- step

    def step(self) -> list[Event]:
        """Admit, compute one step, check it, and say what came of it."""
        self._admit_waiting()
        decode = self._make_room()
        pieces = self._pieces()
        decode, pieces = self._check_tags(decode, pieces)
        if decode or pieces:
            self._compute(decode, pieces)
        events, self._events = self._events, []
        return events

    def _check_tags(self, decode: list[Sequence], pieces: list[Piece]) -> tuple[list[Sequence], list[Piece]]:
        """Leave out (and fail) every sequence whose page table does not hold what it expects."""
        while (wrong := check_rows(self.pool, self.rows, decode)) is not None:
            seq, mismatch = wrong
            self._fail(seq.job.key, "kv_integrity", f"page {mismatch.index} of the batch: {mismatch.reason}")
            decode = [s for s in decode if s.phase is Phase.RUNNING]
        for piece in pieces:
            if piece.seq.phase is not Phase.PREFILLING:
                continue
            found = check_piece(self.pool, piece)
            if found is not None:
                self._fail(
                    piece.seq.job.key, "kv_integrity", f"page {found.index} of the prompt: {found.reason}"
                )
        pieces = [p for p in pieces if p.seq.phase is Phase.PREFILLING]
        for seq in unwritable(self.pool, self.rows, decode, pieces):
            self._fail(
                seq.job.key, "kv_integrity", "its next row would go to a page that is not its own alone"
            )
        decode = [s for s in decode if s.phase is Phase.RUNNING]
        self.counters.tag_checks += len(decode) + len(pieces)
        return decode, [p for p in pieces if p.seq.phase is Phase.PREFILLING]

    def _compute(self, decode: list[Sequence], pieces: list[Piece]) -> None:
        step = build(self.pool, self.rows, self._key.bind, decode, pieces)
        result = self.runner.run(step)
        self.counters.steps += 1
        self._settle_reads(result, [*decode, *(p.seq for p in pieces)])
        # Only now, with every failed sequence gone, does the step's work count.
        self._commit(step.page, step.first + step.count, step.lineages, decode, pieces)
        self._advance(decode, pieces, result)

    def _settle_reads(self, result: Result, read: list[Sequence]) -> None:
        if self.runner.verify:
            self.counters.tiles_verified_read += result.tiles
            clean = [seq for seq in read if seq not in result.bad]
            self.counters.sequence_steps_verified_read += len(clean)
            fresh = {seq.job.key for seq in clean} - self._read_verified
            self.counters.requests_verified_read += len(fresh)
            self._read_verified |= fresh
            self._read_verified &= self._live.keys()
        pages = {int(seq.pages[index]) for seq, index in result.bad.items()}
        if not pages:
            return
        suspect = np.array(sorted(pages), np.int32)
        self.pool.quarantine(suspect[self.pool.held(suspect)])
        hit: dict[Key, None] = {
            seq.job.key: None
            for live in self._live.values()
            for seq in live
            if pages.intersection(seq.pages.tolist())
        }
        hit |= {seq.job.key: None for seq in result.bad}
        for key in hit:
            self._fail(key, "kv_integrity", "a page of this request failed verification when it was read")

    def _commit(
        self, page: I32, fill: I32, lineages: np.ndarray, decode: list[Sequence], pieces: list[Piece]
    ) -> None:
        """Tag what was written, for sequences that are still alive, and make full pages read-only.

        Full pages of prompts are offered to others from here on. A page that a decode step added to is not: the two
        attention kernels may differ in a row's last bits, and whoever shared it would answer by what its neighbour did."""
        owners: list[Sequence] = list(decode)
        for piece in pieces:
            owners += [piece.seq] * (-(-(piece.start + piece.count) // self.size) - piece.start // self.size)
        alive = np.fromiter(
            (s.phase in (Phase.RUNNING, Phase.PREFILLING) for s in owners), np.bool_, len(owners)
        )
        self.pool.set_tags(page[alive], lineages[alive], fill[alive])
        full = alive & (fill == self.size)
        for i in np.flatnonzero(full):
            seq = owners[i]
            assert seq.growing is not None
            assert seq.full is not None
            self.pool.convert(seq.growing, page[i : i + 1], seq.full)
        full[: len(decode)] = False
        self._prefixes.note(page[full], lineages[full])

    def _advance(self, decode: list[Sequence], pieces: list[Piece], result: Result) -> None:
        self.counters.prompt_tokens += sum(p.count for p in pieces)
        wanted: list[tuple[int, Sequence, int]] = []  # row of the logits, sequence, choice
        for i, seq in enumerate(decode):
            if seq.phase is Phase.RUNNING:
                seq.computed += 1
                if seq.computed == len(
                    seq.tokens
                ):  # else its next token is known: it is made up to where it was
                    wanted.append((i, seq, seq.choice))
        finished: list[Sequence] = []
        at = len(decode)
        for piece in pieces:
            seq, row = piece.seq, at
            at += piece.last
            if seq.phase is not Phase.PREFILLING:
                continue
            seq.computed += piece.count
            if self.role is Role.PREFILL and not piece.last:
                self._events.append(PagesReady(seq.job.key, seq.computed // self.size))
            if piece.last:
                finished.append(seq)
                if not seq.outputs:
                    wanted += [(row, seq, seq.job.choice + i) for i in range(seq.job.n)]
        firsts: dict[Sequence, list[First]] = {seq: [] for seq in finished}
        for seq, choice, got in self._sample(wanted, result):
            if seq in firsts:
                firsts[seq].append(First(got.token, got.logprob, got.top))
            elif seq.phase is Phase.RUNNING:
                self._append(seq, choice, got)
        for seq in finished:
            if seq.phase is Phase.PREFILLING:
                self._prompt_done(seq, tuple(firsts[seq]))

    def _sample(
        self, wanted: list[tuple[int, Sequence, int]], result: Result
    ) -> list[tuple[Sequence, int, Sampled]]:
        """Sample every wanted row; a row of logits that is not finite fails its own job only."""
        if not wanted:
            return []
        rows = [self._sample_row(s, c) for _, s, c in wanted]
        chosen = [r for r, _, _ in wanted]
        every = chosen == list(range(len(result.logits)))  # then nothing needs to be copied
        logits = result.logits if every else result.logits[chosen]
        try:
            got = sample(logits, rows)
        except NonFiniteLogits as error:
            lost = dict.fromkeys(wanted[r][1].job.key for r in error.rows)
            for key in lost:
                self._fail(key, "numerical_error", "the model's output was not a number")
            return self._sample([w for w in wanted if w[1].job.key not in lost], result)
        return [(seq, choice, g) for (_, seq, choice), g in zip(wanted, got, strict=True)]

    def _sample_row(self, seq: Sequence, choice: int) -> SampleRow:
        params = seq.job.params
        penal = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        return SampleRow(
            params,
            seq.job.seed + choice,
            seq.outputs,
            seq.tokens[seq.job.prompt :] if penal else (),  # nothing else looks at them, and they grow
            () if params.ignore_eos else self.eos,
        )

    # ----------------------------------------------------------- life of a choice

    def _append(self, seq: Sequence, choice: int, got: Sampled | First) -> None:
        """One more output token: emit it, and end the choice if it was the last."""
        seq.tokens.append(got.token)
        self.counters.output_tokens += 1
        key, params = seq.job.key, seq.job.params
        self._events.append(Emit(key, choice, got.token, got.logprob, got.top))
        if got.token in params.stop_token_ids or (got.token in self.eos and not params.ignore_eos):
            self._done(seq, "stop", got.token)
        elif seq.outputs >= params.max_tokens or len(seq.tokens) >= self.max_tokens:
            self._done(seq, "length", None)

    def _done(self, seq: Sequence, reason: str, stop_token: int | None) -> None:
        key = seq.job.key
        self._events.append(Done(key, seq.choice, reason, stop_token))
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        key = seq.job.key
        self._drop(seq)
        if not self._live[key]:
            del self._live[key]
            self._events.append(JobDone(key))

    def _prompt_done(self, seq: Sequence, firsts: tuple[First, ...]) -> None:
        self._prefilling.remove(seq)
        if self.role is Role.PREFILL:
            # The caller takes its send leases on these pages before it lets go of ours with `cancel`.
            self._events.append(PagesReady(seq.job.key, len(seq.pages)))
            self._events.append(PromptDone(seq.job.key, firsts))
        else:
            self._begin(seq, firsts)

    def _begin(self, seq: Sequence, firsts: tuple[First, ...]) -> None:
        """Start decoding: choice 0 goes on with the prompt's own pages, the others share the full ones and copy the tail.

        A job that brings output tokens has said them before: they are fed to the decode steps again, one by one."""
        if seq.outputs:
            self._rows_promised -= seq.job.n
            self._enter_row(seq)
            return
        children = [(first, self._fork(seq, seq.choice + i)) for i, first in enumerate(firsts[1:], start=1)]
        self._rows_promised -= seq.job.n
        self._enter_row(seq)
        self._append(seq, seq.choice, firsts[0])
        for first, child in children:
            if child.growing is None:  # no page for its tail
                self._append(child, child.choice, first)
                if child.phase is not Phase.GONE:
                    self._preempt(child)
                continue
            self._enter_row(child)
            self._append(child, child.choice, first)

    def _fork(self, parent: Sequence, choice: int) -> Sequence:
        """A child over the parent's prompt. Shared pages are leased; the tail is verified, copied and verified again."""
        key, tokens = parent.job.key, len(parent.tokens)
        assert parent.full is not None
        child = Sequence(
            parent.job, choice, list(parent.tokens), parent.chain.fork(), Phase.WAITING, computed=tokens
        )
        self._live[key][child] = None
        shared, fill = divmod(tokens, self.size)
        child.full = self.pool.lease(Kind.READ, str(key), parent.pages[:shared])
        child.pages = child.full.pages.copy()
        self.counters.forks += 1
        try:
            child.growing = self.pool.allocate(1 if fill else 0, str(key))
        except PoolExhausted:
            return child
        if not fill:
            return child
        tail, copy = parent.pages[shared : shared + 1], child.growing.pages
        expect = (
            np.array([fill], np.int32),
            child.chain.words[shared : shared + 1],
            child.chain.binds[shared : shared + 1],
        )
        kernels, memory = self.runner.kernels, self.pool.memory
        good = kernels.verify_pages(memory, tail, *expect).all()
        if good:
            kernels.copy_rows(memory, tail, memory, copy, expect[0])
            good = kernels.verify_pages(memory, copy, *expect).all()
        if good:
            self.pool.set_tags(copy, child.chain.lineages[shared : shared + 1], expect[0])
        # else: the copy stays untagged, and the tag check of the next step fails the request
        child.pages = np.concatenate([child.pages, copy])
        return child

    def _enter_row(self, seq: Sequence) -> None:
        seq.phase = Phase.RUNNING
        self.rows.enter(seq)
        bisect.insort(self._running, seq, key=lambda s: s.job.age)

    # ------------------------------------------------------------------- pages

    def _admit_waiting(self) -> None:
        """Give waiting jobs their pages, oldest first (see "Waiting" above)."""
        placed: list[Sequence] = []
        blocked = False  # somebody has been passed often enough: nobody behind may be placed
        for i, seq in enumerate(self._waiting):
            pages = self.pool.geometry.pages_for(len(seq.tokens) + (self.role is not Role.PREFILL))
            # One page of headroom for each running sequence, unless nothing runs that could give pages back.
            spare = len(self._running) if self._running or self._reserved or self._prefilling else 0
            rows = 0 if self.role is Role.PREFILL else seq.job.n
            # Looked up only if it could fit at all: one page, its last, is never shared.
            able = spare < self.pool.free and rows <= self.rows.free - self._rows_promised
            shared = self._shared(seq) if able else _NONE
            if able and pages - len(shared) + spare <= self.pool.free:
                self._place(seq, shared, pages - len(shared), rows)
                placed.append(seq)
                for older in self._waiting[:i]:
                    if older.phase is Phase.WAITING:
                        older.passed += 1
                        blocked |= older.passed >= MAX_PASSED
            else:
                blocked |= seq.passed >= MAX_PASSED
            if blocked:
                break
        for seq in placed:
            self._waiting.remove(seq)
        self._room_seen = self._room()

    def _shared(self, seq: Sequence) -> I32:
        """Pages that hold the first tokens of a waiting job's prompt already. Landing is apart: decode shares nothing."""
        if self.role is Role.DECODE:
            return _NONE
        if seq.leading is None:
            prompt = seq.job.tokens[: seq.job.prompt]
            seq.leading = Leading(self._hasher, seq.job.root, prompt, self.size)
        return self._prefixes.find(seq.leading)

    def _place(self, seq: Sequence, shared: I32, pages: int, rows: int) -> None:
        """Lease the pages that are shared, and take `pages` for the rest."""
        key = seq.job.key
        self._rows_promised += rows
        decode = self.role is Role.DECODE
        seq.full = self.pool.lease(Kind.READ, str(key), shared)
        seq.growing = self.pool.allocate(pages, str(key), Kind.RECEIVE if decode else Kind.APPEND)
        seq.pages = np.concatenate([shared, seq.growing.pages])
        seq.computed = len(shared) * self.size
        seq.leading = None
        if decode:
            seq.phase = Phase.RESERVED
            # What we will expect of every page, from the gateway's tokens alone.
            seq.chain.extend(seq.job.tokens[: seq.job.prompt])
            self._reserved[key] = seq
            self._events.append(Reserved(key))
        else:
            seq.chain.extend(seq.job.tokens[: seq.computed])
            seq.phase = Phase.PREFILLING
            bisect.insort(self._prefilling, seq, key=lambda s: s.job.age)
            self._events.append(Started(key))
            self.counters.prefix_pages_shared += len(shared)
            self.counters.prefix_tokens_shared += seq.computed
            if self.role is Role.PREFILL and len(shared):
                self._events.append(PagesReady(key, len(shared)))

    def _make_room(self) -> list[Sequence]:
        """A page for every running sequence's next row; the youngest give theirs back when the pool is dry."""
        for seq in list(self._running):
            while seq.phase is Phase.RUNNING and seq.computed == len(seq.pages) * self.size:
                assert seq.growing is not None
                try:
                    page = self.pool.extend(seq.growing, 1)
                except PoolExhausted:
                    self._preempt(self._running[-1])
                    continue
                self.rows.add_page(seq, int(page[0]))
        return list(self._running)

    def _preempt(self, seq: Sequence) -> None:
        """Give back a choice's pages; it runs again from everything it has (I4: not an end, and never shown as one)."""
        key, job = seq.job.key, seq.job
        self.counters.preemptions += 1
        if self.role is Role.UNIFIED:
            again = replace(job, tokens=np.array(seq.tokens, np.int64), n=1, choice=seq.choice)
            waiting = Sequence(again, seq.choice, list(seq.tokens), self._chain(again))
            self._live[key][waiting] = None
            bisect.insort(self._waiting, waiting, key=lambda s: s.job.age)
            self._drop(seq)
        else:
            self._events.append(Preempted(key, seq.choice))
            self._leave(seq)

    def _pieces(self) -> list[Piece]:
        """Up to `chunk` prompt tokens, oldest prompts first."""
        room, pieces = self.chunk, []
        for seq in self._prefilling:
            count = min(room, seq.job.prompt - seq.computed)
            if count < 1:
                break
            pieces.append(Piece(seq, seq.computed, count))
            room -= count
        return pieces

    # ------------------------------------------------------------------- ending

    def _fail(self, key: Key, code: str, reason: str) -> None:
        live = self._live.get(key)
        if live is None:
            return
        for seq in list(live):
            self.withhold(seq.pages)
            self._drop(seq)
        self._live.pop(key, None)
        # Nothing of a failed job is said any more, also not what this step has said already.
        self._events = [e for e in self._events if e.key != key]
        if code == "kv_integrity":
            self.counters.kv_integrity_failures += 1
        self._events.append(JobFailed(key, code, reason))

    def _drop(self, seq: Sequence) -> None:
        """Take a sequence out of wherever it is and close its leases."""
        match seq.phase:
            case Phase.WAITING:
                if seq in self._waiting:
                    self._waiting.remove(seq)
            case Phase.RESERVED:
                self._reserved.pop(seq.job.key, None)
                self._rows_promised -= seq.job.n
            case Phase.PREFILLING:
                if seq in self._prefilling:
                    self._prefilling.remove(seq)
                self._rows_promised -= 0 if self.role is Role.PREFILL else seq.job.n
            case Phase.RUNNING:
                self._running.remove(seq)
                self.rows.leave(seq)
            case Phase.GONE:
                raise OwnershipError(f"{seq} is dropped twice")
        seq.phase = Phase.GONE
        for lease in (seq.full, seq.growing):
            if lease is not None:
                self.pool.close(lease)
        live = self._live.get(seq.job.key)
        if live is not None:
            live.pop(seq, None)

    def _chain(self, job: Job) -> Chain:
        return Chain(self._hasher, job.root, self.size, self._key.bind)

    def _empty(self, kind: Kind, key: Key) -> Lease:
        return self.pool.allocate(0, str(key), kind)
