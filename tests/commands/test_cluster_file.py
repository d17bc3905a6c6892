"""The cluster file: what it means, and every way to get it wrong, with the line that is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hermetic import cli, keys
from hermetic.cluster_checks import own_address
from hermetic.cluster_file import Address, load
from hermetic.lab.tiny import make_tiny
from hermetic.options import OptionError, ServeOptions
from hermetic.run_gateway import cluster_options
from hermetic.run_worker import check, choose, worker_config

WHOLE = """\
model = "smollm2"               # 1
dtype = "bf16"
page_size = 16
verify = "landing"
transport = "mooncake"          # 5
keys = "cluster.keys"
log_format = "text"

[gateway]
control = "10.0.0.1:7000"       # 10
http = "127.0.0.1:8000"
served_name = "small"
on_disconnect = "drain"
context_length = 4096
trip_failures = 3               # 15
trip_minutes = 10
state_file = "state.json"

[workers.prefill-a]
role = "prefill"                # 20
listen = "10.0.0.2:7001"
kv = "256MiB"
threads = 2
chunk = 256

[workers.decode-a]
role = "decode"
listen = "10.0.0.3:7001"
advertise = "decode-a.example"
kv = "512MiB"                   # 30
max_batch = 32
slots = 48

[timing]
drain_seconds = 20
silent_seconds = 12.5
transfer_floor = "50MB"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "cluster.toml").write_text(WHOLE)
    return tmp_path / "cluster.toml"


def test_everything_arrives_as_written(path: Path) -> None:
    file = load(path)
    assert (file.model, file.dtype, file.page_size, file.verify) == ("smollm2", "bf16", 16, "landing")
    assert (file.transport, file.log_format) == ("mooncake", "text")
    assert file.keys == path.parent / "cluster.keys"
    assert file.gateway.control == Address("10.0.0.1", 7000)
    assert file.gateway.http == Address("127.0.0.1", 8000)
    options = cluster_options(file)
    assert (options.on_disconnect, options.trip_failures, options.trip_seconds) == ("drain", 3, 600.0)
    assert (options.context, options.silent_seconds) == (4096, 12.5)
    assert options.state_file == str(path.parent / "state.json")


def test_a_worker_is_told_what_the_file_says_of_it_and_no_more(path: Path) -> None:
    file, secrets = load(path), keys.ClusterKeys.make()
    config = worker_config(file, file.workers["decode-a"], secrets, "10.0.0.3")
    assert (config.name, config.role, config.host, config.port) == ("decode-a", "decode", "10.0.0.3", 7001)
    assert config.advertise == "decode-a.example"
    assert config.gateways == ("tcp://10.0.0.1:7000",)
    assert (config.kv_bytes, config.max_batch, config.slots) == (512 * 1024**2, 32, 48)
    assert (config.drain_seconds, config.silent_seconds, config.transfer_floor) == (20.0, 12.5, 50_000_000)
    assert not config.supervised
    assert (config.keys, config.secret) == (secrets.curve, secrets.secret.key)
    assert worker_config(file, file.workers["prefill-a"], secrets, "10.0.0.2").threads == 2


def test_what_is_left_out_is_as_serve_has_it(path: Path) -> None:
    path.write_text(
        'model = "smollm2"\nkeys = "k"\n[gateway]\ncontrol = "127.0.0.1:7000"\n'
        '[workers.p]\nrole = "prefill"\nlisten = "127.0.0.1:0"\n[workers.d]\nrole = "decode"\nlisten = "127.0.0.1:0"\n'
    )
    file, default = load(path), ServeOptions()
    assert (file.dtype, file.page_size, file.verify, file.transport) == (
        default.dtype, default.page_size, default.verify, default.transport,
    )  # fmt: skip
    assert (file.workers["p"].kv, file.workers["d"].kv) == (default.prefill_kv, default.decode_kv)
    assert file.workers["d"].slots == default.landing_slots
    assert file.gateway.http == Address(default.host, default.port)
    assert file.timing.drain_seconds == default.drain_deadline
    assert file.timing.transfer_floor == default.transfer_floor


def test_addresses_of_the_sixth_version_stand_in_brackets(path: Path) -> None:
    path.write_text(WHOLE.replace('"10.0.0.1:7000"', '"[fd00::1]:7000"'))
    file = load(path)
    assert file.gateway.control == Address("fd00::1", 7000)
    config = worker_config(file, file.workers["decode-a"], keys.ClusterKeys.make(), "10.0.0.3")
    assert config.gateways == ("tcp://[fd00::1]:7000",)


