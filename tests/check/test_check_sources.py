"""Which sources speak of the same node."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermetic.check import facts, sources
from hermetic.check.facts import Sheet
from hermetic.check.rules.sources import disagree
from hermetic.check.sources import _Entry as Entry
from hermetic.options import OptionError


def sheet(name: str, address: tuple[str, int] | None = None, engine: str = "", role: str = "", pool: int | None = None, host: str | None = None, version: str | None = None) -> Sheet:  # fmt: skip
    made = Sheet(sources=[name], address=address)
    made.add(facts.ENGINE, engine or None, name)
    made.add(facts.ROLE, role or None, name)
    made.add(facts.POOL, pool, name)
    made.add(facts.HOST, host, name)
    made.add(facts.VERSION, version, name)
    return made


def merged(*entries: Entry) -> list[list[str]]:
    return [node.sources for node in sources.merge(entries)]


def test_an_address_brings_a_url_a_saved_answer_and_a_log_together() -> None:
    nodes = merged(
        Entry(sheet("url", ("10.0.0.7", 30000)), "", ""),
        Entry(sheet("log", ("0.0.0.0", 30000)), "", "/logs/a"),  # what it listens on
        Entry(sheet("other", ("10.0.0.7", 30001)), "", "/logs/b"),
    )
    assert nodes == [["url", "log"], ["other"]]


def test_two_hosts_with_one_port_are_two_nodes() -> None:
    assert len(merged(Entry(sheet("a", ("10.0.0.7", 30000)), "", ""), Entry(sheet("b", ("10.0.0.8", 30000)), "", ""))) == 2  # fmt: skip


def test_what_says_no_address_goes_with_the_file_beside_it_that_begins_alike() -> None:
    nodes = merged(
        Entry(sheet("p.metrics"), "", "/here/prefill"),
        Entry(sheet("p.json", ("127.0.0.1", 1), "sglang", "prefill"), "", "/here/prefill"),
        Entry(sheet("d.json", ("127.0.0.1", 2), "sglang", "decode"), "", "/here/decode"),
    )
    assert nodes == [["p.json", "p.metrics"], ["d.json"]]


def test_what_is_alone_in_its_role_needs_no_name() -> None:
    nodes = merged(
        Entry(sheet("p", ("127.0.0.1", 1), "sglang", "prefill"), "", ""),
        Entry(sheet("d", ("127.0.0.1", 2), "sglang", "decode"), "", ""),
        Entry(sheet("metrics", None, "sglang", "decode"), "", "/x"),
    )
    assert nodes == [["p"], ["d", "metrics"]]


def test_of_two_that_it_could_be_none_is_chosen() -> None:
    entries = [Entry(sheet(f"d{n}", ("127.0.0.1", n), "sglang", "decode"), "", "") for n in (1, 2)]
    assert len(merged(*entries, Entry(sheet("metrics", None, "sglang", "decode"), "", "/x"))) == 3


def test_two_nodes_of_one_file_stay_two() -> None:
    """A manifest with both halves: neither says an address, and both begin with the file's name."""
    both = [Entry(sheet(role, None, "sglang", role), "", "/x/deploy", {1}) for role in ("prefill", "decode")]
    assert merged(*both, Entry(sheet("log", None, "sglang", "decode"), "", "/y/d", {2})) == [
        ["prefill"],
        ["decode", "log"],
    ]


def test_what_listens_everywhere_on_one_port_in_another_role_is_another_node() -> None:
    entries = [
        Entry(sheet(role, ("0.0.0.0", 30000), "sglang", role), "", f"/{role}")
        for role in ("prefill", "decode")
    ]
    assert merged(*entries) == [["prefill"], ["decode"]]


def log_of(file: str, place: str, pool: int, host: str = "0.0.0.0", kind: str = facts.START) -> Entry:
    made = sheet(file, (host, 30000), "sglang", "prefill", pool)
    made.read.add(kind)
    return Entry(made, "", place)


@pytest.mark.parametrize("kind", [facts.START, facts.SERVER_INFO, facts.COMMAND])
@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::", "0"])
def test_start_up_logs_of_two_machines_are_two_nodes_though_both_listen_everywhere(host: str, kind: str) -> None:  # fmt: skip
    """One too small a pool of several would else be a disagreement, and no rule could find it."""
    a, b = (log_of(f"{name}.log", f"/logs/{name}", pool, host, kind) for name, pool in (("p0", 5), ("p1", 6)))
    assert merged(a, b) == [["p0.log"], ["p1.log"]]


def test_two_logs_of_one_beginning_are_of_one_node() -> None:
    """prefill.log and prefill.log.1"""
    assert merged(log_of("p.log", "/logs/p", 5), log_of("p.log.1", "/logs/p", 5)) == [["p.log", "p.log.1"]]


def test_of_what_listens_everywhere_it_is_not_guessed_which_of_two_machines_it_is() -> None:
    urls = [
        Entry(sheet(f"http://{host}", (host, 30000), "sglang", "prefill"), "", "")
        for host in ("10.0.0.7", "10.0.0.8")
    ]
    assert merged(*urls, log_of("p.log", "/p", 5)) == [["http://10.0.0.7"], ["http://10.0.0.8"], ["p.log"]]


