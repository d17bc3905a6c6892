"""`python -m hermetic.lab.leaky_serve serve ...`: the `hermetic` command, with leaky workers and a leaky gateway.

Which fault is on is said by the switch's file (leaky_switch.py); `leaky.py` starts this and turns the switch. The one thing to
know: it ends when the process that started it is gone, however that ended."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from unittest import mock

from hermetic import cli, serve
from hermetic.lab.leaky_gateway import break_gateway
from hermetic.lab.leaky_switch import Switch
from hermetic.lab.leaky_worker import COMMAND

LOOK_SECONDS = 0.5


def main() -> None:
    """Run the command line with everything broken, and nothing switched on but what the file says."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    break_gateway(Switch.of_environment())
    broken = functools.partial(serve.main, commands=lambda _config: COMMAND)
    with mock.patch.object(serve, "main", broken):
        cli.main()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
