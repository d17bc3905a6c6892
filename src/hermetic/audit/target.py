"""The server under audit: one request goes out, one `Answer` comes back, whatever the server does.

The one thing to know: `send` never raises for what a server does, and never waits longer than the request's bound. What cannot
be audited at all is a `TargetError` when the target is opened, with what to change. Keys go into headers and nowhere else:
they are taken out of everything that comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import os
import random
import secrets
import socket
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from hermetic.audit.address import Address, TargetError, read_address
from hermetic.audit.exchange import Answer, Ask, How, Token
from hermetic.audit.wire import PATHS, Dialect, Reading, body

KEY_VARIABLES = ("HERMETIC_AUDIT_KEY", "HERMETIC_AUDIT_SECOND_KEY")  # read by the command line
MAX_RETRIES = 8  # of one request that is told to slow down
FIRST_WAIT = 0.5  # seconds, doubled each time, where the server does not say how long
MAX_WAIT = 20.0
AFTER_DONE = 1.0  # seconds that a connection may stay open after [DONE] before it is closed from here
SETTLE = 5.0  # seconds that the prefill half of a pair may take longer than the decode half
IDLE = 2.0  # seconds a connection is kept for the next request; uvicorn closes its side after 5
LOOK_BYTES = 2 * 1024**2  # of what a server says of itself
RUNAWAY = 16_384  # tokens beyond those that were asked for, after which nobody waits for an end any more


@dataclass(frozen=True)
class TargetOptions:
    """`api_key`, `second_key`: shown nowhere. `ca`: a PEM file that servers' certificates are checked against.
    `connect`: seconds until a connection counts as impossible. `learning`: seconds that learning the limits should take."""

    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    second_key: str | None = field(default=None, repr=False)
    ca: str | None = None
    connect: float = 10.0
    learning: float = 60.0

    @property
    def keys(self) -> int:
        """How many API keys there are: 0, 1 or 2."""
        return sum(key is not None for key in (self.api_key, self.second_key))


@contextlib.asynccontextmanager
async def open_target(
    urls: Sequence[str],
    options: TargetOptions | None = None,
    slowed: Callable[[float], None] = lambda wait: None,
) -> AsyncIterator[Target]:
    """Connect, and see that this can be audited at all. `slowed` is told how many seconds a request waits that was told to
    slow down. Raises TargetError."""
    options = options or TargetOptions()
    address, keys = read_address(urls), _keys(options)
    async with _client(address, options) as client:
        target = Target(address, options, keys, client, slowed)
        await target.connect()
        yield target


def _client(address: Address, options: TargetOptions) -> httpx.AsyncClient:
    """What all requests go through. Raises TargetError for certificates or proxies that cannot be used."""
    trust = _trust(options.ca)
    try:
        return httpx.AsyncClient(
            verify=trust,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=IDLE),
            timeout=httpx.Timeout(None, connect=options.connect),
            headers={"accept-encoding": "identity", "user-agent": "hermetic-audit"},
            trust_env=not all(
                map(_is_here, address.servers)
            ),  # this host's servers are never asked through a proxy
            mounts=dict.fromkeys(("all://localhost", "all://127.0.0.1", "all://[::1]")),
        )
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise TargetError(
            f"the environment names a proxy that the audit cannot use ({error}): correct {_proxies() or 'NO_PROXY'}, or unset it"
        ) from None


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def _proxies() -> str:
    """The variables that name proxies, by name alone: their values may hold passwords."""
    names = (f"{scheme}_proxy" for scheme in ("http", "https", "all"))
    return ", ".join(
        sorted({found for name in names for found in (name, name.upper()) if os.environ.get(found)})
    )


def _keys(options: TargetOptions) -> tuple[str, ...]:
    if options.second_key is not None and options.api_key is None:
        raise TargetError("--second-key without --api-key: give both, of two different tenants")
    keys = tuple(key for key in (options.api_key, options.second_key) if key is not None)
    for key, name in zip(keys, ("--api-key", "--second-key"), strict=False):
        if not key or not key.isascii() or not key.isprintable() or key != key.strip():
            raise TargetError(
                f"{name} is empty or has a character that no HTTP header can carry: check how it was copied"
            )
    if len(keys) == 2 and keys[0] == keys[1]:
        raise TargetError("--second-key is the same as --api-key: it has to be another tenant's")
    return keys


def _trust(ca: str | None) -> ssl.SSLContext:
    """What vouches for servers: `ca`, else what the environment or this host says. Raises TargetError."""
    if ca is None:
        try:
            return httpx.create_ssl_context()
        except OSError as error:
            raise TargetError(
                "the environment names certificates that cannot be read "
                f"({error}): correct SSL_CERT_FILE, SSL_CERT_DIR and SSLKEYLOGFILE, or unset them"
            ) from None
    try:
        return ssl.create_default_context(cafile=ca)
    except FileNotFoundError:
        raise TargetError(f"--ca {ca}: there is no such file") from None
    except (ssl.SSLError, OSError) as error:
        raise TargetError(f"--ca {ca}: holds no certificate in PEM form ({error})") from None


class Page(msgspec.Struct, frozen=True):
    """What a GET brought."""

    status: int
    headers: dict[str, str]
    body: bytes

    def value(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is none."""
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}


