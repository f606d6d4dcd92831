"""The router's side of a call to an arm: its items, its failures as errors of the API, and its end."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from components.serving.protocol import STREAM_ERROR, ApiError

ARM_KILLED = "arm_killed"


class ArmFailed(Exception):
    """An arm's answer broke off; says the kind of failure and no more."""


class Upstream(Protocol):
    """An arm's items, as many as are there each time, until the end or until it is cancelled: one dict, or strings of a stream's events."""

    def __aiter__(self) -> AsyncIterator[list[Any]]: ...

    async def __anext__(self) -> list[Any]: ...

    def cancel(self) -> None: ...


@dataclass(eq=False)
class Call:
    """One request on its way to one arm."""

    arm: str
    app: str
    """The arm's Serve application when it was asked."""
    items: Upstream
    timeout_s: float
    started_at: float
    """Unix time in seconds at which the request was read."""
    sent_at: float
    """On the clock of who ejects arms."""
    killed: bool = False
    _waiting: asyncio.Timeout | None = field(default=None, init=False)

    async def next_items(self) -> list[Any] | None:
        """What has come from the arm, once there is something; None at the end.

        Raises:
            ApiError: 504 when the arm says nothing for too long, 502 when it fails, 503 when it was killed.
        """
        if self.killed:
            raise self._was_killed()
        try:
            async with asyncio.timeout(self.timeout_s) as self._waiting:
                return await anext(self.items)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            if self.killed:
                raise self._was_killed() from None
            said_nothing = f"arm {self.arm} said nothing for {self.timeout_s:g} s"
            raise ApiError(504, said_nothing, "arm_timeout") from None
        except ApiError:
            raise
        except ArmFailed as error:
            raise ApiError(502, f"arm {self.arm} failed: {error}", "arm_failed") from None
        except Exception as error:  # of Serve: the replica died, or takes no more
            raise ApiError(502, f"arm {self.arm} failed: {type(error).__name__}", "arm_failed") from error
        finally:
            self._waiting = None

    def kill(self) -> None:
        """Ends the call: whoever waits for its next items is told so now."""
        self.killed = True
        if self._waiting is not None and not self._waiting.expired():  # else it is told at this moment anyway
            self._waiting.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """The arm need not go on."""
        self.items.cancel()

    def _was_killed(self) -> ApiError:
        return ApiError(503, f"arm {self.arm} was switched off", ARM_KILLED)


class NotThere:
    """The `Upstream` of an arm that cannot even be asked."""

    def __init__(self, arm: str, why: str) -> None:
        self._error = ApiError(503, f"arm {arm} is not there: {why}", "arm_unavailable")

    def __aiter__(self) -> "NotThere":
        return self

    async def __anext__(self) -> list[Any]:
        raise self._error

    def cancel(self) -> None:
        pass


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
