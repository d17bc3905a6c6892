"""One cluster of real commands on five hosts apart (see hermetic.lab.apart) for all tests of a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from hermetic.lab.apart import Apart, start_apart
from hermetic.lab.hosts import missing_right


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    if (why := missing_right()) is not None:
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        yield start_apart(tmp_path_factory.mktemp("apart"), stack)


@pytest.fixture
def apart(started: Apart) -> Iterator[Apart]:
    """The cluster, whole and with nothing going on, before a test and after it."""
    started.wait_calm()
    yield started
    started.heal()
    started.wait_calm()