@dataclass
class _Seen:
    """One attempt: its answer, how long the server says to wait, and vLLM's transfer parameters."""

    answer: Answer
    wait: float | None = None
    transfer: dict[str, Any] | None = None


class Target:
    """`models`: what the server lists (empty: it has no list). `entry`: what it lists of the model, as it is."""

    def __init__(
        self,
        address: Address,
        options: TargetOptions,
        keys: tuple[str, ...],
        client: httpx.AsyncClient,
        slowed: Callable[[float], None],
    ) -> None:
        self.address, self.dialect = address, Dialect()
        self.model, self.models, self.entry = options.model or "", tuple[str, ...](), dict[str, Any]()
        self.keys = len(keys)
        self._options, self._secrets, self._client, self._slowed = options, keys, client, slowed
        self._bases: list[str] = []  # of the OpenAI paths, by server
        self._roots: list[str] = []
        self._began = time.monotonic()
        self._number = 0
        self._random = random.SystemRandom()

    @property
    def name(self) -> str:
        """For people: the address, without any key."""
        return self.address.name

    @property
    def places(self) -> int:
        """How many servers each answer independently: 1, but for several URLs."""
        return len(self.address.servers) if self.address.kind == "several" else 1

    # ------------------------------------------------------------------------ opening

    async def connect(self) -> None:
        """Find the OpenAI paths and the model on every server. Raises TargetError."""
        for place, server in enumerate(self.address.servers):
            try:
                page, base = await self._list(server)
                self._bases.append(base)
                self._roots.append(base.removesuffix("/v1"))
                self._choose(server, _entries(page, server) if page is not None else None)
            except TargetError as error:
                half = f"the pair's {('prefill', 'decode')[place]} half: " if self.address.pair else ""
                raise TargetError(
                    half + self._hide(str(error))
                ) from None  # servers repeat what they were sent

    async def _list(self, server: str) -> tuple[Page | None, str]:
        """The model list, and where it was. None if there is none, which only matters where no model was named."""
        bases = [server] if server.endswith("/v1") else [f"{server}/v1", server]
        for base in bases:
            page = await self._get(f"{base}/models", self._options.connect)
            if page.status == 429:
                said = _retry_after(page.headers.get("retry-after")) or FIRST_WAIT
                await self._hold(min(self._options.connect, said))
                page = await self._get(f"{base}/models", self._options.connect)
            self._admit(page, f"{base}/models")
            if page.status == 200 and page.value().get("data") is not None:
                return page, base
            if page.status == 200:
                raise TargetError(
                    f"{base}/models answers, but not as an OpenAI-compatible server does; what came: {_glimpse(page)}"
                )
            if page.status not in (404, 405, 501):
                raise TargetError(
                    f"{base}/models answers with status {page.status}: {_glimpse(page)}{_later(page)}{self._between(server)}"
                )
        if self.model:
            return None, bases[0]
        raise TargetError(
            f"{server} has no OpenAI-compatible model list ({bases[0]}/models: status {page.status}, "
            f"{_glimpse(page)}); check the URL, or name the model with --model"
        )

    def _between(self, url: str) -> str:
        """What to add where it may have been a proxy that answered, or did not."""
        if _is_here(url) or not (names := _proxies()):
            return ""
        return f"; {names} names a proxy, which may be the cause: unset it, or add the host to NO_PROXY"

    def _admit(self, page: Page, url: str) -> None:
        if page.status in (401, 403):
            raise TargetError(self.rejected(0, page.status))
        if 300 <= page.status < 400:
            there = page.headers.get("location", "elsewhere")
            raise TargetError(f"{url} sends to {there}: give that server's URL instead")
        if page.status == 429:
            raise TargetError(
                f"{url} tells the audit to slow down (status 429): wait, or ask for a higher limit"
            )

    def rejected(self, key: int, status: int) -> str:
        """What to say about a key that the server does not take."""
        option = ("--api-key", "--second-key")[key]
        if key >= self.keys:
            return f"{self.name} wants an API key (status {status}): give one with {option} or {KEY_VARIABLES[key]}"
        return f"{self.name} does not take the key of {option} (status {status}): check it"

    def _choose(self, server: str, entries: list[dict[str, Any]] | None) -> None:
        if entries is None:
            return
        names = tuple(entry["id"] for entry in entries)
        if not self.model:
            if not names:
                raise TargetError(f"{server} serves no model now; is it still loading?")
            self.model = names[0]
        elif self.model not in names and f"{self.model}:latest" in names:  # Ollama's tags
            self.model = f"{self.model}:latest"
        if self.model not in names:
            listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
            raise TargetError(f"{server} has no model {self.model!r}; it has: {listed or 'none'} (--model)")
        self.models = self.models or names
        self.entry = self.entry or next(entry for entry in entries if entry["id"] == self.model)

    async def _get(self, url: str, within: float) -> Page:
        """Raises TargetError with the reason if nothing readable comes."""
        try:
            async with asyncio.timeout(within):
                limits = httpx.Timeout(None, connect=0.9 * within)  # so that it is told from no answer
                async with self._client.stream(
                    "GET", url, headers=self._headers(0), timeout=limits
                ) as response:
                    if packed := _packed(response):
                        raise TargetError(f"{url} {packed}: switch that off for what asks for `identity`")
                    data = bytearray()
                    async for chunk in response.aiter_bytes():
                        data += chunk[: LOOK_BYTES - len(data)]
                        if len(data) >= LOOK_BYTES:
                            break
                    return Page(response.status_code, dict(response.headers), bytes(data))
        except TimeoutError:
            raise TargetError(
                f"{url} took the connection and did not answer within {within:g} s; is it still loading?"
            ) from None
        except httpx.HTTPError as error:
            raise TargetError(_unusable(url, error, self._options.ca) + self._between(url)) from None

    async def look(self, path: str, place: int = 0, within: float = 5.0) -> Page | None:
        """What the server says at `path`, counted from its root; None if nothing came. For hints, never for proof."""
        try:
            return await self._get(f"{self._roots[place]}{path}", within)
        except TargetError:
            return None

    # ------------------------------------------------------------------------ asking

    async def send(self, ask: Ask, *, place: int | None = None, settle: float | None = None) -> Answer:
        """Send one request and wait for its end, `ask.within` seconds at most. Told to slow down, it waits and asks again.

        `place`: which server, where there are several (else the tenant's name decides). `settle`: seconds that a pair's
        decode half is waited for once its prefill half has refused; None: as long as for any answer."""
        self._number += 1
        number, retries = self._number, 0
        deadline = time.monotonic() + ask.within
        while True:
            seen = await self._attempt(ask, number, deadline, place, settle)
            if seen.wait is None:
                if retries and seen.answer.how == "silent" and seen.answer.seconds < ask.within / 2:
                    seen.answer.how = "limited"  # its time went by with waiting, as the server asked
                break
            wait = self._wait(seen.wait, retries)
            if retries >= MAX_RETRIES or time.monotonic() + wait >= deadline:
                seen.answer.how = "limited"
                break
            await self._hold(wait)
            retries += 1
        seen.answer.retries += retries
        return self._clean(seen.answer)

    async def _hold(self, wait: float) -> None:
        self._slowed(wait)
        await asyncio.sleep(wait)

    def _wait(self, said: float, retries: int) -> float:
        """Seconds until the next try: never less than the server says, and not all at the same moment."""
        least = said or min(MAX_WAIT, FIRST_WAIT * 2**retries)
        return least * (1 + 0.5 * self._random.random())

    async def _attempt(
        self, ask: Ask, number: int, deadline: float, place: int | None, settle: float | None
    ) -> _Seen:
        if self.address.kind == "sglang-pd":
            return await self._sglang(ask, number, deadline, settle)
        if self.address.kind == "vllm-pd":
            return await self._vllm(ask, number, deadline)
        if place is None:
            place = zlib.crc32(ask.tenant.encode()) % self.places
        return await self._once(place, ask, body(ask, self.model, self.dialect), number, deadline)

    async def _sglang(self, ask: Ask, number: int, deadline: float, settle: float | None) -> _Seen:
        """The same body to both halves at once, which find each other by the room."""
        began = time.monotonic()
        room = {
            "bootstrap_host": self.address.bootstrap_host,
            "bootstrap_port": self.address.bootstrap_port,
            "bootstrap_room": secrets.randbits(63),
        }
        payload = body(ask, self.model, self.dialect, room)
        early = msgspec.structs.replace(ask, leave_tokens=None)  # its one token is not what the client reads
        halves = [
            asyncio.create_task(self._once(place, half, payload, number, deadline))
            for place, half in enumerate((early, ask))
        ]
        prefill, decode = halves
        try:
            await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                first = prefill.result()
                patience = None if first.answer.how == "answered" else settle
                if first.wait is not None:
                    patience = 0.0  # it is asked again, in another room
                await asyncio.wait([decode], timeout=patience)
            if not prefill.done() and decode.done() and decode.result().answer.how != "left":
                await asyncio.wait([prefill], timeout=max(0.0, min(SETTLE, deadline - time.monotonic())))
        finally:
            for half in halves:
                half.cancel()
            results = await asyncio.gather(*halves, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        before = results[0] if isinstance(results[0], _Seen) else None
        after = results[1] if isinstance(results[1], _Seen) else None
        if after is None:
            left = Answer(
                ask=ask, number=number, sent=began - self._began, how="silent", seconds=time.monotonic() - began,
                error="the prefill half had ended, and this one was not waited for",
            )  # fmt: skip
            after = _Seen(left)
        after.answer.prefill = before.answer if before is not None else None
        after.wait = after.wait if after.wait is not None or before is None else before.wait
        return after

    async def _vllm(self, ask: Ask, number: int, deadline: float) -> _Seen:
        """Prefill computes one token and says where its pages are; decode is told. What prefill refuses, is refused."""
        began = time.monotonic()
        params = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
            "remote_host": None, "remote_port": None,
        }  # fmt: skip
        extra = {k: v for k, v in ask.extra.items() if k not in ("stream", "stream_options", "min_tokens")}
        limits = {name: 1 for name in ("max_tokens", "max_completion_tokens") if name in extra}
        first = msgspec.structs.replace(
            ask,
            stream=False,
            max_tokens=1,
            leave_tokens=None,
            extra={"kv_transfer_params": params, **extra, **limits},
        )
        before = await self._once(0, first, body(first, self.model, self.dialect), number, deadline)
        if before.answer.how != "answered":
            prefill = msgspec.structs.replace(before.answer)
            before.answer.prefill, before.answer.ask = prefill, ask
            return before
        more = {"kv_transfer_params": before.transfer} if before.transfer else {}
        payload = body(ask, self.model, self.dialect, more)
        after = await self._once(1, ask, payload, number, deadline, began)
        after.answer.prefill = before.answer
        return after

    async def _once(
        self, place: int, ask: Ask, payload: bytes, number: int, deadline: float, began: float | None = None
    ) -> _Seen:
        """One POST. `began`: what its times count from, if not from when it was sent."""
        call = _Call(began if began is not None else time.monotonic(), began is None)
        answer = Answer(ask=ask, number=number, sent=call.zero - self._began, how="silent")
        root = self._roots if ask.endpoint == "generate" else self._bases
        request = self._client.build_request(
            "POST", root[place] + PATHS[ask.endpoint], content=payload, headers=self._headers(ask.key, ask),
            extensions={"trace": call.trace},
        )  # fmt: skip
        while True:
            again = await self._converse(request, ask, call, answer, deadline)
            if not again:
                break
            answer.retries += 1
        answer.sent, answer.seconds = call.zero - self._began, call.elapsed()
        answer.server = self.address.servers[place] if self.places > 1 else ""
        if call.reading is None:
            return _Seen(answer)
        reading = call.reading
        reading.into(answer)
        answer.server_id = answer.server_id or call.headers.get("x-request-id", "")
        if reading.ended or answer.how not in ("silent", "left"):
            answer.seconds = max(reading.last, answer.first or 0.0) or answer.seconds
        return _Seen(answer, self._limited(reading, call.headers), reading.transfer)

    async def _converse(
        self, request: httpx.Request, ask: Ask, call: _Call, answer: Answer, deadline: float
    ) -> bool:
        """Send it and read until the end. True: a kept connection had been closed by the server meanwhile; ask again."""
        call.fresh = False
        try:
            async with asyncio.timeout(deadline - time.monotonic()) as scope:
                call.scope, call.leave = scope, ask.leave_seconds
                response = await self._client.send(request, stream=True)
                try:
                    await self._read(response, ask, call)
                finally:
                    await response.aclose()
        except TimeoutError:
            answer.how = "left" if call.armed else "silent"
            if call.reading is not None and call.reading.ended:
                answer.how = call.reading.how()
            return False
        except httpx.LocalProtocolError as error:
            raise ValueError(f"this request cannot be sent: {error}") from error
        except httpx.HTTPError as error:
            if (
                call.reading is None
                and not call.fresh
                and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError)
            ):
                return True
            answer.how, answer.error = _broken(error, call.reading), _reason(error)
            if call.reading is not None and not call.reading.error:
                call.reading.error = answer.error
            return False
        assert call.reading is not None
        answer.how = "left" if call.leaving else call.reading.how()
        return False

    async def _read(self, response: httpx.Response, ask: Ask, call: _Call) -> None:
        call.headers = dict(response.headers)
        reading = Reading(ask.endpoint, response.status_code, response.headers.get("content-type", ""))
        call.reading = reading
        if ask.leave_tokens == 0:
            call.leaving = True
            return
        if response.has_redirect_location:
            reading.garbled = f"the server sends to {call.headers['location']}: give that URL instead"
        if packed := _packed(response):
            reading.garbled = f"the server {packed}"
        if reading.garbled:
            return
        async for chunk in response.aiter_bytes():
            ended = reading.ended
            reading.feed(chunk, call.elapsed())
            if reading.garbled:
                return
            if reading.ended and not ended:
                call.shorten(AFTER_DONE)
            if len(reading.tokens) > ask.max_tokens + RUNAWAY:
                reading.garbled = f"the answer did not end after {len(reading.tokens)} tokens, where {ask.max_tokens} were asked for"
                return
            enough = ask.leave_tokens is not None and len(reading.tokens) >= ask.leave_tokens
            if enough and not reading.finished:
                call.leaving = True
                return
        reading.end(call.elapsed())

    def _limited(self, reading: Reading, headers: Mapping[str, str]) -> float | None:
        """Seconds that the server says to wait (0.0: it does not say); None if it does not ask for patience."""
        said = _retry_after(headers.get("retry-after"))
        if reading.how() == "limited":
            return said or 0.0
        return said if reading.status == 503 else None

    def _headers(self, key: int, ask: Ask | None = None) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self._secrets:
            if key >= len(self._secrets):
                raise ValueError(f"there is no key {key}: {len(self._secrets)} were given")
            headers["authorization"] = f"Bearer {self._secrets[key]}"
        if ask is not None:
            headers["content-type"] = "application/json"
            if ask.request_id:
                headers["x-request-id"] = ask.request_id
            headers |= {name.lower(): value for name, value in ask.headers.items()}
        return headers

    # ------------------------------------------------------------------------ keys and times

    def _since(self) -> float:
        return time.monotonic() - self._began

    def _hide(self, text: str, least: int = 4) -> str:
        """`text` without the keys of at least so many characters: shorter ones are ordinary words, and no secret."""
        for secret in self._secrets:
            for form in (secret, json.dumps(secret)[1:-1]):
                text = text.replace(form, "[key]") if len(secret) >= least else text
        return text

    def _clean(self, answer: Answer) -> Answer:
        """Take the keys out of what came: some servers repeat them in errors."""
        if not self._secrets:
            return answer
        answer.error, answer.excerpt = self._hide(answer.error), self._hide(answer.excerpt)
        answer.server_id = self._hide(answer.server_id)
        if (text := self._hide(answer.text, least=8)) != answer.text:
            answer.text, answer.tokens = text, [Token(text, answer.first or answer.seconds)]
        if answer.prefill is not None:
            self._clean(answer.prefill)
        return answer