def test_what_workers_dial_is_what_the_gateway_advertises(path: Path) -> None:
    path.write_text(WHOLE.replace("[gateway]", '[gateway]\nadvertise = "gate.example"'))
    file = load(path)
    config = worker_config(file, file.workers["decode-a"], keys.ClusterKeys.make(), "10.0.0.3")
    assert config.gateways == ("tcp://gate.example:7000",)
    assert file.gateway.control.host == "10.0.0.1"


WRONG = [
    # what is written instead of what, the line it stands on, what is said
    ("verify =", "verfy =", 4, "did you mean verify?"),
    ("served_name", "name_served", 12, "known are"),
    ("threads", "thread", 23, "did you mean threads?"),
    ("silent_seconds", "silence", 36, "silent_seconds"),
    ("[timing]", "[timings]", 34, "did you mean timing?"),
    ('"smollm2"', "7", 1, "model is 7; it must be a text"),
    ('"smollm2"', '""', 1, "model is ''"),
    ('dtype = "bf16"', 'dtype = "fp8"', 2, "bf16, float32"),
    ("page_size = 16", "page_size = 0", 3, "from 1 to 512"),
    ("page_size = 16", "page_size = true", 3, "whole number"),
    ('"cluster.keys"', '"~nobody-of-this-name/x"', 6, "no such user"),
    ("page_size = 16", 'page_size = "16"', 3, "whole number"),
    ('"landing"', '"never"', 4, "tags, landing, read"),
    ('"landing"', "true", 4, "tags, landing, read"),
    ('"mooncake"', '"rdma"', 5, "shm, mooncake, nixl"),
    ('log_format = "text"', 'log_format = "xml"', 7, "text, json"),
    ('"10.0.0.1:7000"', '"10.0.0.1"', 10, "HOST:PORT"),
    ('"10.0.0.1:7000"', '":7000"', 10, "HOST:PORT"),
    ('"10.0.0.1:7000"', '"10.0.0.1:"', 10, "HOST:PORT"),
    ('"10.0.0.1:7000"', '"10.0.0.1:0"', 10, "from 1 to 65535"),
    ('"10.0.0.1:7000"', '"10.0.0.1:70000"', 10, "from 1 to 65535"),
    ('"10.0.0.1:7000"', '"10.0.0.1:-1"', 10, "HOST:PORT"),
    ('"10.0.0.1:7000"', '"tcp://10.0.0.1:7000"', 10, "control is"),
    ('"10.0.0.1:7000"', '"fd00::1:7000"', 10, "[fd00::1]:7000"),
    ('"10.0.0.1:7000"', '"0.0.0.0:7000"', 10, "every address"),
    ('"10.0.0.1:7000"', '"[::]:7000"', 10, "every address"),
    ('"10.0.0.1:7000"', '"*:7000"', 10, "neither a host name nor an IP address"),
    ('"10.0.0.1:7000"', '"0:7000"', 10, "neither a host name nor an IP address"),
    ('"10.0.0.1:7000"', '"0x0:7000"', 10, "neither a host name nor an IP address"),
    ('"10.0.0.1:7000"', '"a b:7000"', 10, "neither a host name nor an IP address"),
    ('"10.0.0.3:7001"', '"0.0.0.0:7001"', 28, "every address"),
    ('"decode-a.example"', '"0.0.0.0"', 29, "every address"),
    ('"decode-a.example"', '"decode:1"', 29, "neither a host name nor an IP address"),
    ('on_disconnect = "drain"', 'on_disconnect = "wait"', 13, "drain, cancel"),
    ("context_length = 4096", "context_length = 1", 14, "at least 2"),
    ("trip_failures = 3", "trip_failures = -1", 15, "at least 0"),
    ("trip_minutes = 10", "trip_minutes = 0", 16, "above 0"),
    ("trip_minutes = 10", "trip_minutes = inf", 16, "above 0"),
    ('role = "prefill"', 'role = "router"', 20, "prefill, decode, unified"),
    ('role = "prefill"', 'role = "unified"', 27, "not both"),
    ('role = "prefill"', 'role = "decode"', 19, "no prefill worker"),
    ('role = "decode"', 'role = "prefill"', 19, "no decode worker"),
    ('role = "decode"\n', "", 26, "role is missing in [workers.decode-a]"),
    ('listen = "10.0.0.3:7001"\n', "", 26, "listen is missing in [workers.decode-a]"),
    ('"10.0.0.3:7001"', '"10.0.0.2:7001"', 28, "prefill-a's already"),
    ('"10.0.0.3:7001"', '"10.0.0.1:7000"', 28, "the gateway's control already"),
    ('http = "127.0.0.1:8000"', 'http = "10.0.0.1:7000"', 11, "control's already"),
    ('"mooncake"', '"shm"', 28, "one machine"),
    ('kv = "256MiB"', 'kv = "lots"', 22, "256MiB"),
    ('kv = "256MiB"', "kv = 0", 22, "at least one byte"),
    ('kv = "256MiB"', "kv = 1.5", 22, "at least one byte"),
    ("threads = 2", "threads = 0", 23, "from 1 to"),
    ("chunk = 256", "chunk = 0", 24, "at least 1"),
    ("max_batch = 32", "max_batch = 0", 31, "from 1 to"),
    ("slots = 48", "slots = 0", 32, "from 1 to"),
    ("slots = 48", "slots = 4.5", 32, "whole number"),
    ("drain_seconds = 20", "drain_seconds = -1", 35, "above 0"),
    ("drain_seconds = 20", "drain_seconds = nan", 35, "above 0"),
    ("silent_seconds = 12.5", 'silent_seconds = "long"', 36, "above 0"),
    ('"50MB"', '"fast"', 37, "cannot read the size"),
    ("[workers.prefill-a]", "[workers.gateway]", 19, "cannot be called 'gateway'"),
    ("[workers.prefill-a]", '[workers."a b"]', 19, "cannot be called 'a b'"),
    ("[workers.prefill-a]", "[[workers.prefill-a]]", 19, "must be a table"),
    ("[gateway]", "[[gateway]]", 9, "must be a table"),
    ('keys = "cluster.keys"\n', "", 1, "keys is missing at the top of the file"),
    ("page_size = 16", "page_size = = 16", 3, "not TOML"),
    ("page_size = 16", "model = 16", 3, "not TOML"),
    ("transfer_floor", "transfer_floor = [", 37, "not TOML"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "line", "said"), WRONG, ids=[f"{w[1]} at {w[2]}" for w in WRONG])