def test_a_log_that_is_named_first_does_not_bring_two_machines_together() -> None:
    urls = [
        Entry(sheet(f"http://{host}", (host, 30000), "sglang", "prefill"), "", "")
        for host in ("10.0.0.7", "10.0.0.8")
    ]
    assert merged(log_of("p.log", "/p", 5), *urls) == [["p.log"], ["http://10.0.0.7"], ["http://10.0.0.8"]]
    (node, _) = sources.merge([log_of("p.log", "/p", 5), urls[0], Entry(sheet("x", ("10.0.0.8", 30000), "vllm", "decode"), "", "")])  # fmt: skip
    assert (node.address, node.sources) == (("10.0.0.7", 30000), ["http://10.0.0.7", "p.log"])


def test_a_second_start_up_log_is_of_another_machine_than_the_url_and_its_saved_answer_is_not() -> None:
    url = log_of("http://10.0.0.7", "", 5, "10.0.0.7", facts.SERVER_INFO)
    saved = log_of("info.json", "/saved", 5, "0.0.0.0", facts.SERVER_INFO)
    logs = [log_of(f"{name}.log", f"/logs/{name}", 5) for name in ("a", "b")]
    assert merged(url, saved, *logs) == [["http://10.0.0.7", "info.json", "a.log"], ["b.log"]]


def test_two_parts_of_one_unit_are_one_node() -> None:
    entries = [log_of(file, f"/etc/{file}", 5, kind=facts.COMMAND) for file in ("sglang.service", "override.conf")]  # fmt: skip
    for entry in entries:
        entry.sheet.name = "sglang"
    assert len(merged(*entries)) == 1


def test_a_name_that_was_said_decides() -> None:
    nodes = sources.merge([
        Entry(sheet("a", ("127.0.0.1", 1), pool=5), "left", "/x/one"),
        Entry(sheet("b", ("127.0.0.1", 1), pool=6), "right", "/x/one"),
        Entry(sheet("c"), "left", "/y"),
    ])  # fmt: skip
    assert [(node.name, node.sources) for node in nodes] == [("left", ["a", "c"]), ("right", ["b"])]


@pytest.mark.parametrize(
    ("own", "name"),
    [("prefill", "prefill"), ("sglang-prefill-0", "sglang-prefill-0"), ("Prefill/leader", "Prefill/leader"), ("prefills", "prefill prefills"), ("a", "prefill a")],
)  # fmt: skip
def test_a_role_that_the_name_says_is_not_said_twice(own: str, name: str) -> None:
    one = sheet("compose.yaml", role="prefill")
    one.name = own
    (node,) = sources.merge([Entry(one, "", "", {0})])
    assert node.name == name


def test_no_two_nodes_have_one_name() -> None:
    entries = [Entry(sheet(f"s{n}", None, f"engine{n}", "decode"), "", f"/{n}") for n in range(3)]
    names = [node.name for node in sources.merge(entries)]
    assert len(set(names)) == 3


@given(st.permutations(range(6)))
def test_the_nodes_do_not_depend_on_the_order_of_their_sources(order: list[int]) -> None:
    entries = [
        Entry(sheet("u1", ("h1", 1), "sglang", "prefill"), "", ""), Entry(sheet("l1", ("0.0.0.0", 1)), "", "/x/p"),
        Entry(sheet("m1", None, "sglang"), "", "/x/p"), Entry(sheet("u2", ("h2", 2), "sglang", "decode"), "", ""),
        Entry(sheet("m2", None, "sglang", "decode"), "", "/y"), Entry(sheet("l2", ("h2", 2)), "", "/x/d"),
    ]  # fmt: skip
    found = {frozenset(node.sources) for node in sources.merge([entries[n] for n in order])}
    assert found == {frozenset({"u1", "l1", "m1"}), frozenset({"u2", "m2", "l2"})}


# ------------------------------------------------------------------------------------ what is a source


def test_a_word_is_a_url_a_path_or_a_command_line_and_may_have_a_name(tmp_path: Path) -> None:
    here = tmp_path / "a=b.log"
    here.write_text("x")
    words = ["http://h:1", "p=http://h:1", str(here), f"p={here}", "-", "vllm serve m --port 1", "p=vllm serve m --port 1"]  # fmt: skip
    found = sources.parse(words)
    assert [(one.name, one.text) for one in found] == [
        ("", "http://h:1"), ("p", "http://h:1"), ("", str(here)), ("p", str(here)), ("", "-"), ("", "vllm serve m --port 1"),
        ("p", "vllm serve m --port 1"),
    ]  # fmt: skip


@pytest.mark.parametrize("word", ["nothing-here", "http://", "http://h:99999", "ls -l", "p=nothing-here", ""])
def test_what_is_none_of_these_is_refused_by_name(word: str) -> None:
    with pytest.raises(OptionError):
        sources.parse([word])


