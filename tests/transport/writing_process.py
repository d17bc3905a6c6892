"""A sender in a process of its own, for the tests: commands come in as lines of JSON, answers go out the same way.

Run by path with the transport's name and the seconds until a write is in doubt; `writing_peer.py` is the other end.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from hermetic.transport.base import Sender, TransportError
from hermetic.transport.choose import open_transport


def content(seed: int, stride: int) -> np.ndarray:
    """The bytes of a page; none is zero, so that what was never written can be told from what was."""
    return np.random.default_rng(seed).integers(1, 256, stride, dtype=np.uint8)


def main() -> None:
    transport = open_transport(sys.argv[1], write_timeout_s=float(sys.argv[2]))
    sender: Sender | None = None
    stride = 0
    for line in sys.stdin:
        match json.loads(line):
            case ["open", descriptor, int(given)]:
                stride = given
                try:
                    sender = transport.sender(descriptor, stride)
                    answer: object = "opened"
                except TransportError as error:
                    answer = str(error)
            case ["write", int(batch), pages] if sender is not None:
                sender.write(batch, [(content(seed, stride), slot) for slot, seed in pages])
                answer = "written"
            case ["poll", int(count), float(seconds)] if sender is not None:
                ended, until = sender.poll(), time.monotonic() + seconds
                while len(ended) < count and time.monotonic() < until:
                    time.sleep(1e-4)
                    ended += sender.poll()
                answer = ended
            case ["close"] if sender is not None:
                sender.close()
                sender.close()
                answer = "closed"
            case other:
                raise ValueError(f"{other} is no command")
        print("answer", json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
