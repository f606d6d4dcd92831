"""An arm that fails in every way that an engine may fail, on request; on Serve, or in this process."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from components.serving.delivery import Delivering

CHUNK = 'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
DONE = "data: [DONE]\n\n"
SPECULATION = {
    "acceptance_histogram": [4, 3, 2, 1],
    "num_spec_steps": 10,
    "num_draft_tokens": 30,
    "num_accepted_draft_tokens": 10,
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 20, "total_tokens": 27}
FIGURES = {"usage": USAGE, "metrics": {"speculative_decoding": SPECULATION}}
ANSWER = {"choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}], **FIGURES}
NUM_CHUNKS = 5
PACE_S = 0.02


class Faulty(Delivering):
    """Takes what it shall do from the request's field `do`; `always` overrides it."""

    def __init__(self, always: str | None = None) -> None:
        self.always = always
        self.cancelled = 0
        self.bodies: list[dict[str, Any]] = []
        self.may_end = False
        """What `held_stream` waits for."""

    async def num_cancelled(self) -> AsyncIterator[int]:
        yield self.cancelled

    async def answer(self, route: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        self.bodies.append(body)
        what = self.always or body["do"]
        try:
            async for item in getattr(self, what)(body):
                yield item
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def good(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        if not body.get("stream"):
            yield ANSWER
            return
        for _ in range(NUM_CHUNKS):
            yield CHUNK
            await asyncio.sleep(PACE_S)
        if (body.get("stream_options") or {}).get("include_usage"):
            yield f"data: {json.dumps({'choices': [], **FIGURES})}\n\n"
        yield DONE

    async def held_stream(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield CHUNK
        while not self.may_end:
            await asyncio.sleep(0.01)
        yield DONE

    async def refuse(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield {"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}}

    async def refuse_as_event(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield f"data: {json.dumps({'error': {'message': 'no', 'code': 500}})}\n\n"
        yield DONE

    async def crash(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        raise RuntimeError("the engine died with somebody's text in its message")
        yield

    async def nothing(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        return
        yield

    async def empty(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield {"choices": []}

    async def no_tokens(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        choice = {"message": {"content": ""}, "finish_reason": "stop"}
        yield {"choices": [choice], "usage": USAGE | {"completion_tokens": 0}}

    async def end_token_only(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        choice = {"message": {"content": ""}, "finish_reason": "stop"}
        yield {"choices": [choice], "usage": USAGE | {"completion_tokens": 1}}

    async def cut_short(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        choice = {"message": {"content": ""}, "finish_reason": "length"}
        yield {"choices": [choice], "usage": USAGE | {"completion_tokens": 1}}

    async def stopped_at_once(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'
        yield 'data: {"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}]}\n\n'
        yield f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n"
        yield DONE

    async def no_number(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield {**ANSWER, "logprob": float("nan")}

    async def empty_stream(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
        yield DONE

    async def hang(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        await asyncio.sleep(600)
        yield ANSWER

    async def crash_in_stream(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield CHUNK
        raise RuntimeError("the engine died")

    async def broken_event(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield 'data: {"choices": [{"delta": {"content": "x"\n\n'
        yield DONE

    async def no_event(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield ANSWER

    async def break_off(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield CHUNK

    async def hang_in_stream(self, body: dict[str, Any]) -> AsyncIterator[Any]:
        yield CHUNK
        await asyncio.sleep(600)


FaultyArm = serve.deployment(Faulty, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0})
