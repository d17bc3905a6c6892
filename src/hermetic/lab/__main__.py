"""`python -m hermetic.lab serve|prefill|decode ...`: the `hermetic` command, with workers broken as HERMETIC_LAB says (see
process.py)."""

from __future__ import annotations

import functools
from unittest import mock

from hermetic import cli, serve
from hermetic.lab.process import COMMAND, make
from hermetic.worker import process


def main() -> None:
    """Run the command line with the lab's worker processes in the place of the product's."""
    broken = functools.partial(serve.main, commands=lambda _config: COMMAND)
    alone = functools.partial(process.run_standalone, make=make)
    with mock.patch.object(serve, "main", broken), mock.patch.object(process, "run_standalone", alone):
        cli.main()


if __name__ == "__main__":
    main()
