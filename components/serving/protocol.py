"""What travels between clients, the router and the arms: headers, bodies, and errors in the shape of OpenAI's API."""

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request

SESSION_HEADER = "x-session-id"
"""Requests with the same value go to the same arm."""
ARM_HEADER = "x-aerie-arm"
"""In a response: the arm that gave it. In a request: the arm wanted, whatever the weights."""
HEAD_HEADER = "x-aerie-head"
"""In a response: version and digest of the arm's head, or `none`."""
TASK_HEADER = "x-aerie-task"
"""In a request: the client's word for what kind it is; records and statistics go by it."""
CLIENT_CLOSED = "client_closed"
"""Code of a request whose client left before the end."""
STREAM_END = "data: [DONE]"
STREAM_ERROR = 'data: {"error"'
EVENT = "data: {"

_TASK = re.compile(r"[\w.:-]{1,64}", re.ASCII)
"""A name: no room for a text."""


class ApiError(Exception):
    """An answer with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
        self.body = error_body(status, message, code, param)

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}; `code` is the status where there is no better word."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body; no more of it is read than is allowed.

    Raises:
        ApiError: 413 for a longer one; 499, which nobody reads, where the client leaves before its end.
    """
    too_long = ApiError(413, f"the body is longer than {max_bytes} bytes", "body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_long
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise too_long
    except ClientDisconnect:
        raise ApiError(499, "the client left before it had sent its request", CLIENT_CLOSED) from None
    return bytes(body)


def parse_body(raw_body: bytes, model: str) -> dict[str, Any]:
    """The request's JSON object, with the model's name filled in.

    Raises:
        ApiError: 400 for what is no JSON object or streams in no way that the API knows, 404 for another model.
    """
    try:
        text = raw_body.decode()
        body = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is no text, and fails further on
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {_reason(error)}", "invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}, not an object", "invalid_json")
    if body.setdefault("model", model) != model:
        raise ApiError(404, f"there is no such model; it is {model!r}", "model_not_found", "model")
    for name, kind in (("stream", bool), ("stream_options", dict), ("user", str)):
        if not isinstance(body.get(name), kind | None):
            raise ApiError(400, f"{name} must be a JSON {_JSON_NAMES[kind]}", param=name)
    return body


_JSON_NAMES = {bool: "boolean", dict: "object", str: "string"}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _reason(error: Exception) -> str:
    """Without the input: it may hold a user's text."""
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Whether the client of a stream asked for the usage event at its end."""
    return bool((body.get("stream_options") or {}).get("include_usage"))


def upstream_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the arm: a stream is always asked for its usage, which carries what was drafted and accepted."""
    if not body.get("stream") or wants_usage(body):
        return dict(body)
    # without include_usage the client gets no usage in between either, whatever else it set
    options = {**(body.get("stream_options") or {}), "include_usage": True, "continuous_usage_stats": False}
    return {**body, "stream_options": options}


def task_name(headers: Mapping[str, str]) -> str | None:
    """The client's word for the kind of request; None without one, or where it is no plain name."""
    task = headers.get(TASK_HEADER, "")
    return task if _TASK.fullmatch(task) else None


def label_event(event: str, label: Mapping[str, str]) -> str:
    """The event of a stream with one more key, `aerie`: the arm and head it is from."""
    if not event.startswith(EVENT) or event.startswith(EVENT + "}"):
        return event
    return f'{EVENT}"aerie": {json.dumps(label)}, {event.removeprefix(EVENT)}'