def test_nothing_at_all_says_what_there_could_be() -> None:
    with pytest.raises(OptionError, match="URLs of nodes, logs"):
        sources.parse([])


# ------------------------------------------------------------------------------------ facts


def test_what_sources_disagree_on_is_not_known_and_says_who_said_what() -> None:
    one, other = sheet("a.json", pool=5), sheet("b.log", pool=6)
    one.name = "node"
    one.take(other)
    with pytest.raises(facts.NotKnown, match=r"node: the sources disagree on .*: 5 \(a.json\); 6 \(b.log\)"):
        _ = one[facts.POOL]
    with pytest.raises(facts.NotKnown, match="disagree"):
        one.get(facts.POOL, 7)
    assert one.values(facts.POOL) == [5, 6]


@pytest.mark.parametrize(
    ("one", "other", "known"),
    [
        ("decode-1", "10.0.0.8", "10.0.0.8"),
        ("10.0.0.8", "decode-1.internal", "10.0.0.8"),
        ("localhost", "127.0.0.1", "127.0.0.1"),
        ("localhost", "::1", "::1"),
        ("node-7", "127.0.1.1", "127.0.1.1"),  # as Debian writes a host's own name into its table
        ("decode-1", "0.0.0.0", None),
        ("localhost", "10.0.0.8", None),
        ("10.0.0.7", "10.0.0.8", None),
        ("decode-1", "decode-2", None),
    ],
)
def test_a_host_and_its_address_do_not_disagree(one: str, other: str, known: str | None) -> None:
    node = sheet("a.json", host=one)
    node.take(sheet("b.yaml", host=other))
    if known is not None:
        assert node[facts.HOST] == known
    else:
        with pytest.raises(facts.NotKnown, match="disagree"):
            _ = node[facts.HOST]
    assert bool(disagree(node)) == (known is None)


@pytest.mark.parametrize(
    ("one", "other", "known"),
    [
        ("0.32.0", "0.32.0+cpu", "0.32.0+cpu"),
        ("0.32.0+cpu", "v0.32.0", "0.32.0+cpu"),
        ("v0.5.23", "0.5.23", "v0.5.23"),
        ("0.32.0+cpu", "0.32.0+cu129", None),
        ("0.5.2", "0.5.23", None),
        ("0.5.20", "0.5.20.post1", None),
    ],
)
def test_a_build_of_a_release_does_not_disagree_with_the_release(
    one: str, other: str, known: str | None
) -> None:
    node = sheet("tag", version=one)
    node.take(sheet("log", version=other))
    assert node.values(facts.VERSION) == ([known] if known else [one, other])
    assert bool(disagree(node)) == (known is None)


def test_what_nobody_says_is_not_known_and_says_who_would() -> None:
    with pytest.raises(
        facts.NotKnown, match=r"how many tokens the KV pool holds is not known; its /server_info"
    ):
        _ = sheet("a")[facts.POOL]
    assert sheet("a").get(facts.POOL, 7) == 7


@pytest.mark.parametrize(
    ("read", "fact", "hint"),
    [
        (set(), facts.POOL, "its /server_info, its /metrics or its start-up log would say it"),
        ({facts.START}, facts.POOL, "its start-up log was read and does not say it; its /server_info or its /metrics would"),
        ({facts.SERVER_INFO, facts.COMMAND}, facts.TP, "its /server_info and its command line or manifest were read and do not say it"),
        (set(), facts.WAITED, "its /metrics would say it under load"),
        ({facts.METRICS_PAGE}, facts.WAITED, "its /metrics was read and does not say it (it would under load)"),
        ({facts.METRICS_PAGE}, facts.TRANSFER_SPEED, "its /metrics was read and does not say it; its /v1/loads would under load"),
    ],
)  # fmt: skip
def test_a_source_that_was_read_and_does_not_say_it_is_not_asked_for_again(
    read: set[str], fact: facts.Fact[object], hint: str
) -> None:
    one, other = sheet("a"), sheet("b")
    other.read = read
    one.take(other)
    with pytest.raises(facts.NotKnown) as told:
        _ = one[fact]
    assert str(told.value).endswith(f"{fact.says} is not known; {hint}")


def test_an_engine_is_not_asked_for_a_page_that_it_does_not_have() -> None:
    """vLLM answers /server_info in developer mode only."""
    one = sheet("a", engine="vllm")
    with pytest.raises(facts.NotKnown, match="is not known; its /metrics or its start-up log would say it"):
        _ = one[facts.POOL]


def test_what_was_read_of_a_url_is_known_by_its_address() -> None:
    one = sheet("http://127.0.0.1:30000")
    with pytest.raises(facts.NotKnown, match="its URL was read and does not say it"):
        _ = one[facts.METRICS_OPEN]


def test_taking_a_sheet_twice_changes_nothing() -> None:
    one, other = sheet("a", pool=5), sheet("b", pool=5)
    for _ in range(2):
        one.take(other)
    assert [(seen.value, seen.where) for seen in one.seen(facts.POOL)] == [(5, "a"), (5, "b")]
    assert one[facts.POOL] == 5
    assert one.sources == ["a", "b"]
