"""No request waits for a compiler: what a worker may run is compiled before it says that it is ready.

The one thing to know: looked at is which functions have which signatures, not whether something was compiled, since compiled kernels
are kept from one start to the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermetic.lab.tiny import make_tiny

SCRIPT = """
import gc, itertools, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
from hermetic.handoff.messages import Key
from hermetic.model.params import SamplingParams
from hermetic.worker import messages as m
from hermetic.worker import wire
from hermetic.worker.build import build
from lone_workers import config

CHUNK = 3400  # of rows with 64 values each: from 3,125 on they are 200,000, and another kernel takes them
KINDS = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "the most likely few": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 1.0, "logit_bias": {5: 1.0}},
    "logprobs": {"temperature": 0.0, "logprobs": 3},
}

def compiled():
    return {
        f"{one.py_func.__module__}.{one.py_func.__qualname__}{signature}"
        for one in gc.get_objects() if isinstance(one, Dispatcher) and one.py_func.__module__.startswith("hermetic.")
        for signature in one.signatures
    }

ended, tickets = [], itertools.count(1)
made = config("unified", sys.argv[1], wire.CurveKeys(b"", b"", b"", b""), dtype=sys.argv[2], chunk=CHUNK, kv_bytes=1 << 26)
worker = build(made, lambda to, key, body: ended.append(body) if isinstance(body, m.Ended) else None, lambda fraction, text: None)

def asks(prompts, **params):
    ended.clear()
    for number, length in enumerate(prompts):
        tokens = np.arange(length, dtype="<i4") % 100 + 3
        params_ = SamplingParams(max_tokens=4, ignore_eos=True, **params)
        worker.handle(b"here", Key(next(tickets).to_bytes(16, "big"), 0), m.Submit(tokens.tobytes(), length, params_, 1, 0, 7, "", "", number, ""))
    while len(ended) < len(prompts):
        assert worker.tick()
    assert all(type(one.outcome).__name__ == "Completed" for one in ended), ended

ready = compiled()
assert any("attend" in one for one in ready), ready
for params in KINDS.values():
    asks([5], **params)
    asks([5, 6, 7, 8, 9], **params)
for length in (20, 600, CHUNK, CHUNK + 100):
    asks([length], temperature=0.0)
    asks([length, 9, 10, 11], temperature=0.0)
print(*sorted(compiled() - ready), sep="\\n", end="")
"""


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_whatever_is_asked_nothing_is_compiled_any_more(dtype: str, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny", max_position_embeddings=8192)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, model, dtype],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""
