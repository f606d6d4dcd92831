"""An arm whose own time is known, for measuring what the router adds: no model, a paced stream, reachable with and without the router."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve import Application
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from components.serving.delivery import Delivering
from components.serving.protocol import STREAM_END

MAX_ONGOING_REQUESTS = 1000
STAMP = "sent_ns="
"""Each chunk's text: the monotonic clock, which all processes of a machine share, when the chunk left the arm."""
USAGE = {"prompt_tokens": 8, "completion_tokens": 32, "total_tokens": 40}
SPECULATION = {
    "acceptance_histogram": [6, 3, 2, 1],
    "num_spec_steps": 12,
    "num_draft_tokens": 36,
    "num_accepted_draft_tokens": 10,
}


@serve.deployment(name="fast", max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class FastArm(Delivering):
    """Streams `chunks` chunks, one every `pace_s` seconds, or answers at once; both numbers come with the request."""

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self._direct, methods=["POST"])])

    async def answer(self, route: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | str]:
        """As an arm answers the router."""
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", "content": "done"}, "finish_reason": "stop"}
            yield {"choices": [choice], "usage": USAGE, "metrics": {"speculative_decoding": SPECULATION}}
            return
        due_s = time.perf_counter()
        for _ in range(body["chunks"]):
            yield f'data: {{"choices":[{{"index":0,"delta":{{"content":"{STAMP}{time.monotonic_ns()};"}}}}]}}\n\n'
            due_s += body["pace_s"]
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        yield f"{STREAM_END}\n\n"

    async def _direct(self, request: Request) -> Response:
        items = self.answer("chat", body := await request.json())
        if body.get("stream"):
            return StreamingResponse((str(item) async for item in items), media_type="text/event-stream")
        return JSONResponse(await anext(items))


def build_fast_arm() -> Application:
    return FastArm.bind()  # type: ignore[attr-defined]  # serve.deployment made a Deployment of it
