"""Compiled kernels are found again by the next process, and the parallel build is not taken for the serial one."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from hermetic.kernels import simd

PROGRAM = """
import json, numpy as np
from hermetic.kernels import paged
from hermetic.kv.geometry import Geometry, empty_pages
memory = empty_pages(Geometry.attention(4, 1, 1, 8, "bf16"), 2)
rows, pages = np.zeros((1, 1, 8), np.uint16), np.zeros(1, np.int32)
word = np.zeros(1, np.uint64)
hits = []
for parallel in (0, 1):
    kernel = paged.write_kernel(4, 1, 8, 2, 1, parallel)
    at = (rows.ctypes.data, 16, 16)
    secrets = np.zeros(32, np.uint32)
    kernel(memory, 0, 128, *at, *at, 1, pages, pages, pages + 1, pages, word, word, word, secrets)
    hits.append(sum(kernel.stats.cache_hits.values()))
print(json.dumps(hits))
"""


def run(cache: Path) -> list[int]:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    assert run(tmp_path) == [0, 0]  # not even the parallel build finds the serial one
    assert run(tmp_path) == [1, 1]


def test_an_edit_of_the_vector_instructions_changes_the_name_under_which_a_kernel_is_kept(
    tmp_path: Path,
) -> None:
    digest = hashlib.blake2b(Path(simd.__file__).read_bytes(), digest_size=6).hexdigest()
    run(tmp_path)
    indexes = [file.name for file in tmp_path.rglob("*.nbi")]
    assert len(indexes) == 2
    assert all(digest in name for name in indexes)
