"""Server-sent events as an ASGI response that notices at once when the client goes away.

The one thing to know: sending and listening run side by side, and whatever ends first, `close` runs. Starlette's own
StreamingResponse leaves it to the server's version of the protocol whether a disconnect is noticed before the next send.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hermetic.gateway.limits import wait_disconnect

Frames = AsyncGenerator[bytes, None]


class EventStream(Response):
    """Sends `frames` as text/event-stream with status 200; then, or when the client is gone, awaits `close`."""

    media_type = "text/event-stream"

    def __init__(self, frames: Frames, close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames, self._close = frames, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(wait_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            gone.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)
            await self._frames.aclose()
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
