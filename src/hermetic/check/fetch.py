"""What live nodes say of themselves, asked of all at once.

The one thing to know: a node has `timeout` seconds for everything that it is asked. One that hangs, or sends without end, costs those seconds
and is reported as not read; the others do not wait for it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from hermetic.check import facts, hosts, unanswered
from hermetic.check.facts import Seen, Sheet
from hermetic.check.readers import engine_files
from hermetic.check.readers.reading import Reading
from hermetic.check.unanswered import NO_ROUTE, Page
from hermetic.check.urls import address, shown_url
from hermetic.options import OptionError

PATHS = ("/server_info", "/v1/models", "/v1/loads", "/metrics", "/version", "/model_info")
OLDER = {"/server_info": "/get_server_info", "/model_info": "/get_model_info"}  # where the first is not known
MAX_BYTES = 16 * 1024**2  # of one answer
SECRET = "***"
_LOCAL_ONLY = b'"metrics_local_only"'  # Hermetic's error to others
_MORE = ", not with what an engine says here"


@dataclass(frozen=True)
class FetchOptions:
    """`timeout`: seconds for one node. `ca`: a PEM file that certificates are checked against. The key is shown nowhere."""

    timeout: float = 4.0
    api_key: str | None = field(default=None, repr=False)
    ca: str | None = None


async def fetch(urls: Sequence[str], options: FetchOptions) -> list[Reading]:
    """One reading for each URL, in their order. Raises OptionError for certificates that cannot be read."""
    trust = _trust(options)
    asked = await asyncio.gather(
        *(_node(url.rstrip("/").removesuffix("/v1"), options, trust) for url in urls)
    )
    return [
        _without(options.api_key, _reading(url.rstrip("/"), node, options))
        for url, node in zip(urls, asked, strict=True)
    ]  # when nobody waits any more


@dataclass
class _Asked:
    """What a node answered, by path; and why not to everything, if so."""

    pages: dict[str, Page] = field(default_factory=dict)
    failed: str | None = None


def _trust(options: FetchOptions) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=options.ca)
    except (OSError, ValueError) as error:
        raise OptionError(f"--ca {options.ca}: {getattr(error, 'strerror', None) or error}") from None


async def _node(root: str, options: FetchOptions, trust: ssl.SSLContext) -> _Asked:
    """A client of its own for each node: a pool of hundreds of connections takes long to look through."""
    asked, headers = _Asked(), {"accept-encoding": "identity", "user-agent": "hermetic-check"}
    try:
        async with (
            asyncio.timeout(options.timeout),
            httpx.AsyncClient(verify=trust, timeout=None, headers=headers, trust_env=False) as client,
        ):
            await asyncio.gather(*(_look(client, root, path, options, asked) for path in PATHS))
            asked.failed = await unanswered.other_scheme(root, asked.failed, asked.pages) or asked.failed
    except TimeoutError:
        what = "everything" if asked.pages else "anything"
        asked.failed = asked.failed or f"did not answer {what} within {options.timeout:g} s (--timeout)"
    except httpx.HTTPError as error:
        asked.failed = _why(root, error, options)
    return asked


def _why(root: str, error: httpx.HTTPError, options: FetchOptions) -> str:
    told = unanswered.error(root, error)
    return told if options.api_key is None else told.replace(options.api_key, SECRET)


def _reading(url: str, asked: _Asked, options: FetchOptions) -> Reading:
    at, url = address(url), shown_url(url)
    root, reading = url.removesuffix("/v1"), Reading()
    sheet = Sheet(name=urlsplit(url).netloc, sources=[url], address=at)
    for path, page in sorted(asked.pages.items()):
        _read(f"{root}{path}", page, sheet, reading)
    if sheet.sources[1:]:
        _metrics_open(sheet)
        sheet.sources = [url]
        reading.sheets = [sheet]
        if (why := _part(asked, options)) is not None:
            reading.failed(url, why, part=True)
        return reading
    # One line: what each path answered is of no use where none is an engine's, unless it says more.
    said = [f"{one.source.removeprefix(root)} {one.why}" for one in reading.unread if _MORE not in one.why]
    reading.unread.clear()
    why = asked.failed or "; ".join(said) or unanswered.nothing(asked.pages, options.api_key is not None)
    return reading.failed(url, why)


def _without(key: str | None, reading: Reading) -> Reading:
    """What was read, without the key: a server may say it again in another way than it was sent (`\\u0073k-1`)."""
    if key is not None:
        for one in reading.unread:
            one.why = one.why.replace(key, SECRET)
        for sheet in reading.sheets:
            for _, seen in sheet.facts():
                seen[:] = [Seen(_hidden(one.value, key), one.where.replace(key, SECRET)) for one in seen]
    return reading


def _hidden(value: object, key: str) -> object:
    return value.replace(key, SECRET) if isinstance(value, str) else value


def _part(asked: _Asked, options: FetchOptions) -> str | None:
    """Why not everything is known of a node that answers."""
    if asked.failed is not None:
        return asked.failed
    local = [path for path, page in asked.pages.items() if _LOCAL_ONLY in page.body]
    refused = {page.status for path, page in asked.pages.items() if path not in local} - {200, *NO_ROUTE}
    if not refused:
        return "answers /metrics to its own host only: check from there, or give what it answers there" if local else None  # fmt: skip
    statuses = ", ".join(f"{path} {page.status}" for path, page in sorted(asked.pages.items()))
    key = unanswered.wants_key(refused, options.api_key is not None) if refused & {401, 403} else ""
    return f"does not answer everything ({statuses}){key and f': it {key}'}"


async def _look(
    client: httpx.AsyncClient, root: str, path: str, options: FetchOptions, asked: _Asked
) -> None:
    """One path that breaks off does not keep the others from being read."""
    try:
        await _page(client, root, path, options, asked.pages)
    except httpx.HTTPError as error:
        where = "" if isinstance(error, httpx.ConnectError) else f"{path}: "
        asked.failed = asked.failed or f"{where}{_why(root, error, options)}"


async def _page(
    client: httpx.AsyncClient, root: str, path: str, options: FetchOptions, pages: dict[str, Page]
) -> None:
    key = options.api_key
    page = await _get(client, root + path, None if path == "/metrics" else key)
    if page.status in NO_ROUTE and path in OLDER:
        path = OLDER[path]
        page = await _get(client, root + path, key)
    if path == "/metrics" and page.status in (401, 403) and key is not None:
        page = await _get(client, root + path, key)
        path = "/metrics (with the key)"
    pages[path] = page


async def _get(client: httpx.AsyncClient, url: str, key: str | None) -> Page:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with client.stream("GET", url, headers=headers) as response:
        body = bytearray()
        # Not unpacked: that was not asked for, and a small answer may unpack to gigabytes.
        async for chunk in response.aiter_raw():
            body += chunk[: MAX_BYTES - len(body)]
            if len(body) >= MAX_BYTES:
                break
        if key is not None:  # a server may say it again
            body = body.replace(key.encode(), SECRET.encode())
        place = unanswered.location(url, response.headers.get("location", ""))
        return Page(response.status_code, bytes(body), place)


def _read(where: str, page: Page, sheet: Sheet, reading: Reading) -> None:
    if page.status != 200:
        return
    metrics = "/metrics" in where
    read = engine_files.read_metrics if metrics else engine_files.read_json
    told = read(where, page.body)
    if told is None:
        looks = "HTML" if page.is_html else "something else"
        reading.failed(where, f"answers with {looks}{_MORE}")
        return
    reading.unread += told.unread
    for one in told.sheets:
        sheet.take(one)
        sheet.sources.append(where)
    if metrics and told.sheets:
        sheet.add(facts.METRICS_OPEN, "(with the key)" not in where, where)


def _metrics_open(sheet: Sheet) -> None:
    """A server that says that /metrics answers its own host alone was asked there, or something passes on to it what others ask."""
    seen = sheet.seen(facts.METRICS_OPEN)
    if len({one.value for one in seen}) < 2 or sheet.address is None:
        return
    said_by_itself = next((one for one in seen if "/metrics" not in one.where), None)
    asked = next((one for one in seen if "/metrics" in one.where), None)
    if said_by_itself is not None and asked is not None:
        right = said_by_itself if hosts.is_loopback(sheet.address[0]) else asked
        sheet.replace(facts.METRICS_OPEN, right.value, right.where)


__all__ = ["FetchOptions", "fetch"]
