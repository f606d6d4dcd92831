"""The router's side of a call to an arm: its items, and its failures as errors of the API."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentResponseGenerator

from components.serving.protocol import STREAM_ERROR, ApiError


@dataclass(frozen=True)
class Call:
    """One request on its way to one arm."""

    arm: str
    headers: dict[str, str]
    upstream: DeploymentResponseGenerator
    timeout_s: float


async def next_item(call: Call) -> Any:
    """The arm's next item; None at the end.

    Raises:
        ApiError: 504 when the arm says nothing for too long, 502 when it fails.
    """
    try:
        return await asyncio.wait_for(anext(call.upstream), call.timeout_s)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        raise ApiError(504, f"arm {call.arm} said nothing for {call.timeout_s:g} s", "arm_timeout") from None
    except Exception as error:  # whatever the engine raised arrives wrapped by Ray
        raise ApiError(502, f"arm {call.arm} failed: {type(error).__name__}", "arm_failed") from error


def raise_if_error(item: dict[str, Any] | str) -> None:
    """Raises ApiError for an arm's error item, with the arm's own status where it gives one."""
    if isinstance(item, str):
        if not item.startswith(STREAM_ERROR):
            return
        event: dict[str, Any] = json.loads(item.removeprefix("data: ").split("\n", 1)[0])
    else:
        event = item
    if "error" not in event:
        return
    error = event["error"]
    status = error.get("code")
    status = status if isinstance(status, int) and 400 <= status < 600 else 502
    raise ApiError(status, error.get("message") or "the arm failed", param=error.get("param"))