def test_what_is_wrong_is_said_with_its_line(
    path: Path, right: str, wrong: str, line: int, said: str
) -> None:
    assert WHOLE.count(right) >= 1
    path.write_text(WHOLE.replace(right, wrong, 1))
    with pytest.raises(OptionError) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}:{line}: "), refused.value
    assert said in str(refused.value)


def test_a_text_that_never_ends_is_said_with_the_last_line(path: Path) -> None:
    path.write_text(WHOLE + "[a")
    with pytest.raises(OptionError, match=f"{path}:38: not TOML"):
        load(path)


def test_bytes_that_are_no_text_are_said_with_their_line(path: Path) -> None:
    path.write_bytes(WHOLE.encode().replace(b'"small"', b'"sm\xe4ll"'))
    with pytest.raises(OptionError, match=f"{path}:12: byte 0xe4 is not UTF-8"):
        load(path)


def test_a_file_without_workers_or_gateway_says_what_to_write(path: Path) -> None:
    path.write_text('model = "smollm2"\nkeys = "k"\n')
    with pytest.raises(OptionError, match=r"there is no \[gateway\]"):
        load(path)
    path.write_text('model = "smollm2"\nkeys = "k"\n[gateway]\ncontrol = "127.0.0.1:7000"\n')
    with pytest.raises(OptionError, match=r"write \[workers.NAME\]"):
        load(path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not there"):
        load(tmp_path / "gone.toml")
    with pytest.raises(OptionError, match="cannot read"):
        load(tmp_path)
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000 + "]" * 100_000)
    (tmp_path / "long.toml").write_text("page_size = " + 5000 * "9")
    with pytest.raises(OptionError, match="cannot be read"):
        load(tmp_path / "long.toml")
    with pytest.raises(OptionError, match="nested too deep"):
        load(tmp_path / "deep.toml")
    (tmp_path / "huge.toml").write_bytes(b"#" * 2**21)
    with pytest.raises(OptionError, match="more than 1048576 bytes"):
        load(tmp_path / "huge.toml")


def test_shared_memory_takes_workers_that_listen_on_one_host(path: Path) -> None:
    one = WHOLE.replace('"mooncake"', '"shm"').replace("10.0.0.3:7001", "10.0.0.2:7002")
    path.write_text(one)
    load(path)
    path.write_text(one.replace("10.0.0.2:7001", "127.0.0.1:7001").replace("10.0.0.2:7002", "localhost:7002"))
    load(path)


def test_free_ports_are_not_the_same_address(path: Path) -> None:
    path.write_text(WHOLE.replace("10.0.0.3:7001", "10.0.0.2:0").replace("10.0.0.2:7001", "10.0.0.2:0"))
    load(path)


