"""One worker's membership at its gateways: to say that it is there, to hear whether it is taken, and to leave in peace.

The one thing to know: only gateways that know us are asked when we may go. One that says nothing any more is not waited for
once our requests have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from hermetic.options import OptionError
from hermetic.worker import messages as m
from hermetic.worker.core import Connection, Worker
from hermetic.worker.lines import Line, Wire
from hermetic.worker.link import BEAT_SECONDS
from hermetic.worker.timers import Every

UNHEARD_SECONDS = 10.0  # without an answer of any gateway after which a new worker says so
DEAF_SECONDS = 5.0  # without an answer after which a leaving worker waits for a gateway no more
LEAVE_SECONDS = 600.0  # a leaving worker waits so long for its requests to end
BACKLOG = 2  # what a gateway that is away did not read is worth nothing later
REASONS = 100  # different refusals that are logged


class Registration:
    """`over` is True once this worker has left. `complain` gets what cannot be used. Raises OptionError for a gateway's
    address that cannot be one."""

    def __init__(
        self,
        worker: Worker,
        wire: Wire,
        gateways: Iterable[str],
        complain: Callable[[str], None],
        now: float,
        log: logging.Logger,
    ) -> None:
        self._worker, self._complain, self._since, self._log = worker, complain, now, log
        self._addresses = tuple(dict.fromkeys(gateways))
        self._lines: dict[Connection, Line] = {}
        for address in self._addresses:
            connection = b"g" + address.encode()
            try:
                self._lines[connection] = wire.dial(address, connection, BACKLOG)
            except OSError as error:
                raise OptionError(f"the gateway's address {address} cannot be dialled: {error}") from error
        self._known: dict[Connection, float] = {}  # gateways that know us, and when they last said so
        self._heard_of = not self._addresses  # a gateway has answered, or it was said that none does
        self._refusals: set[str] = set()
        self._leaving: float | None = None  # since when
        self._beat = Every(BEAT_SECONDS)
        self.over = False

    def owns(self, connection: Connection) -> bool:
        """Whether this is the line to a gateway's control port."""
        return connection in self._lines

    def leave(self, now: float) -> bool:
        """Ask to go. False when there is nobody to ask, or it has been asked already."""
        if self._leaving is not None or not self._known:
            return False
        self._leaving = now
        return True

    def heard(self, connection: Connection, body: m.Body, now: float) -> None:
        """A gateway's answer to what we announce."""
        self._heard_of = True
        match body:
            case m.Registered():
                if connection not in self._known:
                    self._log.info("registered with a gateway")
                self._known[connection] = now
            case m.Rejected(reason=reason):
                self._known.pop(connection, None)
                if reason not in self._refusals and len(self._refusals) < REASONS:
                    self._refusals.add(reason)
                    self._log.error("a gateway does not take this worker: %s", reason)
                if self._leaving is not None:
                    self._left(connection)
            case m.Leave():
                if self._leaving is not None:
                    self._left(connection)
            case _:
                self._complain(f"{type(body).__name__} from a gateway's control port")

    def keep(self, now: float) -> None:
        """What time asks for."""
        if self._beat.due(now):
            body = m.Register(self._worker.info, self._leaving is not None)
            raw = m.datagram(self._worker.info.incarnation, body)
            for line in self._lines.values():
                line.put(raw)
        if not self._heard_of and now - self._since > UNHEARD_SECONDS:
            self._heard_of = True
            where = ", ".join(self._addresses)
            self._log.warning("no gateway answers at %s: does it run, and with the same key file?", where)
        if self._leaving is not None:
            self._go_if_free(now, self._leaving)

    def _go_if_free(self, now: float, since: float) -> None:
        for connection, heard in list(self._known.items()):
            if now - heard > DEAF_SECONDS and not self._worker.serving:
                self._left(connection)
        if now - since > LEAVE_SECONDS:
            self._log.warning("requests did not end within %.0f s; leaving all the same", LEAVE_SECONDS)
            self.over = True

    def _left(self, connection: Connection) -> None:
        """This gateway has nothing of ours any more; when none has, this worker may end."""
        self._known.pop(connection, None)
        self.over = self.over or not self._known
