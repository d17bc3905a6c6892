"""The key file of a cluster: what its members prove themselves with, and the secret that seals are keyed with.

`hermetic keygen` makes it, every machine of the cluster gets a copy. TOML, five values:

    server_public, server_secret, client_public, client_secret      CURVE keys, z85, 40 characters each
    seal_secret                                                     64 hexadecimal digits

The one thing to know: whoever can read this file can join the cluster and read everybody's prompts there. So it is made
with mode 0600, and a copy that anybody else could read is refused, as ssh refuses such a key. No value of it ever stands
in a message, a log, an argument or a `repr`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from hermetic.kv.lineage import Secret
from hermetic.options import OptionError
from hermetic.worker.wire import CurveKeys

_CURVE = ("server_public", "server_secret", "client_public", "client_secret")
_SEAL = "seal_secret"
_FIELDS = (*_CURVE, _SEAL)
_Wrong = Callable[[str], OptionError]
_LARGEST = 4096  # bytes of a key file at most; a real one has some 600
_HOW = "make one with `hermetic keygen PATH` and copy it to every machine of the cluster"
_HEAD = """\
# The keys of one Hermetic cluster, the same file on each of its machines. Whoever can read it can join the cluster and
# read every prompt there: keep its mode 0600 and its owner the user that runs Hermetic.
"""


@dataclass(frozen=True)
class ClusterKeys:
    """What a member of the cluster holds."""

    curve: CurveKeys  # its repr, and that of a Secret, shows nothing
    secret: Secret

    @classmethod
    def make(cls) -> ClusterKeys:
        return cls(CurveKeys.make(), Secret.random())


def write(path: Path, keys: ClusterKeys, replace: bool = False) -> None:
    """Write a new key file, readable by its owner only, and on disk when this returns.

    Raises OptionError when there is something at `path` already; with `replace`, a file is replaced as a whole, so that a
    reader sees the former keys or these, but a link or anything that is no file is refused all the same."""
    text = _HEAD + "".join(
        f'{name} = "{value}"\n'
        for name, value in zip(
            _FIELDS,
            (*(getattr(keys.curve, name).decode("ascii") for name in _CURVE), keys.secret.key.hex()),
            strict=True,
        )
    )
    try:
        there = path.lstat()
    except FileNotFoundError:
        there = None
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot write a key file at {path}: {error}") from error
    if there is not None and not stat.S_ISREG(there.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(there.st_mode) else "not a regular file"
        raise OptionError(f"{path} is {kind}; keys are written to a file itself: give another PATH")
    if there is not None and not replace:
        raise OptionError(
            f"{path} is there already, and a cluster whose keys are overwritten falls apart; give another PATH, or --force "
            "to replace it"
        )
    new = path if there is None else path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        _write_new(new, text.encode("ascii"))
        if new != path:
            try:
                new.replace(path)
            except OSError:
                new.unlink()
                raise
        _sync_folder(path.parent)
    except FileExistsError:
        raise OptionError(f"{path} has just been made by somebody else; look at it, then try again") from None
    except OSError as error:
        raise OptionError(f"cannot write a key file at {path}: {error.strerror or error}") from error


def _write_new(path: Path, data: bytes) -> None:
    """O_EXCL also refuses a link, whatever it points to."""
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(number, "wb") as file:
            os.fchmod(file.fileno(), 0o600)  # whatever the umask took away
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()  # half a key file is of no use to anybody
        raise


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def load(path: Path) -> ClusterKeys:
    """Read a key file. Raises OptionError when it is not there, not whole, or not this user's alone.

    Root may read another user's file: whoever is root could have changed its owner."""
    text = _read(path)

    def wrong(what: str) -> OptionError:
        return OptionError(f"the key file {path} {what}; {_HOW}")

    try:
        # tomllib's message may quote what it stumbled over, which can be a key: only the place is passed on.
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        place = str(error).rpartition("(")[2].rstrip(")")
        raise wrong(f"is not whole: it cannot be read as TOML ({place})") from None
    if missing := [name for name in _FIELDS if name not in values]:
        raise wrong(f"is not whole: it has no {', '.join(missing)}")
    if len(values) > len(_FIELDS):
        raise wrong(f"has {len(values) - len(_FIELDS)} values that do not belong there")
    curve = CurveKeys(*(_z85(name, values[name], wrong) for name in _CURVE))
    for public, secret in (
        (curve.server_public, curve.server_secret),
        (curve.client_public, curve.client_secret),
    ):
        if zmq.curve_public(secret) != public:
            which = "server" if public is curve.server_public else "client"
            raise wrong(f"is damaged: {which}_public does not belong to {which}_secret")
    return ClusterKeys(curve, _secret(values[_SEAL], wrong))


def _read(path: Path) -> str:
    try:
        # Not blocking: a pipe in the place of the file must not hold a server up before it is refused.
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise OptionError(f"the key file {path} is not there; {_HOW}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OptionError(f"cannot read the key file {path}: {reason}") from None
    status = os.fstat(number)  # of what was opened, not of what stands at the path now
    if not stat.S_ISREG(status.st_mode):
        os.close(number)
        raise OptionError(f"the key file {path} is not a file; {_HOW}")
    with os.fdopen(number, "rb") as file:
        if status.st_mode & 0o077:
            raise OptionError(
                f"the key file {path} has mode {stat.S_IMODE(status.st_mode):04o}, so others than its owner can use it, and "
                f"whoever has the keys can join the cluster. Make it yours alone: chmod 600 {path}"
            )
        if status.st_uid != os.geteuid() != 0:
            raise OptionError(
                f"the key file {path} belongs to user {status.st_uid}, and this is user {os.geteuid()}; its owner can change "
                f"the keys: chown {os.geteuid()} {path}"
            )
        raw = file.read(_LARGEST + 1)
    if len(raw) > _LARGEST:
        raise OptionError(f"the key file {path} has more than {_LARGEST} bytes, so it is not one; {_HOW}")
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        raise OptionError(
            f"the key file {path} is damaged: it has bytes that are not ASCII; {_HOW}"
        ) from None


def _z85(name: str, value: object, wrong: _Wrong) -> bytes:
    if not isinstance(value, str):
        raise wrong(f"is damaged: {name} is not a text")
    if len(value) != 40:
        raise wrong(f"is damaged: {name} has {len(value)} characters; a key has 40")
    try:
        z85.decode(value)
    except (KeyError, struct.error):
        raise wrong(f"is damaged: {name} is not a key in z85") from None
    return value.encode("ascii")


def _secret(value: object, wrong: _Wrong) -> Secret:
    if not isinstance(value, str):
        raise wrong(f"is damaged: {_SEAL} is not a text")
    if len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise wrong(f"is damaged: {_SEAL} has {len(value)} characters; it has 64 digits 0-9 a-f")
    return Secret(bytes.fromhex(value))
