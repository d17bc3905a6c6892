"""What of an exchange is kept for a report."""

from __future__ import annotations

from hermetic.audit.exchange import KEPT, Answer, Ask, shortened


def test_a_prompt_of_megabytes_is_kept_by_its_beginning_and_its_length() -> None:
    long = Answer(
        ask=Ask(tenant="a", prompt="word " * 1_000_000), number=1, sent=0.0, how="answered", text="t"
    )
    short = shortened(long)
    assert str(short.ask.prompt).startswith("word word")
    assert "4,980,000 more characters" in str(short.ask.prompt)
    assert len(short.ask.prompt) < KEPT + 60
    assert (short.text, short.number, short.ask.tenant) == ("t", 1, "a")


def test_ids_and_raw_bodies_are_cut_too_and_what_is_short_is_left_as_it_is() -> None:
    ids = Answer(ask=Ask(tenant="a", prompt=(7,) * 50_000), number=1, sent=0.0, how="answered")
    assert shortened(ids).ask.prompt == (7,) * KEPT
    raw = Answer(ask=Ask(tenant="a", prompt="", raw=b"{" * 30_000), number=1, sent=0.0, how="refused")
    assert shortened(raw).ask.raw == b"{" * KEPT
    little = Answer(ask=Ask(tenant="a", prompt="hello"), number=1, sent=0.0, how="answered")
    assert shortened(little) is little
