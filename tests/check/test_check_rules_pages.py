"""The pages of the rules are those of the rules that run; --explain says the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hermetic.check.check import FAMILIES as ORDER
from hermetic.check.rules import RULES, pages
from hermetic.options import OptionError

FOLDER = Path(__file__).parents[2] / "docs" / "rules"


def test_the_pages_in_docs_are_up_to_date() -> None:
    there = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    assert there == pages.pages(), "write them again: python -m hermetic.check.rules.pages docs/rules"


def test_writing_removes_the_page_of_a_rule_that_is_no_more(tmp_path: Path) -> None:
    (tmp_path / "OLD001.md").write_text("gone")
    assert pages.main([str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", *(f"{code}.md" for code in RULES)}
    assert pages.main([]) == 2


def test_every_family_has_a_title_and_every_rule_stands_in_the_index() -> None:
    assert tuple(pages.FAMILIES) == ORDER
    assert {rule.family for rule in RULES.values()} == set(pages.FAMILIES)
    assert re.findall(r"\[([A-Z]+\d+)\]\(\1\.md\)", pages.index()) == [rule.code for rule in pages.ordered()]
    assert sorted(rule.code for rule in pages.ordered()) == sorted(RULES)


@pytest.mark.parametrize("code", RULES)
def test_explain_says_what_the_page_says(code: str) -> None:
    text, rule = pages.explained(code.lower()), RULES[code]
    assert text.startswith(f"{code} {rule.severity}: {rule.title}")
    assert max(map(len, text.split("\n"))) <= 110 or "http" in text
    folded = " ".join(text.replace("`", "").split())
    for heading, paragraphs in pages.sections(rule):
        assert heading in text
        assert " ".join(paragraphs.replace("`", "").split()) in folded
    for part in (rule.why, rule.fix, rule.source):
        assert part.endswith((".", ")")), (code, part)


def test_explain_without_a_code_lists_all_rules() -> None:
    assert [line.split()[0] for line in pages.explained("").splitlines()] == [
        rule.code for rule in pages.ordered()
    ]


def test_explain_of_a_family_or_the_beginning_of_codes_lists_those() -> None:
    listed = pages.explained("cap").splitlines()
    assert [line.split()[0] for line in listed] == sorted(code for code in RULES if code.startswith("CAP"))
    assert "the KV pool is smaller than the advertised context" in listed[0]
    assert {line.split()[0][:5] for line in pages.explained("VLLM00").splitlines()} == {"VLLM0"}


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("CAP999", "CAP001"),
        ("CPA001", "CAP001"),
        ("checksum", "DET001"),
        ("nonsense", "Families: CAP, .*--explain all"),
    ],
)
def test_a_code_that_no_rule_has_is_an_error_that_names_those_there_are(code: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        pages.explained(code)


@pytest.mark.parametrize("code", RULES)
def test_a_rule_is_written_as_a_sentence_in_plain_words(code: str) -> None:
    rule = RULES[code]
    assert rule.title[0].islower() or rule.title.startswith(("/metrics", "API", "KV"))
    assert not rule.title.endswith(".")
    assert not re.search("[—–…]", " ".join((rule.title, rule.why, rule.fix, rule.source)))