class _Call:
    """What is known of a POST while it is under way. `zero`: when it was sent, on the monotonic clock."""

    def __init__(self, zero: float, own: bool) -> None:
        self.zero, self._own = zero, own
        self.scope: asyncio.Timeout | None = None
        self.leave: float | None = None  # seconds after which to hang up
        self.armed = False  # it hangs up after `leave`
        self.leaving = False  # it hangs up now
        self.fresh = False  # the connection is new
        self.reading: Reading | None = None
        self.headers: dict[str, str] = {}

    def elapsed(self) -> float:
        return time.monotonic() - self.zero

    async def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Told by httpx how far the request is."""
        if event == "connection.connect_tcp.started":
            self.fresh = True
        elif event.endswith("send_request_headers.started") and self._own:
            self.zero = time.monotonic()
        elif event.endswith("send_request_body.complete") and self.leave is not None:
            self.armed = self.shorten(self.leave)

    def shorten(self, seconds: float) -> bool:
        """End in so many seconds, if that is before the bound."""
        if self.scope is None or self.scope.expired():
            return False
        when, bound = asyncio.get_running_loop().time() + seconds, self.scope.when()
        if bound is not None and when < bound:
            self.scope.reschedule(when)
            return True
        return False


# ------------------------------------------------------------------------------------ small readers


def _packed(response: httpx.Response) -> str:
    """Why a body is not unpacked; empty if it can be. Only what deflate alone can blow up, a thousandfold, is: packed twice,
    or by brotli or zstd, a few kilobytes may become all the memory that there is."""
    packed = response.headers.get("content-encoding", "identity").strip().lower()
    return "" if packed in ("", "identity", "gzip", "deflate") else f"packs what it sends ({packed[:80]})"


def _entries(page: Page, server: str) -> list[dict[str, Any]]:
    """The model list, which the audit needs only for its names. Raises TargetError."""
    data = page.value().get("data")
    if isinstance(data, list) and all(
        isinstance(one, dict) and isinstance(one.get("id"), str) for one in data
    ):
        return data
    raise TargetError(f"{server} lists its models in another form than OpenAI's; what came: {_glimpse(page)}")


def _glimpse(page: Page) -> str:
    text = " ".join(page.body[:400].decode(errors="replace").split())
    return repr(text[:100] + ("..." if len(text) > 100 else "")) if text else "nothing"


def _later(page: Page) -> str:
    """What to look at where a server, or what stands before it, says that it cannot serve now."""
    later = page.status in (502, 503, 504)
    return "; is the server behind this URL up, and has it loaded its model?" if later else ""


def _retry_after(value: str | None) -> float | None:
    """RFC 9110, 10.2.3: seconds, or a date. None if there is neither."""
    if value is None:
        return None
    if value.strip().isascii() and value.strip().isdigit():
        return min(float(value), 86_400.0)  # float, for int refuses what has thousands of digits
    try:
        when = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, when - time.time())


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else None
        error = inner or error.__cause__ or error.__context__
    return found


def _reason(error: BaseException) -> str:
    """The innermost words: httpx wraps what the system said, and asyncio words it in its own way."""
    for cause in reversed(_causes(error)):
        if isinstance(cause, OSError) and cause.strerror:
            if cause.errno is None or isinstance(cause, socket.gaierror | ssl.SSLError):
                return cause.strerror
            return os.strerror(cause.errno)
    return str(error) or type(error).__name__


def _broken(error: httpx.HTTPError, reading: Reading | None) -> How:
    """A connection that failed: not made, ended too early, or no HTTP at all."""
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.ProxyError):
        return "unreachable"
    if reading is not None and reading.ended:
        return reading.how()
    cut = "closed connection" in str(error) or "disconnected" in str(error)
    if isinstance(error, httpx.DecodingError) or (isinstance(error, httpx.RemoteProtocolError) and not cut):
        return "garbled"
    return "cut"


def _unusable(url: str, error: httpx.HTTPError, ca: str | None) -> str:
    """Why there is no talking to a server, and what to change."""
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            why = cause.verify_message or str(cause)
            if "mismatch" in why.lower() or "not valid for" in why.lower():
                return f"{url}: the certificate is for another name ({why}): use the name that is in it"
            known = (
                f"the certificates in {ca} do not vouch for it"
                if ca
                else "if it is your own, give it with --ca FILE"
            )
            return f"{url}: the server's certificate does not verify ({why}): {known}"
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return f"{url} does not speak TLS ({_reason(error)}): write http:// if it is a plain server"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return (
            f"no connection to {url} ({_reason(error)}): is the server running, and are host and port right?"
        )
    if "closed connection" in str(error):
        return f"{url} closes the connection before its answer is over ({_reason(error)}): look at its log"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        return (
            f"{url} does not answer in HTTP ({_reason(error)}): check the port, and whether it wants https://"
        )
    return f"{url}: {_reason(error)}"


__all__ = ["KEY_VARIABLES", "Page", "Target", "TargetError", "TargetOptions", "open_target"]
