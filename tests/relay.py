"""A TCP relay in front of a real server, which takes it away at a chosen request: before the server hears it, or before its reply arrives."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

BLOCK_BYTES = 1 << 16


@dataclass
class Relay:
    """`trip` looks at each request's bytes so far; when it says so, the way to the server breaks (`heard`: after the server has answered)."""

    server_port: int
    port: int
    trip: Callable[[bytes], bool] = lambda request: False
    heard: bool = False
    stays_up: bool = False
    """Lose that one reply only."""
    down: bool = False
    tripped: bool = False
    _open: list[socket.socket] = field(default_factory=list, init=False)
    _listener: socket.socket | None = field(default=None, init=False)

    def start(self) -> None:
        """Begins, or begins again, to listen."""
        self.down = self.tripped = False
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def stop(self) -> None:
        """As if the server had gone: connections break, and nobody listens."""
        self.down = True
        for sock in [*self._open, *([self._listener] if self._listener else [])]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._open.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server_port))
                self._open += [client, server]
                pair = _Pair(self, client, server)
                threading.Thread(target=pair.forward, daemon=True).start()
                threading.Thread(target=pair.reply, daemon=True).start()


@dataclass
class _Pair:
    relay: Relay
    client: socket.socket
    server: socket.socket
    request: bytes = b""
    losing: bool = False

    def forward(self) -> None:
        with suppress(OSError):
            while data := self.client.recv(BLOCK_BYTES):
                self.request += data
                if not self.relay.tripped and self.relay.trip(self.request):
                    self.relay.tripped = True
                    if not self.relay.heard:
                        self.relay.stop()
                        return
                    self.losing = True
                self.server.sendall(data)
        self._close()

    def reply(self) -> None:
        with suppress(OSError):
            while data := self.server.recv(BLOCK_BYTES):
                if self.losing and not data.startswith(b"HTTP/1.1 100"):
                    if not self.relay.stays_up:
                        self.relay.stop()
                    break
                self.request = b""
                self.client.sendall(data)
        self._close()

    def _close(self) -> None:
        for sock in (self.client, self.server):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextmanager
def relay_to(server_port: int, port: int) -> Iterator[Relay]:
    """A relay that listens on `port` until the block ends."""
    relay = Relay(server_port, port)
    relay.start()
    try:
        yield relay
    finally:
        relay.stop()
