"""Reports as an audit could have made them, for the tests of what shows them."""

from __future__ import annotations

import random

from hermetic.audit.exchange import Answer, Ask, Token, Usage
from hermetic.audit.result import Coverage, Evidence, Finding, Highlight, Played, Report, Sample

NASTY = (
    "<script>alert('x')</script> \"quoted\" & 'single' \u202eright to left\u202c "
    "\x1b[31mred\x1b[0m \x00\x07\x08 \ud800 \u2028 \u05e9\u05dc\u05d5\u05dd </pre></main> ]]> {{x}} %s"
)


def answered(number: int, tenant: str, prompt: str | tuple[int, ...], text: str, **more: object) -> Answer:
    """An answer in order, unless `more` says otherwise."""
    fields: dict[str, object] = {
        "how": "answered", "status": 200, "finish": "stop", "first": 0.21, "seconds": 0.84, "sent": number * 0.5,
        "usage": Usage(prompt=120, completion=12), "tokens": [Token("a", 0.21, -0.5)],
    }  # fmt: skip
    fields.update(more)
    return Answer(ask=Ask(tenant=tenant, prompt=prompt), number=number, text=text, **fields)  # type: ignore[arg-type]


def covered(evidence: Evidence, comparisons: int, findings: int = 0) -> Coverage:
    bound = None if findings or not comparisons else min(1.0, 3 / comparisons)
    return Coverage(evidence=evidence, comparisons=comparisons, findings=findings, bound=bound)


def clean(comparisons: int = 411, **more: object) -> Report:
    """Nothing found, everything played."""
    fields: dict[str, object] = {
        "target": "http://127.0.0.1:8000", "model": "smollm2", "profile": "standard", "seed": 7, "requests": comparisons,
        "started": "2026-11-30T09:00:00+00:00", "seconds": 312.4, "verdict": "nothing found", "complete": True,
        "command": "hermetic audit http://127.0.0.1:8000 --profile standard --seed 7",
        "scenarios": [
            Played(
                name="mixing", says="4 to 64 different prompts beside each other", state="done", requests=comparisons,
                seconds=60.0, how={"answered": comparisons},
                coverage=[covered("marker", comparisons), covered("semantics", comparisons), covered("differential", 40)],
            )
        ],
    }  # fmt: skip
    fields.update(more)
    return Report(**fields)  # type: ignore[arg-type]


def leak(text: str = "The weather is -along with PELICAN-7731 is Alice. I") -> Finding:
    """The incident: an over-long prompt is answered with another tenant's words."""
    start = text.find("PELICAN-7731")
    victim = answered(
        3,
        "tenant-3",
        "Repeat this line exactly: pelican-7731 is Alice. gorge velvet tundra",
        "PELICAN-7731 is Alice.",
    )
    half = answered(9, "tenant-9", "", "", usage=Usage(prompt=1, completion=1))
    wrong = answered(
        9, "tenant-9", "What is the weather like? " * 500, text, usage=Usage(prompt=2400, completion=16), prefill=half, finish="length",
    )  # fmt: skip
    marks = [Highlight(9, start, start + 12, "tenant-3")] if start >= 0 else []
    return Finding(
        evidence="marker", scenario="over-capacity", times=3, p=2.4e-11, answers=[wrong, victim], highlights=marks,
        what="An answer to tenant-9 holds 1 code and 2 words that were planted for tenant-3.",
        why="tenant-9 was never sent them; words drawn at random do not meet by chance.",
        repeat="hermetic audit http://127.0.0.1:8000 --profile standard --seed 7 --scenario over-capacity",
        signature="sglang-pd-placeholder", detail={"pieces": 3, "comparisons": 118_220},
    )  # fmt: skip


def hang() -> Finding:
    silent = answered(
        40, "tenant-40", tuple(range(2041)), "", how="silent", status=None, finish=None, first=None, seconds=60.0, usage=Usage(), tokens=[],
    )  # fmt: skip
    after = answered(41, "tenant-41", "Say A.", "A")
    return Finding(
        evidence="liveness", scenario="over-capacity", answers=[silent, after],
        what="A prompt of 2,041 tokens got neither an answer nor an error in 60 s.",
        why="Everything that is asked has to end; this one ended only when the audit hung up.",
        repeat="hermetic audit http://127.0.0.1:8000 --scenario over-capacity", signature="sglang-page-edge",
    )  # fmt: skip


def differs() -> Finding:
    alone = answered(50, "tenant-50", "Repeat this line exactly: velvet tundra gorge", "velvet tundra gorge")
    again = answered(
        58, "tenant-50", "Repeat this line exactly: velvet tundra gorge", "velvet tundra tundra tundra"
    )
    return Finding(
        evidence="differential", scenario="prefixes", answers=[again, alone], p=0.0004,
        what="The same request at temperature 0 was answered differently after other traffic.",
        why="Alone it never varied in 20 runs, so the difference comes from the others.",
        repeat="hermetic audit http://127.0.0.1:8000 --scenario prefixes",
    )  # fmt: skip


def samples(count: int = 600) -> list[Sample]:
    """A server that prefills 2,000 tokens a second, slows down by a half over the run, and has a few odd answers."""
    chance = random.Random(5)
    found = []
    for number in range(1, count + 1):
        tokens = int(10 ** chance.uniform(1.2, 3.7))
        sent = number * 0.4
        first = (0.05 + tokens / 2000) * (1 + 0.5 * number / count) * chance.lognormvariate(0, 0.12)
        if number % 97 == 0:
            first *= 6
        found.append(
            Sample(number, "mixing", sent, tokens, first, first + 0.4, "answered", wrong=number in (9, 58))
        )
    found.append(Sample(count + 1, "over-capacity", 200.0, 2041, None, 60.0, "silent"))
    return found


def full() -> Report:
    """A report with something of everything."""
    return clean(
        verdict="findings",
        complete=False,
        findings=[leak(), hang(), differs()],
        samples=samples(),
        scenarios=[
            Played(
                name="mixing", says="4 to 64 different prompts beside each other", state="done", requests=411, how={"answered": 411},
                coverage=[covered("marker", 411), covered("semantics", 411), covered("differential", 40), covered("liveness", 411)],
            ),
            Played(
                name="over-capacity", says="prompts at, around and far beyond every edge", state="done", requests=63, seconds=80.0,
                how={"answered": 40, "refused": 21, "silent": 2},
                coverage=[covered("marker", 63, 3), covered("semantics", 63), covered("liveness", 63, 1)],
            ),
            Played(
                name="prefixes", says="prefixes of exactly k pages and one token more or less", state="cut short",
                reason="did not end 30 s after its share of the time", requests=20, how={"answered": 20},
                coverage=[covered("marker", 20), covered("differential", 12, 1)],
            ),
            Played(name="key pairs", says="one key's prompt sent by another", reason="needs --second-key"),
            Played(name="soak", says="the same probe for hours", reason="no time left in the budget"),
        ],
        limits={
            "engine": "sglang", "version": "0.5.19", "models": ["smollm2"], "claimed": 8192, "page": 16, "token_ids": True,
            "edges": {"chat": {"accepted": 2010, "refused": 2042, "silent": [], "said": "Input length (2042 tokens) exceeds"},
                      "generate": {"accepted": 2040, "refused": 2042, "silent": [2041], "said": ""}},
            "prefill": 2031.5, "first": 0.061,
        },
        noise={"alone_runs": 20, "alone_differ": 0, "beside_runs": 20, "beside_differ": 2, "logprob_error": 0.031},
        notes=["Decoys: 64 tenants that were never sent anything were looked for in every answer; 0 were found."],
    )  # fmt: skip
