"""Whether one particular process has ended. A pidfd names that process for ever, so a reused pid cannot deceive."""

from __future__ import annotations

import os
import select


class ProcessWatch:
    """Watches one process of this host. Raises OSError when there is no such process."""

    def __init__(self, pid: int) -> None:
        if not 0 < pid < 2**31:  # it came over a wire, and os.pidfd_open would not say OSError
            raise ProcessLookupError(f"{pid} is no process id")
        self._fd = os.pidfd_open(pid)

    def ended(self) -> bool:
        """True once the process can run no more code (it has exited or was killed)."""
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
