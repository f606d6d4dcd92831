"""An arm that fails in every way that an engine may fail, on request."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

CHUNK = 'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
DONE = "data: [DONE]\n\n"
ANSWER = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}]}


@serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})
class FaultyArm:
    """Takes what it shall do from the request's field `do`; `always` overrides it."""

    def __init__(self, always: str | None = None) -> None:
        self.always = always
        self.cancelled = 0

    async def num_cancelled(self) -> AsyncIterator[int]:
        yield self.cancelled

    async def answer(self, route: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        what = self.always or body["do"]
        try:
            async for item in getattr(self, what)():
                yield item
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def good(self) -> AsyncIterator[Any]:
        yield ANSWER

    async def good_stream(self) -> AsyncIterator[Any]:
        yield CHUNK
        yield DONE

    async def refuse(self) -> AsyncIterator[Any]:
        yield {"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}}

    async def refuse_as_event(self) -> AsyncIterator[Any]:
        yield f"data: {json.dumps({'error': {'message': 'no', 'code': 500}})}\n\n"
        yield DONE

    async def crash(self) -> AsyncIterator[Any]:
        raise RuntimeError("the engine died with somebody's text in its message")
        yield

    async def nothing(self) -> AsyncIterator[Any]:
        return
        yield

    async def empty(self) -> AsyncIterator[Any]:
        yield {"choices": []}

    async def hang(self) -> AsyncIterator[Any]:
        await asyncio.sleep(600)
        yield ANSWER

    async def crash_in_stream(self) -> AsyncIterator[Any]:
        yield CHUNK
        raise RuntimeError("the engine died")

    async def break_off(self) -> AsyncIterator[Any]:
        yield CHUNK

    async def hang_in_stream(self) -> AsyncIterator[Any]:
        yield CHUNK
        await asyncio.sleep(600)
