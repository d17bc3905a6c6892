"""A recorder for tests: it also takes machines that no worker made, each as a process of its own."""

from __future__ import annotations

import os
from typing import Any

from hermetic.handoff.actions import Action
from hermetic.handoff.decode import DecodeHandoff
from hermetic.handoff.machine import Machine
from hermetic.handoff.trace import Recorder

ALONE = "nobody"


class LooseRecorder(Recorder):
    """`loose` after it has taken a machine without a worker."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.loose = False

    def stepped(
        self, machine: Machine[Any], event: str, args: tuple[Any, ...], before: Any, actions: list[Action]
    ) -> None:
        if machine not in self.homes:
            self._adopt(machine)
        super().stepped(machine, event, args, before, actions)

    def _adopt(self, machine: Machine[Any]) -> None:
        self.loose = True
        decode = isinstance(machine, DecodeHandoff)
        role = "decode" if decode else "prefill"
        journal = self.join(role, role, os.urandom(8), 16, 0, machine._slots.count if decode else 0)
        if isinstance(machine, DecodeHandoff):
            journal.has_segment(machine._slots, ALONE, 1)
        journal.begins(machine, ALONE)
