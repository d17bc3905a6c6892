"""The key file: made once, readable by its owner alone, and refused in any other condition."""

from __future__ import annotations

import os
import stat
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from hermetic import cli, keys
from hermetic.options import OptionError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.keys"


@pytest.fixture
def made(path: Path) -> Path:
    keys.write(path, keys.ClusterKeys.make())
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hermetic", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def secrets_in(path: Path) -> list[str]:
    return [value for name, value in tomllib.loads(path.read_text()).items() if name.endswith("secret")]


def test_keygen_writes_a_file_that_only_its_owner_can_read_and_says_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    before = os.umask(0)
    try:
        assert run(monkeypatch, "keygen", str(path)) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    said = capsys.readouterr()
    loaded = keys.load(path)
    assert loaded.secret.key_id in said.out
    assert len(secrets_in(path)) == 3
    assert not any(secret in said.out + said.err for secret in secrets_in(path))


def test_what_was_written_is_what_is_read(path: Path) -> None:
    fresh = keys.ClusterKeys.make()
    keys.write(path, fresh)
    assert keys.load(path) == fresh
    document = tomllib.loads(path.read_text())
    # libzmq's own word for what belongs to a secret.
    assert zmq.curve_public(document["server_secret"].encode()) == document["server_public"].encode()
    assert bytes.fromhex(document["seal_secret"]) == fresh.secret.key


def test_two_clusters_have_nothing_in_common(tmp_path: Path) -> None:
    for name in ("a", "b"):
        keys.write(tmp_path / name, keys.ClusterKeys.make())
    assert not set(secrets_in(tmp_path / "a")) & set(secrets_in(tmp_path / "b"))


def test_keys_do_not_show_in_a_repr(made: Path) -> None:
    loaded = keys.load(made)
    for shown in (repr(loaded), str(loaded), f"{loaded.curve!r}", f"{loaded.secret!r}"):
        assert not any(secret in shown for secret in secrets_in(made))


def test_keys_that_are_there_are_replaced_only_by_force(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], made: Path
) -> None:
    before = made.read_bytes()
    assert run(monkeypatch, "keygen", str(made)) == 2
    assert "--force" in capsys.readouterr().err
    assert made.read_bytes() == before
    assert run(monkeypatch, "keygen", str(made), "--force") == 0
    assert made.read_bytes() != before
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert list(made.parent.iterdir()) == [made], "nothing half-written is left beside it"


@pytest.mark.parametrize("force", [False, True])
def test_keys_are_not_written_through_a_link(tmp_path: Path, path: Path, force: bool) -> None:
    target = tmp_path / "elsewhere"
    path.symlink_to(target)
    with pytest.raises(OptionError, match="symbolic link"):
        keys.write(path, keys.ClusterKeys.make(), replace=force)
    assert not target.exists()
    target.write_text("precious")
    with pytest.raises(OptionError, match="symbolic link"):
        keys.write(path, keys.ClusterKeys.make(), replace=force)
    assert target.read_text() == "precious"


@pytest.mark.parametrize("force", [False, True])
def test_keys_are_not_written_over_a_folder(path: Path, force: bool) -> None:
    path.mkdir()
    with pytest.raises(OptionError, match="not a regular file"):
        keys.write(path, keys.ClusterKeys.make(), replace=force)


def test_a_file_that_appears_at_the_last_moment_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    def gone(_path: Path) -> os.stat_result:
        path.write_text("precious")  # right after it was looked for
        raise FileNotFoundError

    monkeypatch.setattr(Path, "lstat", gone)
    with pytest.raises(OptionError, match="has just been made by somebody else"):
        keys.write(path, keys.ClusterKeys.make())
    assert path.read_text() == "precious"


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="No such file"):
        keys.write(tmp_path / "no" / "where", keys.ClusterKeys.make())


