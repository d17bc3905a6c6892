"""`python -m hermetic.lab serve|prefill|decode ...`: the `hermetic` command, with workers broken as HERMETIC_LAB says (see
process.py).

`python -m hermetic.lab leaky NAME ...`: a server that leaks on purpose (see leaky.py).
`python -m hermetic.lab audited [NAME...]`: audits of such servers, and of clean ones (see audited.py)."""

from __future__ import annotations

import functools
import sys
from unittest import mock

try:
    from hermetic import cli, serve
    from hermetic.lab.process import COMMAND, make
    from hermetic.worker import process
except ModuleNotFoundError as error:
    if (error.name or "").startswith("hermetic"):
        raise
    print(
        f"error: the lab needs {error.name}, which is not installed: pip install 'hermetic[serve]'",
        file=sys.stderr,
    )
    raise SystemExit(2) from None


def main() -> None:
    """Run the command line with the lab's worker processes in the place of the product's."""
    if sys.argv[1:2] == ["leaky"]:
        from hermetic.lab import leaky

        raise SystemExit(leaky.main(sys.argv[2:]))
    if sys.argv[1:2] == ["audited"]:
        from hermetic.lab import audited

        raise SystemExit(audited.main(sys.argv[2:]))
    broken = functools.partial(serve.main, commands=lambda _config: COMMAND)
    alone = functools.partial(process.run_standalone, make=make)
    with mock.patch.object(serve, "main", broken), mock.patch.object(process, "run_standalone", alone):
        cli.main()


if __name__ == "__main__":
    main()
