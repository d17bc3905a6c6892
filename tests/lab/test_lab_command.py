"""`python -m hermetic.lab` in an install that lacks what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["leaky", "audited", "serve"])
def test_the_base_install_is_told_what_the_lab_needs(command: str) -> None:
    code = (
        "import runpy, sys; sys.modules['uvicorn'] = None; "
        f"sys.argv = ['lab', {command!r}, 'none']; runpy.run_module('hermetic.lab', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        "error: the lab needs uvicorn, which is not installed: pip install 'hermetic[serve]'"
    ]
