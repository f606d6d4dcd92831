"""What travels between clients, the router and the arms: headers, and errors in the shape of OpenAI's API."""

import json
from typing import Any

SESSION_HEADER = "x-session-id"
"""Requests with the same value go to the same arm."""
ARM_HEADER = "x-aerie-arm"
"""In a response: the arm that gave it. In a request: the arm wanted, whatever the weights."""
HEAD_HEADER = "x-aerie-head"
"""In a response: version and digest of the arm's head, or `none`."""
STREAM_END = "data: [DONE]"
STREAM_ERROR = 'data: {"error"'

TYPES = {400: "invalid_request_error", 404: "invalid_request_error", 405: "invalid_request_error"}


class ApiError(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, code, param)


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """{"error": {"message", "type", "param", "code"}}; `code` is the status where there is no better word."""
    kind = TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def parse_body(raw_body: bytes, model: str) -> dict[str, Any]:
    """The request's JSON object, with the model's name filled in.

    Raises:
        ApiError: 400 for what is no JSON object, 404 for another model.
    """
    try:
        body = json.loads(raw_body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", "invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}, not an object", "invalid_json")
    if body.setdefault("model", model) != model:
        raise ApiError(404, f"there is no model {body['model']!r}; it is {model!r}", "model_not_found", "model")
    return body
