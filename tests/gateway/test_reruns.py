"""A request whose worker is lost runs again elsewhere, and its stream goes on with the same tokens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_worker import EOS, Job, ScriptedWorker, World, answer, ask, next_token, read, world

from hermetic.gateway import runs
from hermetic.gateway.backend import Failed, Finish, Refused, Token
from hermetic.handoff.outcome import Aborted, Completed
from hermetic.handoff.outcome import Failed as HalfFailed
from hermetic.handoff.outcome import Refused as HalfRefused
from hermetic.worker import messages as m

PROMPT = range(1, 21)


def expected(n: int = 1, count: int = 8) -> dict[int, list[int]]:
    return {choice: answer(PROMPT, count, 7 + choice) for choice in range(n)}


def busy(w: World, role: str = "decode") -> ScriptedWorker:
    """The worker of this role that has work."""
    return next(one for one in w.workers.values() if one.info.role == role and one.jobs)


def job(worker: ScriptedWorker) -> Job:
    return next(iter(worker.jobs.values()))


async def started(w: World, n: int = 1, tokens: int = 3, **options: Any) -> tuple[Any, ScriptedWorker]:
    """A request that has got `tokens` tokens and waits; and the decode worker that has it."""
    for worker in w.workers.values():
        worker.limit = tokens
    stream = await w.cluster.generate(ask(20, 8, n, **options))
    await w.until(lambda: all(len(made) == tokens for made in stream.outputs.values()), "its first tokens")
    if not tokens:
        (attempt,) = stream.live.values()
        halves = [w.workers[half.info.worker] for half in attempt.halves]
        await w.until(lambda: all(attempt.key in half.jobs for half in halves), "both halves")
    return stream, busy(w)


def let_go(w: World) -> None:
    for worker in w.workers.values():
        worker.limit = None


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [0, 1, 3, 7])
@pytest.mark.parametrize("how", ["killed", "frozen", "forgot"])
async def test_a_stream_goes_on_with_the_same_tokens_when_its_decode_worker_is_lost(
    how: str, tokens: int, n: int
) -> None:
    async with world() as w:
        await w.pair(2, 2)
        stream, decode = await started(w, n, tokens)
        if how == "killed":
            decode.kill()
            w.cluster.lost(decode.name, decode.info.incarnation)
        elif how == "frozen":
            decode.frozen = True
        else:
            decode.forget()
        await w.until(lambda: w.cluster.runs.reruns > 0, "the next attempt")
        let_go(w)
        assert await read(stream) == expected(n)
        first = decode.history[0]
        again = [
            j
            for one in w.workers.values()
            for j in one.history
            if one.info.role == "decode" and j is not first
        ]
        # Nothing was said yet: one attempt for all choices. Else each choice goes on from where it was.
        assert len(again) == (1 if tokens == 0 else n)
        assert {j.key.ticket for j in again} == {first.key.ticket}
        assert len({j.key.attempt for j in [first, *again]}) == 1 + len(again)
        for j in again:
            assert j.submit.seed == first.submit.seed
            assert j.submit.age == first.submit.age
            assert len(j.tokens) == 20 + tokens
            assert j.submit.prompt == 20
        assert w.cluster.runs.retries["worker_lost"] == 1 if n == 1 else True


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_prefill_worker_that_is_lost_before_the_first_token_is_replaced_and_after_it_not_missed(
    how: str,
) -> None:
    async with world() as w:
        await w.pair(2, 1)
        for tokens in (0, 2):
            stream, decode = await started(w, 1, tokens)
            prefill = next(p for p in w.workers.values() if p.info.role == "prefill" and p.history)
            if tokens:  # its end was lost with it
                remote = w.cluster.members.remotes[prefill.name]
                attempt = next(iter(stream.live.values()))
                attempt.holding[remote] = None
                remote.attempts[attempt] = None
            before = w.cluster.runs.reruns
            if how == "killed":
                prefill.kill()
                w.cluster.lost(prefill.name, prefill.info.incarnation)
            else:
                prefill.frozen = True
                await w.until(lambda: w.state(prefill.name) == "unreachable")  # noqa: B023
            let_go(w)
            assert await read(stream) == expected()
            assert w.cluster.runs.reruns - before == (1 if tokens == 0 else 0)
            assert decode.name == "decode-0"
            w.workers.pop(prefill.name)


@pytest.mark.parametrize(
    "code", ["worker_lost", "transport_error", "no_pair", "gateway_lost", "unknown_ticket"]
)
@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_a_half_that_reports_a_loss_or_a_broken_transfer_makes_the_request_run_on_another_pair(
    half: str, code: str
) -> None:
    async with world() as w:
        await w.pair(2, 2)
        stream, decode = await started(w, 1, 0)
        prefill = busy(w, "prefill")
        failing, other = (prefill, decode) if half == "prefill" else (decode, prefill)
        theirs = job(other)
        outcome = HalfRefused(code, "why") if code == "no_pair" else HalfFailed(code, "why")
        failing.end(job(failing), outcome)
        await w.until(lambda: theirs.cancelled is not None, "the other half's cancellation")
        # A half that lost sight of us, or forgot the attempt, is a lost worker to us, whatever it calls that.
        told = code if code in runs.RERUN else "worker_lost"
        assert (theirs.cancelled.code, theirs.cancelled.reason) == (told, "why")
        let_go(w)
        assert await read(stream) == expected()
        second = next(j for one in w.workers.values() for j in one.history if j.key.attempt == 2)
        assert second.key.ticket == theirs.key.ticket
        pairs = {
            attempt: {one.name for one in w.workers.values() for j in one.history if j.key.attempt == attempt}
            for attempt in (1, 2)
        }
        assert pairs[1] != pairs[2]
        assert w.cluster.runs.retries[told] == 1


async def test_a_worker_that_refuses_with_each_of_its_peers_does_not_use_up_a_requests_chances() -> None:
    """It came back, has not paired again yet, and is the one with the least to do."""
    async with world(max_reruns=2) as w:
        await w.pair(2, 2)
        w.cluster.drain("prefill-0")
        other, _ = await started(w, 1, 0)  # so that prefill-1 is busier
        w.cluster.undrain("prefill-0")
        back = w.workers["prefill-0"]
        back.refuses = HalfRefused("no_pair", "prefill-0 is not paired with it")
        stream = await w.cluster.generate(ask())
        await w.until(lambda: w.cluster.runs.reruns == 2, "the third attempt")
        assert len(back.history) == 2
        let_go(w)
        assert await read(stream) == await read(other) == expected()


async def test_a_pair_that_is_alone_gets_another_chance_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "RERUN_WAIT", 0.02)
    async with world(max_reruns=3) as w:
        await w.pair()
        decode = w.workers["decode-0"]
        decode.refuses = HalfFailed("transport_error", "the wire broke")
        stream = await w.cluster.generate(ask())
        with pytest.raises(Failed, match="the wire broke; it was run again 3 times") as error:
            await read(stream)
        assert (error.value.code, error.value.status) == ("transport_error", 500)
        assert len(decode.history) == 4
        stream = await w.cluster.generate(ask())
        await w.until(lambda: len(decode.history) == 6)
        decode.refuses = None
        assert await read(stream) == expected()
        await w.until(lambda: not w.cluster.runs._attempts)


@pytest.mark.parametrize("tokens", [0, 3])
async def test_with_no_pair_left_the_request_ends_with_worker_lost_and_its_first_cause(tokens: int) -> None:
    async with world() as w:
        await w.pair()
        stream, decode = await started(w, 1, tokens)
        decode.kill()
        w.cluster.lost("decode-0", decode.info.incarnation)
        with pytest.raises(Failed) as error:
            await read(stream)
        assert (error.value.code, error.value.status, error.value.retry_after) == ("worker_lost", 503, 5)
        assert error.value.message == (
            "worker decode-0 has ended while it served this request; no other worker can go on with it"
        )
        await w.until(lambda: not w.cluster.runs._attempts and not w.cluster.runs.open)
        prefill = w.workers["prefill-0"]
        if tokens == 0:
            assert prefill.history[0].cancelled.code == "worker_lost"


async def test_a_worker_that_forgot_the_session_gets_a_new_one_and_the_request_goes_on_there() -> None:
    async with world() as w:
        await w.pair()
        for name in ("decode-0", "prefill-0"):
            stream, _ = await started(w, 1, 2)
            if name == "prefill-0":  # it holds nothing of the stream any more; nothing is lost
                w.workers[name].forget()
                await w.until(lambda: w.workers["prefill-0"].resets > 0)
                await w.until(lambda: w.state("prefill-0") == "ready")
            else:
                w.workers[name].forget()
                await w.until(lambda: w.cluster.runs.reruns == 1)
            let_go(w)
            assert await read(stream) == expected()
        assert w.cluster.members.remotes["decode-0"].link.session == 2
        assert w.cluster.members.remotes["prefill-0"].link.session == 2
        assert w.cluster.runs.reruns == 1


@pytest.mark.parametrize("last", ["end of sequence", "stop token", "length", "end of sequence, ignored"])
async def test_nothing_is_made_after_an_answers_last_token_when_only_its_end_was_lost(last: str) -> None:
    async with world() as w:
        await w.pair(1, 2)
        token = {"end of sequence": EOS, "stop token": 17, "length": 18, "end of sequence, ignored": EOS}[
            last
        ]
        params = {"stop_token_ids": (17,), "ignore_eos": last.endswith("ignored")}
        for worker in w.workers.values():
            worker.limit = 0
        stream = await w.cluster.generate(ask(20, 1 if last == "length" else 8, **params))
        await w.until(lambda: any(one.jobs for one in w.workers.values() if one.info.role == "decode"))
        decode = busy(w)
        decode.make(job(decode), 0, token)
        await w.until(lambda: stream.outputs[0] == [token])
        decode.kill()
        w.cluster.lost(decode.name, decode.info.incarnation)
        let_go(w)
        events = [event async for event in stream]
        if last == "end of sequence, ignored":
            assert len(events) == 8 + 1
            assert w.cluster.runs.reruns == 1
        else:
            stopped = Finish(0, "length") if last == "length" else Finish(0, "stop", token)
            assert events == [Token(0, token), stopped]
            assert w.cluster.runs.reruns == 0
        assert not w.cluster.runs.open


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_the_client_sees_the_first_cause_and_the_other_half_is_cancelled_with_it(first: str) -> None:
    async with world() as w:
        await w.pair()
        stream, decode = await started(w, 1, 0)
        prefill = w.workers["prefill-0"]
        failing, other = (prefill, decode) if first == "prefill" else (decode, prefill)
        theirs = job(other)
        other.ends_on_cancel = False
        failing.end(job(failing), HalfFailed("numerical_error", "the cause"))
        await w.until(lambda: theirs.cancelled is not None)
        other.end(theirs, Aborted("numerical_error", "the other half failed"))
        with pytest.raises(Failed, match=r"^the cause$") as error:
            await read(stream)
        assert error.value.code == "numerical_error"
        assert w.cluster.runs.reruns == 0
        await w.until(lambda: not w.cluster.runs._attempts)


async def test_a_page_that_was_not_its_own_is_never_made_good_by_running_again() -> None:
    async with world() as w:
        await w.pair(2, 2)
        stream, decode = await started(w, 1, 2)
        decode.end(job(decode), HalfFailed("kv_integrity", "page 3 is not what it must be"))
        with pytest.raises(Failed) as error:
            await read(stream)
        assert (error.value.code, error.value.status) == ("kv_integrity", 500)
        assert w.cluster.runs.reruns == 0
        assert w.cluster.switch.failures_total == 1


async def test_what_an_attempt_that_is_over_still_says_is_counted_and_has_no_effect() -> None:
    async with world() as w:
        await w.pair(1, 2)
        stream, decode = await started(w, 1, 3)
        mine = job(decode)
        decode.frozen = True
        await w.until(lambda: w.cluster.runs.reruns == 1)
        stale = w.cluster.runs.stale
        mine.playing.cancel()
        decode.frozen = False
        decode.make(mine, 0, 1, 2, 3)
        decode.tell(mine, m.ChoiceDone(0, "stop", 3))
        decode.tell(mine, m.Preempted(0))
        await w.until(lambda: w.cluster.runs.stale - stale == 5)
        await w.until(lambda: mine.cancelled is not None)  # it reads its cancellation when it goes on
        let_go(w)
        assert await read(stream) == expected()
        await w.until(lambda: not w.cluster.runs._attempts)
        assert not any(r.attempts for r in w.cluster.members.remotes.values())


async def test_a_preempted_choice_goes_on_where_it_was_also_on_a_worker_that_is_drained() -> None:
    async with world() as w:
        await w.pair()
        stream, decode = await started(w, 2, 3)
        w.cluster.drain("decode-0")
        mine = job(decode)
        mine.playing.cancel()
        decode.tell(mine, m.Preempted(1))
        for at in range(3, 8):
            decode.make(mine, 0, next_token([*PROMPT, *mine.outputs[0]], 7))
            assert len(mine.outputs[0]) == at + 1
        decode.tell(mine, m.ChoiceDone(0, "length", None))
        let_go(w)
        assert await read(stream) == expected(2)
        decode.end(mine, Completed())
        await w.until(lambda: w.state("decode-0") == "drained")


async def test_a_client_that_leaves_cancels_both_halves_by_the_operators_policy() -> None:
    for policy in ("drain", "cancel"):
        async with world(on_disconnect=policy) as w:
            await w.pair()
            stream, decode = await started(w, 1, 0)
            prefill = w.workers["prefill-0"]
            halves = [job(decode), job(prefill)]
            decode.ends_on_cancel = prefill.ends_on_cancel = False
            await stream.aclose()
            await stream.aclose()
            await w.until(lambda: all(half.cancelled for half in halves))  # noqa: B023
            assert {(h.cancelled.code, h.cancelled.drain) for h in halves} == {
                ("client_gone", policy == "drain")
            }
            # The pair is accounted for until both have said their end.
            assert [len(r.attempts) for r in w.cluster.members.remotes.values()] == [1, 1]
            assert w.cluster.runs.open == 0
            for worker, half in ((decode, halves[0]), (prefill, halves[1])):
                worker.end(half, Aborted("client_gone", "the client left"))
            await w.until(lambda: not w.cluster.runs._attempts)
            assert not any(r.attempts for r in w.cluster.members.remotes.values())


async def test_a_half_that_never_says_its_end_is_counted_off_after_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "END_SECONDS", 0.1)
    async with world() as w:
        await w.pair()
        stream, decode = await started(w, 1, 0)
        decode.ends_on_cancel = False
        await stream.aclose()
        await w.until(lambda: not w.cluster.runs._attempts)
        assert w.cluster.runs.ends_missed == 1
        assert not w.cluster.members.remotes["decode-0"].attempts


async def test_a_stop_string_ends_one_choice_and_the_others_go_on() -> None:
    async with world() as w:
        await w.pair()
        stream, decode = await started(w, 3, 2)
        mine = job(decode)
        await stream.cancel(1)
        await w.until(lambda: any(isinstance(b, m.Cancel) and b.choice == 1 for b in decode.heard))
        let_go(w)
        made: dict[int, list[int]] = {}
        async for event in stream:
            if isinstance(event, Token):
                made.setdefault(event.index, []).append(event.token)
        assert (made[0], made[2]) == (expected(3)[0], expected(3)[2])
        assert made[1] == expected(3)[1][:2]
        assert mine.cancelled is None


async def test_a_request_ends_within_its_deadline() -> None:
    async with world(deadline=0.2) as w:
        await w.pair()
        stream, decode = await started(w, 1, 2)
        with pytest.raises(Failed) as error:
            await read(stream)
        assert (error.value.code, error.value.status) == ("deadline_exceeded", 504)
        await w.until(lambda: not decode.jobs)
        assert not w.cluster.runs.open


async def test_more_requests_than_there_are_places_are_refused() -> None:
    async with world(max_open=2) as w:
        await w.pair()
        streams = [(await started(w, 1, 0))[0] for _ in range(2)]
        with pytest.raises(Refused) as error:
            await w.cluster.generate(ask())
        assert (error.value.code, error.value.status) == ("overloaded", 429)
        for stream in streams:
            await stream.aclose()
        let_go(w)
        assert await read(await w.cluster.generate(ask())) == expected()


async def test_many_streams_survive_workers_that_come_and_go() -> None:
    async with world() as w:
        await w.pair(2, 3)
        asks = [ask(range(i + 1, i + 15), 24, seed=i) for i in range(30)]
        streams = [await w.cluster.generate(one) for one in asks]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        for number in range(3):
            await asyncio.sleep(0.02)
            name = f"decode-{number}"
            worker = w.workers[name]
            worker.kill()
            w.cluster.lost(name, worker.info.incarnation)
            await w.add(name)
            await w.until(lambda: len(w.cluster.members.of_role("decode")) == 3)
            await w.cluster.wait_ready(10, 5)
        answers = await asyncio.gather(*reading)
        assert answers == [{0: answer(one.tokens, 24, i)} for i, one in enumerate(asks)]
        await w.until(lambda: not w.cluster.runs._attempts)
        assert not any(r.attempts for r in w.cluster.members.remotes.values())
