"""How answers come from an arm to the router: a Serve call for each, and a connection of their own for what the arm says.

The call through Serve's handle brings the request and reports the end, so Serve picks the replica, counts it, cancels it and tells of its death
as ever. An event through the handle would cost about as much as a call, and an answer waits there for the end of its call. Both go ahead on a
connection that each replica opens to the router and keeps: the router's secret, then msgpack arrays `[ticket, item]`. Such a connection can
only add items to calls of that router. It has TLS where Ray's own connections have it.
"""

import asyncio
import hmac
import itertools
import logging
import os
import secrets
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import msgpack

from components.serving.upstream import ArmFailed

log = logging.getLogger("ray.serve")

SECRET_BYTES = 32

Item = dict[str, Any] | str
"""An answer that is no stream, or an arm's error; or one event of a stream."""


@dataclass(frozen=True)
class ReplyTo:
    """Where an arm sends the items of one call."""

    host: str
    port: int
    secret: bytes
    ticket: int


@dataclass(frozen=True)
class Delivered:
    """How a call ended."""

    num_items: int
    """Sent ahead on the connection."""
    failure: str | None = None
    """Kind of the exception that ended it; its words may hold a text."""


class Reply(Protocol):
    """A running Serve call."""

    def __await__(self) -> Any: ...

    def cancel(self) -> Any: ...


class Delivering:
    """An arm's side: for deployments that have `answer`."""

    def answer(self, route: str, body: dict[str, Any]) -> AsyncIterator[Item]:
        """One dict (an answer that is no stream, or an error), or the events of a stream."""
        raise NotImplementedError

    async def deliver(self, route: str, body: dict[str, Any], reply_to: ReplyTo) -> Delivered:
        """Answers a request of the router."""
        num_items = 0
        try:
            async with aclosing(self.answer(route, body)) as items:  # type: ignore[type-var]  # it is a generator
                async for item in items:
                    await self._outbox.send(reply_to, item)
                    num_items += 1
        except Exception as error:  # as a value: raised, it could overtake the items before it
            log.exception("an answer broke off")
            return Delivered(num_items, failure=type(error).__name__)
        return Delivered(num_items)

    @cached_property
    def _outbox(self) -> "Outbox":
        return Outbox()


class Outbox:
    """A replica's connections, one a router."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int, bytes], _Line] = {}
        self._opening = asyncio.Lock()

    async def send(self, reply_to: ReplyTo, item: Item) -> None:
        """Raises OSError when the router cannot be reached any more."""
        key = (reply_to.host, reply_to.port, reply_to.secret)
        line = self._lines.get(key)
        if line is None or line.is_lost:
            line = await self._open(*key)
        await line.write(msgpack.packb((reply_to.ticket, item)))

    async def _open(self, host: str, port: int, secret: bytes) -> "_Line":
        async with self._opening:
            self._lines = {key: line for key, line in self._lines.items() if not line.is_lost}
            if (host, port, secret) not in self._lines:
                loop = asyncio.get_running_loop()
                _, line = await loop.create_connection(_Line, host, port, ssl=_tls(ssl.Purpose.SERVER_AUTH))
                await line.write(secret)
                self._lines[host, port, secret] = line
            return self._lines[host, port, secret]


class _Line(asyncio.Protocol):
    """Written as fast as the other side reads."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self.is_lost = False
        self._flows = asyncio.Event()
        self._flows.set()

    async def write(self, data: bytes) -> None:
        await self._flows.wait()
        if self.is_lost:
            raise ConnectionError("the router has closed the connection")
        self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._flows.set()

    def pause_writing(self) -> None:
        self._flows.clear()

    def resume_writing(self) -> None:
        self._flows.set()


class Inbox:
    """The router's side: listens, and gives every call the items with its ticket."""

    def __init__(self) -> None:
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._calls: dict[int, Delivery] = {}
        self._tickets = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._address = ("", 0)

    async def open(self, host: str) -> None:
        """Listens on a free port of `host`, once."""
        if self._server is None:
            loop, tls = asyncio.get_running_loop(), _tls(ssl.Purpose.CLIENT_AUTH)
            self._server = await loop.create_server(lambda: _Receiver(self), host, 0, ssl=tls)
            self._address = (host, self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def call(self, ask: Callable[[ReplyTo], Reply]) -> "Delivery":
        """Begins a call; `ask` makes it of where its items shall go."""
        ticket = next(self._tickets)
        reply = ask(ReplyTo(*self._address, self.secret, ticket))
        self._calls[ticket] = Delivery(reply, lambda: self._calls.pop(ticket, None))
        return self._calls[ticket]

    def take(self, ticket: int, item: Item) -> None:
        """An item that came; one of a call that is over is nobody's."""
        if ticket in self._calls:
            self._calls[ticket].take(item)


class _Receiver(asyncio.Protocol):
    """One replica's connection to the inbox."""

    _transport: asyncio.Transport

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._secret: bytes | None = b""
        """As far as it has come; None once it was the right one."""
        self._unpacker = msgpack.Unpacker()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._secret is not None:
            self._secret, data = (self._secret + data)[:SECRET_BYTES], (self._secret + data)[SECRET_BYTES:]
            if len(self._secret) < SECRET_BYTES:
                return
            if not hmac.compare_digest(self._secret, self._inbox.secret):
                log.warning("a connection for answers without the router's secret was closed")
                self._transport.abort()
                return
            self._secret = None
        self._unpacker.feed(data)
        for ticket, item in self._unpacker:
            self._inbox.take(ticket, item)


class Delivery:
    """One call's items as they come: an `Upstream`."""

    def __init__(self, reply: Reply, forget: Callable[[], Any]) -> None:
        self._reply, self._forget = reply, forget
        self._items: list[Item] = []
        self._num_come = 0
        self._ended: Delivered | None = None
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._end = asyncio.ensure_future(self._wait(reply))

    def take(self, item: Item) -> None:
        self._items.append(item)
        self._num_come += 1
        self._news.set()
        self._forget_when_complete()

    def __aiter__(self) -> "Delivery":
        return self

    async def __anext__(self) -> list[Item]:
        while not self._items:
            if self._error is not None:
                raise self._error
            if self._ended is not None and self._num_come >= self._ended.num_items:
                if self._ended.failure is not None:
                    raise ArmFailed(self._ended.failure)
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        items, self._items = self._items, []
        return items

    def cancel(self) -> None:
        self._forget()
        self._reply.cancel()

    async def _wait(self, reply: Awaitable[Delivered]) -> None:
        try:
            self._ended = await reply
        except Exception as error:
            self._error = error
            self._forget()
        self._news.set()
        self._forget_when_complete()

    def _forget_when_complete(self) -> None:
        """Nothing more can come; whoever has the answer, or a stream up to its `[DONE]`, does not ask for the end behind it."""
        if self._ended is not None and self._num_come >= self._ended.num_items:
            self._forget()


def _tls(purpose: ssl.Purpose) -> ssl.SSLContext | None:
    """Both sides show a certificate of Ray's authority (`RAY_USE_TLS`), which vouches for nodes, not for names."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
        return None
    context = ssl.create_default_context(purpose, cafile=os.environ["RAY_TLS_CA_CERT"])
    context.load_cert_chain(os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"])
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    return context
