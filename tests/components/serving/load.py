"""An open-loop load: requests leave by a fixed schedule, whatever becomes of those before them, and nothing is tried again."""

import asyncio
import json
import threading
import time
from dataclasses import dataclass

import httpx

CHAT = "/v1/chat/completions"
QUESTIONS = ("ask 1 things", "tell 2 things", "count 3 things", "list 4 things")


@dataclass(frozen=True)
class Reply:
    """What the client got."""

    stream: bool
    head: str
    """`x-aerie-head`; empty where no answer came."""
    problem: str | None
    """None for an answer that ended properly: a finish reason and, in a stream, [DONE]."""
    num_tokens: int


class OpenLoop:
    """`with OpenLoop(...) as load:` sends `rate` requests a second, every other one streamed, each a session of its own."""

    def __init__(self, address: str, model: str, rate: float, num_tokens: int) -> None:
        self.replies: list[Reply] = []
        self.temperature = 0.0
        """Of the requests from now on."""
        self._address, self._model, self._rate, self._num_tokens = address, model, rate, num_tokens
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send_all()))

    def __enter__(self) -> "OpenLoop":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def problems(self) -> list[Reply]:
        return [reply for reply in self.replies if reply.problem is not None]

    def wait_for(self, num_replies: int, timeout_s: float = 120.0) -> None:
        """Until so many more requests have been answered."""
        wanted, deadline = len(self.replies) + num_replies, time.monotonic() + timeout_s
        while len(self.replies) < wanted:
            assert time.monotonic() < deadline, f"{len(self.replies)} of {wanted} replies"
            time.sleep(0.05)

    async def _send_all(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._address, timeout=120, trust_env=False, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            started, number = time.monotonic(), 0
            while not self._over.is_set():
                group.create_task(self._send(client, number))
                number += 1
                await asyncio.sleep(max(0.0, started + number / self._rate - time.monotonic()))

    async def _send(self, client: httpx.AsyncClient, number: int) -> None:
        stream = number % 2 == 1
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": QUESTIONS[number // 2 % len(QUESTIONS)]}],
            "max_tokens": self._num_tokens,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        try:
            reply = await client.post(CHAT, json=body, headers={"x-session-id": f"session-{number}"})
        except httpx.HTTPError as error:
            self.replies.append(Reply(stream, "", repr(error), 0))
            return
        problem, num_tokens = read_stream(reply) if stream else read_answer(reply)
        self.replies.append(Reply(stream, reply.headers.get("x-aerie-head", ""), problem, num_tokens))


def read_answer(reply: httpx.Response) -> tuple[str | None, int]:
    """(what is wrong with it, its output tokens)."""
    if reply.status_code != 200:
        return f"{reply.status_code} {reply.text}", 0
    answer = reply.json()
    finished = answer["choices"][0]["finish_reason"]
    return None if finished else "no finish reason", answer["usage"]["completion_tokens"]


def read_stream(reply: httpx.Response) -> tuple[str | None, int]:
    """(what is wrong with it, its output tokens)."""
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    if reply.status_code != 200 or not events or events[-1] != "[DONE]":
        return f"{reply.status_code} {reply.text[-300:]}", 0
    parts = [json.loads(event) for event in events[:-1]]
    if failed := [part for part in parts if "error" in part]:
        return str(failed[0]), 0
    finished = any(choice.get("finish_reason") for part in parts for choice in part["choices"])
    return None if finished else "no finish reason", parts[-1]["usage"]["completion_tokens"]
