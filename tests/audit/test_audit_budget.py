"""Time: what an audit does with too little of it, and how much it takes where none is given."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from scripted_endpoint import SmallEngine, serving

from hermetic.audit import run
from hermetic.audit.command import code
from hermetic.audit.exchange import Answer
from hermetic.audit.learned import Learned
from hermetic.audit.result import Played, Report
from hermetic.audit.run import AuditOptions, audit
from hermetic.audit.scenarios import Scenario
from hermetic.audit.scenarios.asking import copy
from hermetic.audit.stage import Stage
from hermetic.audit.target import TargetOptions


class Told:
    """The time that was left when the first scenario began."""

    left = 0.0

    def learning(self, what: str) -> None: ...

    def slowed(self, seconds: float) -> None: ...

    def playing(self, played: Played, number: int, of: int, left: float) -> None:
        self.left = self.left or left

    def asked(self, answer: Answer, findings: int, left: float) -> None: ...


async def all_the_time(stage: Stage) -> None:
    for tenant in (stage.tenant(), stage.tenant()):
        await stage.alone(copy(stage, tenant))
    await asyncio.sleep(stage.left() + 0.1)


async def nothing(stage: Stage) -> None:
    await stage.alone(copy(stage, stage.tenant()))


PLAYS = [
    (Scenario("long", "", all_the_time, ("marker",), weight=1e6), ""),
    (Scenario("short", "", nothing, ("marker",)), ""),
]


async def audited(told: Told, **options: Any) -> Report:
    async with serving(SmallEngine()) as endpoint:
        return await audit(AuditOptions((endpoint.url,), **options), told)


def test_the_command_that_repeats_an_audit_asks_the_same_and_holds_no_key() -> None:
    target = TargetOptions(model="m 2", api_key="hk-one", second_key="hk-two", ca="ca.pem")
    options = AuditOptions(("http://h:1",), target, "soak", ("mixing", "keys"), 90.0, 7, fail_fast=True)
    assert options.command() == (
        "hermetic audit http://h:1 --profile soak --seed 7 --model 'm 2' --ca ca.pem --scenario mixing --scenario keys "
        "--budget 90s --fail-fast"
    )


async def test_scenarios_that_were_not_reached_are_no_nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "chosen", lambda *_: PLAYS)
    report = await audited(Told(), budget=12.0)
    assert [played.state for played in report.scenarios] == ["done", "not run"]
    assert report.verdict == "could not run"
    assert code(report) == 2
    assert "before 1 of 2 scenarios could be played: give more with --budget" in report.reason


async def test_a_profile_takes_longer_than_planned_until_every_scenario_had_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same as above, where nobody said how much time there is."""
    monkeypatch.setattr(run, "chosen", lambda *_: PLAYS)
    monkeypatch.setitem(run.BUDGETS, "quick", 12.0)
    assert [played.state for played in (await audited(Told())).scenarios] == ["done", "done"]


def test_that_has_an_end_and_is_not_done_where_a_budget_was_given() -> None:
    """100 scenarios of 8 first tokens of 1 s each are 800 s; four times the plan of 150 s is 600 s."""
    budgets = {}
    for given in (None, 12.0):
        report = Report(target="", model="", profile="quick", seed=1, started="")
        mine = run._Run(AuditOptions((), budget=given), report, Told(), time.monotonic())
        mine.learned = Learned(model="m", first=1.0)
        mine._extend(100)
        budgets[given] = mine.budget
    assert budgets == {None: 600.0, 12.0: 12.0}


@pytest.mark.parametrize("asks", [True, False])
async def test_a_scenario_that_did_not_end_or_compared_nothing_is_no_nothing_found(
    monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    async def calm(stage: Stage) -> None:
        for tenant in (stage.tenant(), stage.tenant(), stage.tenant()):
            await stage.alone(copy(stage, tenant))

    async def hangs(stage: Stage) -> None:
        await calm(stage)
        await asyncio.sleep(600)

    async def idle(stage: Stage) -> None:
        await asyncio.sleep(0)

    other = Scenario("other", "", hangs if asks else idle, ("marker",))
    monkeypatch.setattr(
        run, "chosen", lambda *_: [(Scenario("calm", "", calm, ("marker",)), ""), (other, "")]
    )
    monkeypatch.setattr(run, "GRACE", -38.0)  # 30 s are the bound of a request
    report = await audited(Told(), budget=20.0)
    assert [played.state for played in report.scenarios] == ["done", "cut short" if asks else "done"]
    assert (report.verdict, code(report)) == ("could not run", 2)
    assert "nothing that could be compared: other;" in report.reason


@pytest.mark.parametrize("given", [None, 20.0])
async def test_a_scenario_goes_on_while_answers_come_unless_a_budget_was_given(
    monkeypatch: pytest.MonkeyPatch, given: float | None
) -> None:
    async def long(stage: Stage) -> None:
        ends = time.monotonic() + stage.left() + 3.0
        while time.monotonic() < ends:
            await stage.alone(copy(stage, stage.tenant()))
            await asyncio.sleep(0.1)

    monkeypatch.setattr(run, "chosen", lambda *_: [(Scenario("long", "", long, ("marker",)), "")])
    monkeypatch.setattr(run, "GRACE", -28.0)  # 30 s are the bound of a request: 2 s
    monkeypatch.setitem(run.BUDGETS, "quick", 12.0)
    report = await audited(Told(), budget=given)
    assert [played.state for played in report.scenarios] == ["done" if given is None else "cut short"]


async def test_a_slow_server_gets_more_time_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any server is slow where a tenth of a microsecond is quick: four times the 12 s."""
    monkeypatch.setattr(run, "chosen", lambda *_: PLAYS[1:])
    monkeypatch.setitem(run.BUDGETS, "quick", 12.0)
    monkeypatch.setattr(run, "QUICK_SERVER", 1e-7)
    more, given = Told(), Told()
    await audited(more)
    await audited(given, budget=12.0)
    assert given.left < 12.0 < more.left < 48.0


async def test_the_standard_profile_plays_everything_short_first_and_what_is_risky_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played: list[tuple[str, int, float]] = []

    def noting(name: str) -> Any:
        async def play(stage: Stage) -> None:
            played.append((name, stage.size.rounds, stage.random.random()))
            for tenant in (stage.tenant(), stage.tenant()):
                await stage.alone(copy(stage, tenant))

        return play

    scenarios = [("calm", 10), ("calmer", 20), ("risky", 90)]
    plays = [(Scenario(name, "", noting(name), ("marker",), order=order), "") for name, order in scenarios]
    monkeypatch.setattr(run, "chosen", lambda *_: plays)
    report = await audited(Told(), profile="standard", budget=30.0)
    assert [(name, rounds) for name, rounds, _ in played] == [
        ("calm", 3), ("calmer", 3), ("calm", 12), ("calmer", 12), ("risky", 12),
    ]  # fmt: skip
    assert len({drawn for *_, drawn in played}) == 5  # nothing is asked a second time
    assert [(p.state, p.requests) for p in report.scenarios] == [("done", 4), ("done", 4), ("done", 2)]
    assert report.complete
