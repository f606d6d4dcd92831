"""Events on a connection of their own: in order, complete, for the right call, from those alone who know the secret."""

import asyncio
import ssl
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import msgpack
import pytest
import uvloop
from ray._common.tls_utils import generate_self_signed_tls_certs

from components.serving.delivery import SECRET_BYTES, Delivered, Delivering, Inbox
from components.serving.upstream import ArmFailed

HOST = "127.0.0.1"
SOON_S = 60  # milliseconds on a machine that is not busy
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
"""Serve runs arms in the one and the router in the other."""


@pytest.fixture(params=LOOPS)
def run(request):
    def run(main):
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(main())

    return run


class Arm(Delivering):
    """Gives the items of a request's body; an exception among them is raised."""

    async def answer(self, route, body):
        for item in body["items"]:
            if isinstance(item, Exception):
                raise item
            yield item


class Call:
    """A running call as a Serve handle gives it; its end comes when the test lets it."""

    def __init__(self, work):
        self.task = asyncio.ensure_future(work)

    def __await__(self):
        return self.task.__await__()

    def cancel(self):
        self.task.cancel()


@asynccontextmanager
async def opened():
    inbox = Inbox()
    await inbox.open(HOST)
    try:
        async with asyncio.timeout(SOON_S):
            yield inbox
    finally:
        inbox.close()


def deliver(inbox, arm, *items):
    return inbox.call(lambda reply_to: Call(arm.deliver("chat", {"items": items}, reply_to)))


async def taken(delivery):
    """All items; a failure is the last of them."""
    items = []
    try:
        async for some in delivery:
            items += some
    except ArmFailed as error:
        items.append(str(error))
    return items


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (("a", "b", "ä\n\n"), ["a", "b", "ä\n\n"]),
        (({"choices": []},), [{"choices": []}]),
        ((), []),
        (("a", {"error": {}}), ["a", {"error": {}}]),
        (("a", "b", ValueError("somebody's text")), ["a", "b", "ValueError"]),
        ((ValueError("somebody's text"),), ["ValueError"]),
    ],
)
def test_items_come_as_the_arm_gave_them(run, items, expected):
    async def main():
        async with opened() as inbox:
            assert await taken(deliver(inbox, Arm(), *items)) == expected

    run(main)


def test_a_stream_that_nobody_reads_beyond_its_last_event_is_forgotten(run):
    """The router's relay ends with `[DONE]`; what it would keep of each stream would stay for as long as the router lives."""

    async def main():
        async with opened() as inbox:
            delivery = deliver(inbox, Arm(), "a", "data: [DONE]\n\n")
            items = []
            while items[-1:] != ["data: [DONE]\n\n"]:
                items += await anext(delivery)
            while inbox._calls:
                await asyncio.sleep(0.01)

    run(main)


def test_calls_share_a_connection_and_each_gets_its_own_events(run):
    async def main():
        async with opened() as inbox:
            arm = Arm()
            wanted = [[f"{call}-{i}" for i in range(200)] for call in range(20)]
            found = await asyncio.gather(*(taken(deliver(inbox, arm, *events)) for events in wanted))
            assert found == wanted
            assert len(arm._outbox._lines) == 1

    run(main)


def test_events_are_there_before_the_call_ends_and_those_that_waited_come_at_once(run):
    async def main():
        async with opened() as inbox:
            arm, end = Arm(), asyncio.Event()

            async def work(reply_to):
                for event in "abc":
                    await arm._outbox.send(reply_to, event)
                await end.wait()
                return Delivered(5)

            addresses = []
            delivery = inbox.call(lambda reply_to: addresses.append(reply_to) or Call(work(reply_to)))
            found = []
            while len(found) < 3:
                found += await anext(delivery)
            assert found == ["a", "b", "c"]
            end.set()
            await delivery._end
            late = asyncio.ensure_future(anext(delivery))  # the call has ended, its last event is on the way
            await asyncio.sleep(0.05)
            assert not late.done()
            inbox.take(addresses[0].ticket, "d")
            inbox.take(addresses[0].ticket, "e")
            assert await late == ["d", "e"]
            with pytest.raises(StopAsyncIteration):
                await anext(delivery)

    run(main)


def test_a_call_that_dies_is_a_failure_after_what_came(run):
    async def main():
        async with opened() as inbox:

            async def die():
                raise RuntimeError("the replica died")

            delivery = inbox.call(lambda reply_to: Call(die()))
            delivery.take("a")
            assert await anext(delivery) == ["a"]
            with pytest.raises(RuntimeError):
                await anext(delivery)
            assert inbox._calls == {}

    run(main)


def test_a_cancelled_call_is_forgotten_and_its_late_events_go_nowhere(run):
    async def main():
        async with opened() as inbox:
            calls = []
            delivery = inbox.call(lambda _: calls.append(Call(asyncio.sleep(600))) or calls[0])
            delivery.cancel()
            inbox.take(1, "late")
            await asyncio.wait([calls[0].task])
            assert calls[0].task.cancelled()
            assert inbox._calls == {}

    run(main)


@pytest.mark.parametrize("known_bytes", [0, SECRET_BYTES - 1])
def test_who_does_not_know_the_secret_adds_nothing(run, known_bytes):
    async def main():
        async with opened() as inbox:
            addresses, end = [], asyncio.Event()
            delivery = inbox.call(lambda reply_to: addresses.append(reply_to) or Call(end.wait()))
            reader, writer = await asyncio.open_connection(HOST, addresses[0].port)
            wrong = inbox.secret[:known_bytes] + bytes(SECRET_BYTES - known_bytes)
            writer.write(wrong + msgpack.packb((addresses[0].ticket, "forged")))
            assert await reader.read() == b"", "the inbox says nothing and closes"
            assert delivery._items == []
            writer.close()
            delivery.cancel()

    run(main)


def test_a_router_that_has_gone_is_the_calls_failure_and_the_next_one_is_reached(run):
    async def main():
        arm = Arm()
        async with opened() as inbox:
            assert await taken(deliver(inbox, arm, "a")) == ["a"]
            old = []
            inbox.call(lambda reply_to: old.append(reply_to) or Call(asyncio.sleep(0)))
            for line in arm._outbox._lines.values():
                line._transport.abort()
            assert await taken(deliver(inbox, arm, "b")) == ["b"]
        gone = await arm.deliver("chat", {"items": ["c"]}, replace(old[0], secret=bytes(SECRET_BYTES)))
        assert gone.failure == "ConnectionRefusedError"

    run(main)


def test_with_rays_certificates_events_are_encrypted_and_strangers_get_no_connection(run, tmp_path, monkeypatch):
    for name, text in zip(("CERT", "KEY"), generate_self_signed_tls_certs(), strict=True):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"RAY_TLS_SERVER_{name}", str(tmp_path / name))
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(tmp_path / "CERT"))
    monkeypatch.setenv("RAY_USE_TLS", "1")

    async def main():
        async with opened() as inbox:
            arm = Arm()
            assert await taken(deliver(inbox, arm, "a", "b")) == ["a", "b"]
            (line,) = arm._outbox._lines.values()
            assert line._transport.get_extra_info("cipher")
            port = line._transport.get_extra_info("peername")[1]
            waiting = inbox.call(lambda _: Call(asyncio.sleep(600)))
            reader, writer = await asyncio.open_connection(HOST, port, ssl=ssl._create_unverified_context())
            with suppress(OSError):  # an alert, or the end
                writer.write(inbox.secret + msgpack.packb((2, "forged")))
                assert await reader.read() == b""
            assert waiting._items == []
            waiting.cancel()

    run(main)
