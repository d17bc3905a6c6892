"""Landing memory whose addresses are never used again.

A transfer engine writes to addresses. A peer that was stopped in the middle of something keeps the ones it knew, and may
use them an hour later; by then the same address must not belong to anything else, least of all to the pool. So memory that
was announced to a peer is never unmapped in the life of this process: it is retired, which gives its frames back and
leaves a read-only range of zeros that nobody can write to. The cost is address space (24 MiB for each retired peer).
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from hermetic.transport.base import Page, TransportError

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


class AddressedMemory:
    """Zeros in a private mapping of its own, at page-aligned `address`: `pages` uint8 [slots, stride]."""

    def __init__(self, slots: int, stride: int) -> None:
        self.size = slots * stride
        self._retired = False
        self.address = self._map(None, mmap.PROT_READ | mmap.PROT_WRITE, 0)
        raw = (ctypes.c_uint8 * self.size).from_address(self.address)
        self.pages: Page = np.ctypeslib.as_array(raw).reshape(slots, stride)

    def retire(self) -> None:
        """Nothing can write here any more: no thread of ours, no other process. Views that are left read zeros."""
        if not self._retired:
            self._map(self.address, mmap.PROT_READ, _MAP_FIXED | _MAP_NORESERVE)
            self._retired = True
            self.pages = self.pages[:0].copy()

    def _map(self, where: int | None, protection: int, flags: int) -> int:
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        found = _libc.mmap(where, self.size, protection, private | flags, -1, 0)
        if found is None or found == _FAILED:
            problem = os.strerror(ctypes.get_errno())
            raise TransportError(f"cannot map {self.size} bytes of landing memory: {problem}")
        return int(found)
