"""Versions are compared as people mean them, and what is no version is not compared."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from hermetic.check.facts import VERSION, NotKnown, Sheet
from hermetic.check.versions import before, of, older, parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5.19", "0.5.19"),
        ("0.5.20.post1", "0.5.20.post1"),
        ("v0.5.23-cu126", "0.5.23"),
        ("v0.5.23-rocm700-mi30x", "0.5.23"),
        ("0.5.20-rc1-cu126", "0.5.20rc1"),
        ("0.32.0+cpu", "0.32.0+cpu"),
        (" 0.32.0\n", "0.32.0"),
        ("0.5.21.dev3+gabc1234", "0.5.21.dev3+gabc1234"),
    ],
)
def test_what_stands_in_logs_and_image_tags_is_read(text: str, expected: str) -> None:
    assert parse(text) == Version(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "latest",
        "nightly-20261129",
        "20261129",
        "2026-11-29",
        "a1b2c3d",
        "0.0.0.dev0",
        "0.1.dev0",
        "v",
        "7",
        "०.५.२३",
        "0.5.23 " + "x" * 200,
    ],
)
def test_what_is_no_version_is_not_known(text: str) -> None:
    with pytest.raises(NotKnown, match="is no version"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "release", "expected"),
    [
        ("0.5.19", "0.5.20", True),
        ("0.5.20", "0.5.20", False),
        ("0.5.20.post1", "0.5.20", False),
        ("0.5.20.post1", "0.5.21", True),
        ("v0.5.23-cu126", "0.5.22", False),
        ("0.5.9", "0.5.20", True),  # not as text
        ("0.6rc1", "0.5.20", False),
        ("0.5.21.dev3", "0.5.20", False),
        ("0.5.20rc1", "0.5.21", True),
        ("0.32.0+cpu", "0.32.0", False),
    ],
)
def test_versions_are_compared(text: str, release: str, expected: bool) -> None:
    assert before(parse(text), release) is expected


@pytest.mark.parametrize(
    ("text", "release"), [("0.5.20rc1", "0.5.20"), ("0.5.20.dev7", "0.5.20"), ("0.6.0rc1", "0.6")]
)
def test_whether_a_build_on_the_way_to_a_release_has_its_fixes_is_not_known(text: str, release: str) -> None:
    with pytest.raises(NotKnown, match="was built before"):
        before(parse(text), release)


def test_what_is_not_known_is_told_with_the_nodes_name() -> None:
    node = Sheet(name="prefill")
    with pytest.raises(NotKnown, match=r"^prefill: the version is not known"):
        of(node)
    node.add(VERSION, "main", "a")
    with pytest.raises(NotKnown, match=r"^prefill: the version 'main' is no version"):
        of(node)
    node.replace(VERSION, "0.5.20rc1", "a")
    with pytest.raises(NotKnown, match=r"^prefill: the version 0.5.20rc1 was built before"):
        older(node, "0.5.20")


@given(st.text())
def test_no_text_breaks_it(text: str) -> None:
    with contextlib.suppress(NotKnown):
        parse(text)