def test_a_full_disk_leaves_no_half_a_file(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def full(_number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OptionError, match="No space left"):
        keys.write(path, keys.ClusterKeys.make())
    assert not path.exists()


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o601, 0o610, 0o644, 0o666, 0o777])
def test_a_file_that_others_can_use_is_refused_with_the_command_that_mends_it(made: Path, mode: int) -> None:
    made.chmod(mode)
    with pytest.raises(OptionError) as refused:
        keys.load(made)
    assert f"chmod 600 {made}" in str(refused.value)
    assert f"{mode:04o}" in str(refused.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_read(made: Path, mode: int) -> None:
    made.chmod(mode)
    keys.load(made)


def test_a_file_of_another_user_is_refused_unless_root_reads_it(
    monkeypatch: pytest.MonkeyPatch, made: Path
) -> None:
    owner = made.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1000)
    with pytest.raises(OptionError, match=f"belongs to user {owner}"):
        keys.load(made)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    keys.load(made)


def test_a_pipe_in_the_place_of_the_file_holds_nobody_up(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(OptionError, match="not a file"):
        keys.load(path)


def test_a_folder_in_the_place_of_the_file_is_refused(path: Path) -> None:
    path.mkdir(mode=0o700)
    with pytest.raises(OptionError, match="not a file"):
        keys.load(path)


def test_a_file_that_is_not_there_says_how_to_make_one(path: Path) -> None:
    with pytest.raises(OptionError, match=f"{path} is not there.*hermetic keygen"):
        keys.load(path)


def line(name: str, value: str) -> Callable[[str], str]:
    """The file with another value for `name`."""

    def change(text: str) -> str:
        rows = [f"{name} = {value}" if row.startswith(f"{name} =") else row for row in text.splitlines()]
        assert rows != text.splitlines()
        return "\n".join(rows)

    return change


OTHER = zmq.curve_keypair()[0].decode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (line("server_public", '"short"'), "server_public has 5 characters"),
        (line("server_public", '"' + 39 * "a" + '"'), "server_public has 39 characters"),
        (line("client_secret", '"' + 40 * "~" + '"'), "client_secret is not a key in z85"),
        (line("client_secret", '"' + 40 * "#" + '"'), "client_secret is not a key in z85"),  # above 2^32
        (line("client_secret", "7"), "client_secret is not a text"),
        (line("server_public", f'"{OTHER}"'), "server_public does not belong to server_secret"),
        (line("client_public", f'"{OTHER}"'), "client_public does not belong to client_secret"),
        (line("seal_secret", '"' + 62 * "0" + '"'), "seal_secret has 62 characters"),
        (line("seal_secret", '"' + 64 * "g" + '"'), "seal_secret"),
        (line("seal_secret", "[1]"), "seal_secret is not a text"),
        (lambda text: text + "\nsurprise = 1\n", "values that do not belong there"),
        (lambda text: text + "\nserver_public = 1\n", "cannot be read as TOML"),
        (lambda _: "", "has no server_public"),
        (lambda _: "a=" + 4000 * "[", "cannot be read as TOML"),
        (lambda _: "a=" + 4000 * "9" + 900 * "9", "more than 4096 bytes"),
        (lambda text: text + "#" * 5000, "more than 4096 bytes"),
        (lambda text: text + "# schlüssel", "not ASCII"),
    ],
)
def test_a_damaged_file_is_refused_and_its_secrets_are_not_quoted(
    made: Path, change: Callable[[str], str], said: str
) -> None:
    secrets = secrets_in(made)
    made.write_text(change(made.read_text()))
    with pytest.raises(OptionError, match=said) as refused:
        keys.load(made)
    assert str(made) in str(refused.value)
    assert not any(secret in str(refused.value) for secret in secrets)


@settings(max_examples=60)
@given(st.data())
def test_a_file_cut_off_anywhere_is_refused_and_quotes_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("keys") / "cluster.keys"
    keys.write(path, keys.ClusterKeys.make())
    whole = path.read_bytes()
    secrets = secrets_in(path)
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 2))])
    with pytest.raises(OptionError) as refused:
        keys.load(path)
    assert not any(secret[:10] in str(refused.value) for secret in secrets)
