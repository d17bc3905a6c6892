"""Why a node that was asked gave nothing, in one line that says what to do.

The one thing to know: a line says what was seen. Whether a port speaks TLS is tried, not guessed from an error's text.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urljoin, urlsplit

import httpx

from hermetic.check.urls import shown_url

NO_ROUTE = (404, 405, 501)
_TITLE = re.compile(rb"<title[^>]*>\s*([^<]{1,80})", re.IGNORECASE)
_OTHER_HOST, _NOT_NOW = (
    (62, 64),
    (9, 10),
)  # X509_V_ERR_ of OpenSSL: host or IP mismatch; not yet valid, expired
_NOT_HERE = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


@dataclass(frozen=True)
class Page:
    """An answer. `location`: where it sends instead."""

    status: int
    body: bytes
    location: str = ""

    @property
    def is_html(self) -> bool:
        start = self.body[:1000].lower()
        return b"<html" in start or b"<!doctype html" in start

    @property
    def title(self) -> str:
        """Of a page in HTML, in brackets, with a blank before; empty where it has none."""
        found = _TITLE.search(self.body[:4096])
        return f" ({found[1].decode('utf-8', 'replace').strip()!r})" if found else ""


# ------------------------------------------------------------------------------------ errors


def error(url: str, told: httpx.HTTPError) -> str:
    """Of a request that got no answer."""
    host = urlsplit(url).hostname or ""
    for cause in _causes(told):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _certificate(cause)
        if isinstance(cause, socket.gaierror):
            gone = (
                "is not known here" if cause.errno in _NOT_HERE else f"cannot be looked up ({cause.strerror})"
            )
            return f"the host {host} {gone}"
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there (connection refused): is it up, and is this its port?"
    if isinstance(told, httpx.RemoteProtocolError | httpx.ReadError):
        return f"closes the connection without an answer in HTTP ({_said(told)})"
    return _said(told)


def _certificate(cause: ssl.SSLCertVerificationError) -> str:
    said = cause.verify_message.rstrip(".")
    if cause.verify_code in _OTHER_HOST:
        return f"its certificate is of another host ({said}): use the name that stands in it"
    if cause.verify_code in _NOT_NOW:
        return f"its certificate is not good at this time ({said}): renew it, or look at this machine's clock"
    return f"its certificate is not trusted here ({said}): --ca FILE names the one that vouches for it"


def _said(told: BaseException) -> str:
    """Its own words, or those of what caused it."""
    return next((str(one) for one in _causes(told) if str(one)), type(told).__name__)


def _causes(told: BaseException | None) -> Iterator[BaseException]:
    while told is not None:
        yield told
        if isinstance(told, BaseExceptionGroup):
            for one in told.exceptions:
                yield from _causes(one)
        told = told.__cause__ or told.__context__


async def other_scheme(url: str, failed: str | None, pages: Mapping[str, Page]) -> str | None:
    """What to say where the port speaks TLS and the URL says http, or the other way round; None where it does not."""
    parts, shown = urlsplit(url), urlsplit(shown_url(url)).netloc
    host, plain = parts.hostname or "", parts.scheme == "http"
    if plain and all(page.status == HTTPStatus.BAD_REQUEST for page in pages.values()):
        if await _speaks_tls(host, parts.port or 80):
            return f"speaks TLS, not plain HTTP: use https://{shown}"
        return None
    if plain or pages or failed is None:
        return None
    return (
        f"speaks plain HTTP, not TLS: use http://{shown}"
        if await _speaks_http(host, parts.port or 443)
        else None
    )


async def _speaks_tls(host: str, port: int) -> bool:
    """Whether a handshake goes through; whose certificate it is does not matter for that, and nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # without the authorities, which take long to load
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except OSError:
        return False
    writer.close()
    return True


async def _speaks_http(host: str, port: int) -> bool:
    """Whether a request without a key is answered in HTTP. A server with TLS may answer one with 400, to say so."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(f"GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        line = await reader.read(12)
    except OSError:
        return False
    writer.close()
    return line.startswith(b"HTTP/") and not line.endswith(b" 400")


# ------------------------------------------------------------------------------------ answers of something else


def nothing(pages: Mapping[str, Page], key: bool) -> str:
    """Of a server that answers, with nothing that an engine would say. `key`: whether one was sent."""
    statuses = {page.status for page in pages.values()}
    if statuses & {401, 403}:
        return wants_key(statuses, key)
    where = sorted(
        {place for page in pages.values() if 300 <= page.status < 400 and (place := page.location)}
    )
    if where:
        return f"sends elsewhere, to {where[0]}: name the URL at which the node itself answers"
    if statuses <= set(NO_ROUTE):
        return f"has none of the paths of an engine ({_listed(pages)}): is this the node's port, and is its URL without a path?"
    if statuses and min(statuses) >= 500:
        said = " or ".join(f"{status} {_phrase(status)}".strip() for status in sorted(statuses))
        return f"answers {said} to everything: is the node up, or the one that this address hands on to?"
    html = [page for page in pages.values() if page.is_html and page.status == HTTPStatus.OK]
    if html:
        return f"answers with HTML{html[0].title}, not with what an engine says: is this the node's port?"
    return f"says nothing that this check knows how to read ({_listed(pages)}): is it a node of SGLang, vLLM or Hermetic?"


def wants_key(statuses: set[int], key: bool) -> str:
    """401, or 403: a node says the one or the other for a key that is missing or wrong; a proxy, 403 for an address."""
    if key:
        return f"does not take this API key (status {_some(statuses)}): --api-key, or HERMETIC_CHECK_KEY"
    return f"wants an API key (status {_some(statuses)}): give it in HERMETIC_CHECK_KEY, or with --api-key"


def _some(statuses: set[int]) -> str:
    return " and ".join(str(status) for status in sorted(statuses & {401, 403}))


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def _listed(pages: Mapping[str, Page]) -> str:
    """`/metrics 200, /version 404`; by status, where there are few of them."""
    by_status: dict[int, list[str]] = {}
    for path, page in sorted(pages.items()):
        by_status.setdefault(page.status, []).append(path)
    if len(by_status) == 1 and len(pages) > 1:
        (status,) = by_status
        return f"{status} to all of {', '.join(by_status[status])}"
    return ", ".join(f"{path} {page.status}" for path, page in sorted(pages.items()))


def location(url: str, header: str) -> str:
    """Where a redirect leads, in full, without a query or a user; empty for what cannot be read."""
    try:
        return shown_url(urljoin(url, header))[:200] if header else ""
    except ValueError:
        return ""


__all__ = ["NO_ROUTE", "Page", "error", "location", "nothing", "other_scheme", "wants_key"]
