"""The command line: instant help, options as given, errors as one line and exit code 2."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hermetic
from hermetic import cli
from hermetic.options import ServeOptions


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["hermetic", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    return code if isinstance(code, int) else 0


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """What `hermetic serve` hands over, without starting anything."""
    got: list[ServeOptions] = []
    module = ModuleType("hermetic.serve")
    module.main = lambda options: got.append(options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hermetic.serve", module)
    return got


def test_help_and_version_import_nothing_heavy() -> None:
    import subprocess

    code = "import sys\nimport hermetic.cli as c\nsys.argv=['hermetic', sys.argv[1]]\ntry: c.main()\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    for flag in ("--help", "--version"):
        out = subprocess.run(
            [sys.executable, "-c", code, flag], capture_output=True, text=True, check=True
        ).stdout
        heavy = {
            "torch",
            "numpy",
            "numba",
            "fastapi",
            "starlette",
            "pydantic",
            "transformers",
            "zmq",
            "httpx",
            "msgspec",
        }
        assert not heavy & {name.strip(" '[]") for name in out.splitlines()[-1].split(",")}
        assert hermetic.__version__ in out or "serve" in out


def test_serve_without_options_means_the_defaults(
    monkeypatch: pytest.MonkeyPatch, served: list[ServeOptions]
) -> None:
    assert run(monkeypatch, "serve") == 0
    assert served == [ServeOptions()]


def test_serve_options_arrive_as_given(monkeypatch: pytest.MonkeyPatch, served: list[ServeOptions]) -> None:
    line = (
        "serve --model m --mode unified --host ::1 --port 1 --context-length 9 --prefill-kv 1GiB --decode-kv 5MB "
        "--page-size 32 --verify read --dtype float32 --api-keys f --served-name s --log-format json"
    )
    assert run(monkeypatch, *line.split()) == 0
    assert served == [
        ServeOptions(
            model="m", mode="unified", host="::1", port=1, context_length=9, prefill_kv=2**30, decode_kv=5_000_000,
            page_size=32, verify="read", dtype="float32", api_keys="f", served_name="s", log_format="json",
        )
    ]  # fmt: skip


@pytest.mark.parametrize(("args", "words"), [
    (("serve", "--mode", "x"), "disaggregated, unified"), (("serve", "--verify", "none"), "tags, landing, read"),
    (("serve", "--dtype", "fp8"), "bf16, float32"), (("serve", "--prefill-kv", "many"), "256MiB"),
    (("serve", "--port", "70000"), "65535"), (("serve", "--context-length", "0"), "--context-length"), (("fly",), "fly"),
    (("info", "--kv", "x"), "256MiB"), (("info", "/not/there"), "/not/there"),
])  # fmt: skip
def test_wrong_options_exit_with_2_and_say_what_is_right(
    monkeypatch: pytest.MonkeyPatch,
    served: list[ServeOptions],
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    words: str,
) -> None:
    assert run(monkeypatch, *args) == 2
    assert words in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize("missing", ["torch", "uvicorn", "zmq"])
def test_a_command_whose_extra_is_missing_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    def absent(options: ServeOptions) -> int:
        raise ModuleNotFoundError(f"No module named '{missing}.x'", name=f"{missing}.x")

    module = ModuleType("hermetic.serve")
    module.main = absent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hermetic.serve", module)
    assert run(monkeypatch, "serve") == 2
    assert "pip install 'hermetic[serve]'" in capsys.readouterr().err


def test_info_shows_layers_and_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "info", "smollm2", "--kv", "512MiB") == 0
    out = capsys.readouterr().out
    # 30 layers x 3 KV heads x 64 x (K and V) x 2 bytes = 23,040. In float32 a page of 16 tokens is 181 * 4,096 bytes,
    # of which 512 MiB hold 724.
    assert "23,040" in out
    assert "11,584" in out


def test_hash_key_makes_keys_that_the_server_accepts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from hermetic.gateway.tenants import load_tenants

    assert run(monkeypatch, "hash-key", "--new") == 0
    made = capsys.readouterr()
    key = made.err.rsplit(" ", 1)[1].strip()
    monkeypatch.setattr(sys, "stdin", io.StringIO(key + "\n"))
    assert run(monkeypatch, "hash-key") == 0
    again = capsys.readouterr()
    assert again.out == made.out
    assert key not in again.out + again.err
    (tmp_path / "keys.toml").write_text("[tenants.alice]\n" + made.out)
    tenant = load_tenants(str(tmp_path / "keys.toml")).authenticate(f"Bearer {key}")
    assert tenant is not None
    assert tenant.name == "alice"


@pytest.mark.parametrize("key", ["", "short", "has a space in its middle", "schlüssel-schlüssel"])
def test_hash_key_refuses_a_key_that_can_be_guessed_or_not_be_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(key))
    assert run(monkeypatch, "hash-key") == 2
    assert "--new" in capsys.readouterr().err
