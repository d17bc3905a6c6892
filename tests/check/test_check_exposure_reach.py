"""Who can reach a Hermetic, as its own /v1/models states it: nothing of it is left unknown, and what it states is weighed against what was seen."""

from __future__ import annotations

import json
from pathlib import Path

from hermetic.check import facts, fetch
from hermetic.check.check import CheckOptions, run
from hermetic.check.facts import Sheet
from hermetic.check.fetch import FetchOptions
from hermetic.check.readers.reading import Reading
from hermetic.check.unanswered import Page

CODES = ("EXP002", "EXP004", "EXP005")
# As a gateway of `hermetic serve` answers; the last three fields are tests/gateway/test_service.py's.
OWN = {
    "window": 8192, "page_size": 16, "pool_tokens": {"prefill-0": 256, "decode-0": 512}, "mode": "disaggregated", "fingerprint": "f",
    "numeric": "weights=bf16 compute=bf16 kv=bf16", "verify": "landing", "listens": "127.0.0.1", "api_keys": False, "metrics": "everybody",
}  # fmt: skip


def models(**own: object) -> bytes:
    entry = {"id": "smollm2", "object": "model", "owned_by": "hermetic", "parent": None, "max_model_len": 256, "hermetic": {**OWN, **own}}  # fmt: skip
    return json.dumps({"object": "list", "data": [entry]}).encode()


def verdicts(folder: Path, **own: object) -> dict[str, str]:
    (folder / "models.json").write_bytes(models(**own))
    report = run(CheckOptions((str(folder / "models.json"),), select=("EXP",)))
    return {verdict.code: verdict.state for verdict in report.verdicts}


def test_a_server_of_its_own_machine_is_clean_without_any_other_source(tmp_path: Path) -> None:
    assert verdicts(tmp_path) == dict.fromkeys(CODES, "passed")


def test_a_server_for_others_with_keys_is_clean(tmp_path: Path) -> None:
    said = verdicts(tmp_path, listens="0.0.0.0", api_keys=True, metrics="this host")
    assert said == dict.fromkeys(CODES, "passed")


def test_what_it_would_say_of_an_open_one_is_a_finding(tmp_path: Path) -> None:
    """It does not start so; a report of one that did is not passed over."""
    said = verdicts(tmp_path, listens="0.0.0.0")
    assert said == {"EXP002": "finding", "EXP004": "finding", "EXP005": "passed"}


def test_what_it_does_not_say_is_not_known(tmp_path: Path) -> None:
    assert "unknown" in verdicts(tmp_path, listens=None).values()


# ------------------------------------------------------------------------------------ live


METRICS = b"# TYPE hermetic_context_advertised_tokens gauge\nhermetic_context_advertised_tokens 256.0\nhermetic_disabled 0.0\n"


def asked(url: str, metrics: Page, api_key: str | None = None) -> Reading:
    pages = {"/v1/models": Page(200, models(listens="0.0.0.0", api_keys=True, metrics="this host")), "/metrics": metrics}  # fmt: skip
    return fetch._reading(url, fetch._Asked(pages), FetchOptions(api_key=api_key))


def open_metrics(reading: Reading) -> bool:
    (sheet,) = reading.sheets
    assert isinstance(sheet, Sheet)
    return sheet[facts.METRICS_OPEN]


def test_metrics_that_answer_their_own_host_are_not_open() -> None:
    assert not open_metrics(asked("http://127.0.0.1:8000", Page(200, METRICS)))


def test_metrics_that_answer_somebody_else_are_open_whatever_the_server_says() -> None:
    """A proxy on its host, which passes on what others ask."""
    assert open_metrics(asked("http://10.0.0.7:8000", Page(200, METRICS)))


def test_metrics_for_its_own_host_only_are_no_matter_of_keys() -> None:
    refusal = Page(403, b'{"error": {"message": "...", "type": "invalid_request_error", "code": "metrics_local_only"}}')  # fmt: skip
    (one,) = asked("http://10.0.0.7:8000", refusal, api_key="k").unread
    assert one.part
    assert one.why.startswith("answers /metrics to its own host only")
    (other,) = asked("http://10.0.0.7:8000", Page(403, b"{}"), api_key="k").unread
    assert "API key" in other.why
