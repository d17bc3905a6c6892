"""Known faults are recognised by what they look like, on the engines that have them, and not where they are mended."""

from __future__ import annotations

import re

import pytest
from audit_reports import answered, hang, leak

from hermetic.audit.exchange import Answer, Ask, Usage
from hermetic.audit.learned import Edge, Learned
from hermetic.audit.result import Finding
from hermetic.audit.signatures import BY_NAME, SIGNATURES, known, prompt_tokens

# What SGLang's captured pairs and servers say: a pool of 2,048 tokens, pages of 16, 2,042 tokens refused.
EDGES = {
    "chat": Edge(accepted=2010, refused=2042),
    "generate": Edge(accepted=2040, refused=2042, silent=(2041,)),
}


def learned(engine: str = "sglang", version: str = "0.5.19") -> Learned:
    return Learned(model="smollm2", engine=engine, version=version, edges=EDGES, page=16, tokens_per_word=1.3)


def finding(evidence: str, *answers: Answer, scenario: str = "mixing") -> Finding:
    return Finding(evidence=evidence, scenario=scenario, what="", why="", answers=list(answers))  # type: ignore[arg-type]


def name(found: Finding, about: Learned) -> str | None:
    signature = known(found, about)
    return None if signature is None else signature.name


def half(how: str, status: int, **more: object) -> Answer:
    return answered(1, "a", "", "", how=how, status=status, **more)


def ids(count: int, **more: object) -> Answer:
    """A request of so many token ids to SGLang's own endpoint."""
    return Answer(
        ask=Ask(tenant="a", prompt=tuple(range(count)), endpoint="generate"), number=1, sent=0.0, **more
    )  # type: ignore[arg-type]


def test_the_incident_is_recognised_on_a_pair_that_answers_over_its_pool() -> None:
    assert name(leak(), learned()) == "sglang-pd-placeholder"
    assert name(leak(), learned(engine="", version="")) == "sglang-pd-placeholder"


@pytest.mark.parametrize(
    ("version", "expected"), [("0.5.11", True), ("v0.5.19", True), ("0.5.20", False), ("0.6", False)]
)
def test_it_is_not_named_for_a_version_that_has_it_mended(version: str, expected: bool) -> None:
    assert (name(leak(), learned(version=version)) == "sglang-pd-placeholder") is expected


def test_a_placeholder_on_prefills_side_gives_it_away_where_no_limit_was_learned() -> None:
    blind = Learned(model="smollm2", engine="sglang", tokens_per_word=1.3)
    assert name(leak(), blind) == "sglang-pd-placeholder"
    leaked = leak()
    leaked.answers[0].prefill = half("answered", 200)  # 120 tokens by its own count
    leaked.scenario = "mixing"
    assert name(leaked, blind) is None


def test_one_server_that_answers_over_its_limit_is_not_the_pairs_fault() -> None:
    alone = leak()
    alone.answers[0].prefill = None
    assert name(alone, learned()) is None


def test_a_prompt_that_fits_is_not_the_incident() -> None:
    fits = leak()
    fits.answers[0] = answered(
        9, "tenant-9", "What is the weather like?", "PELICAN", prefill=half("answered", 200)
    )
    assert name(fits, learned()) is None


def test_a_prompt_just_below_the_edge_that_is_never_answered_is_the_page_edge() -> None:
    silent = ids(2041, how="silent", seconds=60.0)
    assert name(finding("liveness", silent), learned(version="0.5.23")) == "sglang-page-edge"


@pytest.mark.parametrize("tokens", [100, 2009, 2042, 3000])
def test_another_length_that_is_never_answered_is_not(tokens: int) -> None:
    """Two pages of 16 below the edge of 2,042 begin at 2,010."""
    silent = ids(tokens, how="silent", seconds=60.0)
    assert name(finding("liveness", silent), learned(version="0.5.23")) is None


def test_a_silent_decode_whose_prefill_refused_is_told_from_a_page_edge() -> None:
    waits = ids(2041, how="silent", prefill=half("refused", 400))
    assert name(finding("liveness", waits), learned()) == "sglang-pd-decode-waits"


def test_a_stop_by_length_that_hides_prefills_refusal() -> None:
    short = answered(1, "a", "hello", "x", finish="length", prefill=half("refused", 400))
    assert name(finding("semantics", short), learned()) == "sglang-pd-abort-as-length"


def test_a_vllm_pair_with_another_tenants_words_is_nixl() -> None:
    wrong = answered(1, "a", "hello", "x", prefill=half("answered", 200))
    assert name(finding("marker", wrong), learned("vllm", "0.32.0")) == "vllm-nixl-stale-blocks"
    assert name(finding("marker", answered(1, "a", "hello", "x")), learned("vllm", "0.32.0")) is None


def test_a_count_far_below_what_was_sent_is_truncation() -> None:
    cut = ids(3000, how="answered", usage=Usage(prompt=2041))
    assert name(finding("semantics", cut), learned(version="0.5.23")) == "silent-truncation"
    whole = ids(3000, how="answered", usage=Usage(prompt=3000))
    assert name(finding("semantics", whole), learned(version="0.5.23")) is None


def test_engines_that_were_told_to_slow_down_are_not_blamed() -> None:
    slow = answered(1, "a", "hello", "x", retries=2)
    assert name(finding("timing", slow), learned("vllm")) == "rate-limit-shadow"
    assert name(finding("timing", answered(1, "a", "hello", "x")), learned("vllm")) == "shared-prefix-cache"


def test_one_id_for_two_requests() -> None:
    first, second = (
        Answer(ask=Ask(tenant=t, prompt="x", request_id="same"), number=n, sent=0.0, how="answered") for n, t in ((1, "a"), (2, "b"))
    )  # fmt: skip
    assert name(finding("marker", first, second), learned()) == "duplicate-request-id"


def test_a_returning_session_and_a_restored_slot() -> None:
    wrong = answered(1, "a", "hello", "x")
    assert name(finding("marker", wrong, scenario="sessions"), learned("vllm")) == "lmcache-returning-session"
    assert name(finding("marker", wrong), learned("llama.cpp", "b6000")) == "llamacpp-cache-ram"


def test_other_engines_get_no_name_of_an_engine() -> None:
    assert name(leak(), learned("hermetic")) is None
    assert name(hang(), learned("llama.cpp")) is None


def test_a_finding_without_answers_is_looked_at_as_well() -> None:
    for evidence in ("marker", "differential", "contrast", "semantics", "liveness"):
        assert known(finding(evidence), learned()) is None


def test_a_length_is_never_taken_from_the_servers_own_count() -> None:
    lies = answered(1, "a", "one two three four", "x", usage=Usage(prompt=9999))
    assert prompt_tokens(lies, learned()) == 5  # 4 words, 1.3 tokens each
    assert (
        prompt_tokens(
            Answer(ask=Ask(tenant="a", prompt="", raw=b"{"), number=1, sent=0.0, how="refused"), learned()
        )
        is None
    )


def test_every_signature_says_what_to_do_and_where_it_was_seen() -> None:
    assert len(BY_NAME) == len(SIGNATURES)
    for signature in SIGNATURES:
        assert signature.cause.endswith(".")
        assert signature.todo.endswith(".")
        assert all(
            re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", url)
            for url in signature.sources
        )
