"""Held-out prompts replayed as live traffic: sessions that ask turn by turn, each turn with the answers that it got before.

One record a request, without any text. Nothing is asked twice: an error is an error.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from components.config import Settings
from components.data.prompts import Prompt
from components.evaluation.acceptance import RequestRecord
from components.serving.access import read_secrets
from components.serving.protocol import ARM_HEADER, SESSION_HEADER, STREAM_END, TASK_HEADER

log = logging.getLogger("aerie")

STREAM_EVERY = 5
"""Every so many sessions stream their answers."""
UNKNOWN_ARM = "unknown"
"""For a request that failed before an arm was named."""
PROGRESS_S = 10.0
CLIENT_MARGIN_S = 30.0
"""The router's own timeout comes first, and says more."""

Message = dict[str, Any]
OnSession = Callable[[str, list[RequestRecord]], None]


@dataclass(frozen=True)
class Session:
    key: str
    """Hash of the prompt's key and of its round; it decides the arm."""
    family: str
    turns: tuple[tuple[Message, ...], ...]
    """Messages sent before each answer."""
    tools: list[Message] | None
    stream: bool


@dataclass(frozen=True)
class Reply:
    """One HTTP answer, from a body or from a stream."""

    arm: str
    text: str | None
    finish_reason: str | None
    usage: dict[str, int]
    speculation: dict[str, Any]
    """vLLM's acceptance figures of the request; empty where nothing speculates."""
    error: str | None


def make_sessions(prompts: Sequence[Prompt], num_requests: int) -> list[Session]:
    """Sessions of exactly `num_requests` requests, in an order of their hashes; the prompts come again when they run out.

    Raises:
        ValueError: no prompts.
    """
    if not prompts:
        raise ValueError("no prompts to replay")
    ordered = sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.key.encode()).hexdigest())
    sessions: list[Session] = []
    left = num_requests
    while left > 0:
        lap, index = divmod(len(sessions), len(ordered))
        prompt = ordered[index]
        turns = tuple(tuple(turn) for turn in prompt.turns()[:left])
        key = hashlib.sha256(f"{prompt.key}:{lap}".encode()).hexdigest()[:16]
        stream = len(sessions) % STREAM_EVERY == STREAM_EVERY - 1
        sessions.append(Session(key, prompt.family, turns, prompt.tools, stream))
        left -= len(turns)
    return sessions


def replay(address: str, sessions: Sequence[Session], settings: Settings, on_session: OnSession) -> None:
    """Asks everything, `ab.concurrency` sessions at once; `on_session(key, records)` as each one ends."""
    asyncio.run(_replay(address, sessions, settings, on_session))


async def _replay(address: str, sessions: Sequence[Session], settings: Settings, on_session: OnSession) -> None:
    timeout = httpx.Timeout(settings.ab.first_item_timeout_s + CLIENT_MARGIN_S)
    at_once = asyncio.Semaphore(settings.ab.concurrency)
    progress = Progress(len(sessions))
    keys = settings.ab.api_keys_file
    headers = {"Authorization": f"Bearer {read_secrets(keys.expanduser())[0]}"} if keys else {}
    async with httpx.AsyncClient(base_url=address, timeout=timeout, trust_env=False, headers=headers) as client:

        async def run(session: Session) -> None:
            async with at_once:
                records = await _run_session(client, session, settings)
            on_session(session.key, records)
            progress.add(len(records))

        await asyncio.gather(*map(run, sessions))


@dataclass
class Progress:
    num_sessions: int
    sessions: int = 0
    requests: int = 0

    def __post_init__(self) -> None:
        self.started = self.said = time.monotonic()

    def add(self, requests: int) -> None:
        self.sessions += 1
        self.requests += requests
        now = time.monotonic()
        if now - self.said >= PROGRESS_S:
            self.said = now
            rate = self.requests / (now - self.started)
            log.info("ab: %d/%d sessions, %.1f requests/s", self.sessions, self.num_sessions, rate)


