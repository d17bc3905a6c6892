"""Tasks that run for as long as the gateway does. One that ends by an error is said loudly: a part of the gateway is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger("hermetic.gateway")


class Tasks:
    """Keeps them from being collected, and ends them together."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}  # they end in the order in which they began

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    async def cancel(self) -> None:
        """End them all, and wait until they have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("a part of the gateway has stopped working", exc_info=error)
