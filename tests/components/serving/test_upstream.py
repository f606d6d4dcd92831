"""A call to an arm that says nothing, at the moment at which its time is over."""

import asyncio
import time
from typing import Any

import pytest

from components.serving.protocol import ApiError
from components.serving.upstream import ARM_KILLED, Call

TIMEOUT_S = 0.25  # longer than a turn of the loop takes, whatever else the process has to do


class Silent:
    def __aiter__(self) -> "Silent":
        return self

    async def __anext__(self) -> list[Any]:
        await asyncio.sleep(600)
        raise AssertionError("nobody waits for so long")

    def cancel(self) -> None:
        pass


async def kill_when_its_time_is_over() -> str:
    """Code of what the waiting one is told; the timeout and the kill come in one turn of the loop."""
    loop = asyncio.get_running_loop()
    call = Call("a", "app", Silent(), TIMEOUT_S, started_at=0.0, sent_at=0.0)
    waiting = asyncio.create_task(call.next_items())
    await asyncio.sleep(0)
    killed = loop.create_future()
    loop.call_later(TIMEOUT_S, lambda: killed.set_result(call.kill()))
    time.sleep(2 * TIMEOUT_S)  # both are due when the loop goes on
    with pytest.raises(ApiError) as error:
        await waiting
    assert killed.done(), "the kill went through"
    return error.value.code


def test_a_kill_at_the_moment_of_the_timeout_is_a_kill() -> None:
    assert asyncio.run(kill_when_its_time_is_over()) == ARM_KILLED