async def _run_session(client: httpx.AsyncClient, session: Session, settings: Settings) -> list[RequestRecord]:
    """The session's requests one after another; a failed one ends it, its later turns would lack an answer."""
    messages: list[Message] = []
    records: list[RequestRecord] = []
    for turn in session.turns:
        messages += turn
        started_at, started = time.time(), time.monotonic()
        reply = await _ask(client, session, request_body(session, messages, settings))
        records.append(make_record(session, reply, time.monotonic() - started, started_at))
        if reply.error is not None:
            break
        messages = [*messages, {"role": "assistant", "content": reply.text}]
    return records


def request_body(session: Session, messages: Sequence[Message], settings: Settings) -> dict[str, Any]:
    """The request as serving gets it: the sampling settings are those of the answers that the head was trained on."""
    body: dict[str, Any] = {
        "messages": list(messages),
        "max_tokens": settings.ab.max_new_tokens,
        **settings.data.sampling,
        "stream": session.stream,
    }
    if session.stream:  # without it a stream tells neither tokens nor acceptance
        body["stream_options"] = {"include_usage": True}
    if session.tools:  # told to the target, as in the training answers, but a call stays text
        body |= {"tools": session.tools, "tool_choice": "none"}
    return body


async def _ask(client: httpx.AsyncClient, session: Session, body: dict[str, Any]) -> Reply:
    try:
        headers = {SESSION_HEADER: session.key, TASK_HEADER: session.family}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            raw = await response.aread()
    except httpx.TransportError as error:
        return Reply(UNKNOWN_ARM, None, None, {}, {}, type(error).__name__)
    arm = response.headers.get(ARM_HEADER, UNKNOWN_ARM)
    if session.stream and response.is_success:
        return read_stream(arm, raw)
    return read_body(arm, response.status_code, raw)


def read_body(arm: str, status: int, raw: bytes) -> Reply:
    """A whole answer; a 200 without one is an error."""
    try:
        body = json.loads(raw)
    except ValueError:
        return Reply(arm, None, None, {}, {}, f"{status} without JSON")
    if status != 200 or "error" in body:
        return Reply(arm, None, None, {}, {}, f"{status} {body.get('error', {}).get('code')}")
    choice = (body.get("choices") or [{}])[0]
    text = choice.get("message", {}).get("content")
    return _reply(arm, text, choice.get("finish_reason"), body)


def read_stream(arm: str, raw: bytes) -> Reply:
    """The events of a stream, put together; one that breaks off is an error."""
    lines = [line for line in raw.decode().split("\n") if line.startswith("data: ")]
    if not lines or lines[-1] != STREAM_END:
        return Reply(arm, None, None, {}, {}, "broken stream")
    text, finish_reason, last = "", None, {}
    for line in lines[:-1]:
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return Reply(arm, None, None, {}, {}, f"200 {event['error'].get('code')}")
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
        last = event
    return _reply(arm, text, finish_reason, last)


def _reply(arm: str, text: str | None, finish_reason: str | None, metered: dict[str, Any]) -> Reply:
    usage = metered.get("usage") or {}
    speculation = (metered.get("metrics") or {}).get("speculative_decoding") or {}
    # an answer that is nothing but its end token would hide a broken arm
    empty = finish_reason is None or usage.get("completion_tokens", 0) <= (finish_reason == "stop")
    return Reply(arm, text, finish_reason, usage, speculation, "empty answer" if empty else None)


def make_record(session: Session, reply: Reply, duration_s: float, started_at: float | None = None) -> RequestRecord:
    """The request's figures; position i counts the rounds that accepted more than i draft tokens."""
    histogram = reply.speculation.get("acceptance_histogram", [])
    return RequestRecord(
        key=session.key,
        family=session.family,
        arm=reply.arm,
        prompt_tokens=reply.usage.get("prompt_tokens", 0),
        output_tokens=reply.usage.get("completion_tokens", 0),
        finish_reason=reply.finish_reason,
        rounds=reply.speculation.get("num_spec_steps", 0),
        drafted=reply.speculation.get("num_draft_tokens", 0),
        accepted=reply.speculation.get("num_accepted_draft_tokens", 0),
        accepted_at=tuple(sum(histogram[i:]) for i in range(1, len(histogram))),
        duration_s=duration_s,
        error=reply.error,
        started_at=started_at,
    )
