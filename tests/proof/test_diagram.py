"""The state diagrams of docs/proof.md are the tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hermetic.handoff import decode, prefill
from hermetic.proof import diagram

DOCS = Path(__file__).parents[2] / "docs" / "proof.md"


def test_the_docs_show_the_tables_as_they_are() -> None:
    text = DOCS.read_text()
    for marker, content in diagram.sections().items():
        assert diagram.between(marker, text) == content, "run: python -m hermetic.proof.diagram --write"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_row_that_changes_makes_the_docs_wrong(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table, states = diagram.ROLES[role]
    text = DOCS.read_text()
    for row, targets in table.items():
        changed = dict(table)
        changed[row] = targets ^ {next(iter(states))}
        monkeypatch.setitem(diagram.ROLES, role, (changed, states))
        assert any(diagram.between(m, text) != content for m, content in diagram.sections().items()), row


@pytest.mark.parametrize(("role", "module"), [("prefill", prefill), ("decode", decode)])
def test_the_edges_of_a_diagram_are_the_moves_of_its_table(role: str, module: object) -> None:
    table = module.TABLE  # type: ignore[attr-defined]
    moves = {(a.name, event, b.name) for (a, event), targets in table.items() for b in targets if a is not b}
    drawn = {
        (a, event, b)
        for a, b, events in re.findall(r"^    (\w+) --> (\w+): (.*)$", diagram.mermaid(role), re.MULTILINE)
        for event in events.split(", ")
    }
    assert drawn == moves


def test_a_table_has_a_row_for_each_state_and_empty_cells_where_nothing_is_in_the_table() -> None:
    lines = diagram.grid("prefill").splitlines()
    assert len(lines) == 2 + len(prefill.State)
    filled = sum(bool(cell.strip()) for line in lines[2:] for cell in line.split("|")[2:-1])
    assert filled == len(prefill.TABLE)
    assert "| stays, COMPLETE |" in next(line for line in lines if line.startswith("| **SENDING** |"))


def test_only_what_is_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = diagram.BEGIN.format("x"), diagram.END.format("x")
    page.write_text(f"above\n{begin}\nold\n{end}\nbelow\n")
    assert diagram.put_between("x", "new\nlines\n", page)
    assert page.read_text() == f"above\n{begin}\n\nnew\nlines\n\n{end}\nbelow\n"
    assert not diagram.put_between("x", "new\nlines", page)


@pytest.mark.parametrize("text", ["", "{begin}", "{end} {begin}", "{begin} {begin} {end}"])
def test_a_page_without_its_markers_is_an_error_and_is_left_as_it_is(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text.format(begin=diagram.BEGIN.format("x"), end=diagram.END.format("x")))
    before = page.read_text()
    with pytest.raises(ValueError, match="once each and in this order"):
        diagram.put_between("x", "new", page)
    assert page.read_text() == before