def test_a_worker_is_found_by_its_name_or_by_being_the_only_one(path: Path) -> None:
    file = load(path)
    assert choose(file, "prefill", None).name == "prefill-a"
    assert choose(file, "decode", "decode-a").name == "decode-a"
    with pytest.raises(OptionError, match=f"{path}:20: .*hermetic prefill"):
        choose(file, "decode", "prefill-a")
    with pytest.raises(OptionError, match="there is: decode-a"):
        choose(file, "decode", "decode-b")
    path.write_text(WHOLE + '[workers.decode-b]\nrole = "decode"\nlisten = "10.0.0.4:0"\n')
    with pytest.raises(OptionError, match=r"--name is missing.*decode-a, decode-b"):
        choose(load(path), "decode", None)


def test_a_unified_worker_is_started_by_decode(path: Path) -> None:
    path.write_text(
        'model = "smollm2"\nkeys = "k"\n[gateway]\ncontrol = "127.0.0.1:7000"\n[workers.u]\nrole = "unified"\n'
        'listen = "127.0.0.1:0"\n'
    )
    assert choose(load(path), "decode", None).role == "unified"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of it takes 8 KiB: 16 tokens x 3 layers x 2 heads x 16 x (K and V) x 2 bytes, 6 seals, padded to 4 KiB."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    ("right", "wrong", "line", "said"),
    [
        # 24 KiB hold 3 pages, 48 tokens: too few for the 512 that the gateway is to advertise.
        ('kv = "512MiB"', 'kv = "24KiB"', 14, "48"),
        ('kv = "512MiB"', 'kv = "4KiB"', 30, "8.0 KiB"),
        ("context_length = 512", "context_length = 2000", 14, "1024"),
        # 48 slots of 8,192 bytes are 393,216 bytes: 39.3 s at 10 kB a second, and twice that is more than 20 s.
        ('"50MB"', '"10kB"', 35, "79"),
        ("/tiny", "/gone", 1, "gone"),
    ],
)
def test_what_only_the_model_shows_to_be_wrong_is_said_with_its_line_too(
    path: Path, tiny: str, right: str, wrong: str, line: int, said: str
) -> None:
    of_tiny = WHOLE.replace("smollm2", tiny, 1).replace("context_length = 4096", "context_length = 512")
    assert right in of_tiny
    path.write_text(of_tiny.replace(right, wrong, 1))
    file = load(path)
    config = worker_config(file, file.workers["decode-a"], keys.ClusterKeys.make(), "10.0.0.3")
    with pytest.raises(OptionError) as refused:
        check(file, config)
    assert str(refused.value).startswith(f"{path}:{line}: "), refused.value
    assert said in str(refused.value)
    assert "--" not in str(refused.value), "a file has keys, not options"


def test_an_address_of_another_machine_is_refused_before_anything_is_loaded(path: Path) -> None:
    # 192.0.2.0/24 is set aside for documentation (RFC 5737): no machine has it.
    path.write_text(WHOLE.replace("10.0.0.3:7001", "192.0.2.7:7001"))
    file = load(path)
    with pytest.raises(OptionError, match=f"{path}:28: cannot listen on 192.0.2.7 port 7001"):
        own_address(file, ("workers", "decode-a", "listen"), file.workers["decode-a"].listen)


def test_the_same_file_is_right_or_wrong_for_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    path.write_text(WHOLE.replace("slots = 48", "slots = 0"))
    for command in (["gateway"], ["prefill"], ["decode", "--name", "decode-a"]):
        monkeypatch.setattr(sys, "argv", ["hermetic", *command, "--cluster", str(path)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert f"{path}:32: slots is 0" in capsys.readouterr().err


def test_a_gateway_that_others_can_reach_needs_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    path.write_text(WHOLE.replace('http = "127.0.0.1:8000"', 'http = "0.0.0.0:8000"'))
    keys.write(path.parent / "cluster.keys", keys.ClusterKeys.make())
    monkeypatch.setattr(sys, "argv", ["hermetic", "gateway", "--cluster", str(path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{path}:11: " in said
    assert "api_keys" in said


def test_the_words_of_commands_and_files_are_those_of_the_rooms_that_use_them() -> None:
    from hermetic import options
    from hermetic.engine.engine import Role
    from hermetic.telemetry import logs
    from hermetic.transport import choose as transports
    from hermetic.worker import build

    assert options.VERIFY == build.VERIFY
    assert options.TRANSPORTS == transports.NAMES
    assert options.LOG_FORMATS == logs.FORMATS
    assert set(options.ROLES) == {role.value for role in Role}


def test_the_example_in_the_documentation_is_right(path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    path.write_text(text.split("```toml\n")[1].split("```")[0])
    file = load(path)
    assert file.workers["decode-a"].advertise == "203.0.113.7"
    check(file, worker_config(file, file.workers["prefill-a"], keys.ClusterKeys.make(), "10.0.0.2"))
