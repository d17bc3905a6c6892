"""Memory that was announced to a peer: what another process can do to it, before and after it is retired."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hermetic.transport.base import TransportError
from hermetic.transport.memory import AddressedMemory

# What a peer's engine does over CMA: write to an address of ours that it once was told.
WRITE = """
import ctypes, os, sys
pid, address = int(sys.argv[1]), int(sys.argv[2])
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
data = ctypes.create_string_buffer(b"x" * 4096, 4096)
here, there = Vector(ctypes.addressof(data), 4096), Vector(address, 4096)
libc = ctypes.CDLL(None, use_errno=True)
written = libc.process_vm_writev(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
print(written, os.strerror(ctypes.get_errno()) if written < 0 else "")
"""


def written_from_outside(address: int) -> str:
    import os

    command = [sys.executable, "-c", WRITE, str(os.getpid()), str(address)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_another_process_can_write_there_until_it_is_retired_and_never_again() -> None:
    memory = AddressedMemory(3, 4096)
    assert memory.address % 4096 == 0
    assert written_from_outside(memory.address + 4096) == "4096"
    view = memory.pages
    assert [set(x.tolist()) for x in view] == [{0}, {ord("x")}, {0}]
    memory.retire()
    memory.retire()
    assert len(memory.pages) == 0
    assert not view.any()  # a view that somebody kept reads zeros instead of ending the process
    assert written_from_outside(memory.address + 4096).startswith("-1 Bad address")
    assert not view.any()


def test_no_later_memory_of_this_process_has_a_retired_address() -> None:
    retired: list[range] = []
    for _ in range(20):
        memory = AddressedMemory(16, 4096)
        mine = range(memory.address, memory.address + memory.size)
        others = [np.empty(16 * 4096, np.uint8) for _ in range(4)]
        for start in (mine.start, *(x.ctypes.data for x in others)):
            assert not any(start in old or old.start in range(start, start + memory.size) for old in retired)
        memory.retire()
        retired.append(mine)


def test_memory_that_cannot_be_had_is_an_error_with_the_number() -> None:
    with pytest.raises(TransportError, match=str(1 << 60)):
        AddressedMemory(1 << 20, 1 << 40)
