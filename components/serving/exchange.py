"""One request's way through the router: asked, relayed, measured, and counted once, however it ends."""

import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from components.serving.meter import Meter
from components.serving.protocol import ARM_HEADER, CLIENT_CLOSED, HEAD_HEADER, STREAM_END, ApiError, label_event
from components.serving.records import LiveRecord
from components.serving.upstream import Call, raise_if_error

log = logging.getLogger("ray.serve")

EMPTY_ANSWER = "empty_answer"


@dataclass(frozen=True)
class Asked:
    """What is known of a request before it is answered."""

    arm: str
    head: str
    assigned_arm: str
    assigned_head: str
    session: str
    task: str | None
    weight_epoch: int
    stream: bool
    show_usage: bool
    forced: bool = False
    shadow: bool = False


class Exchange:
    """Runs a call and reports its end: `ended(exchange, error)`, where `error` is None for a sound answer."""

    def __init__(
        self, asked: Asked, call: Call, meter: Meter, ended: Callable[["Exchange", ApiError | str | None], None]
    ) -> None:
        self.asked, self.call, self.meter = asked, call, meter
        self._ended = ended
        self._is_over = False

    async def respond(self) -> Response:
        """The client's response; the arm's first item decides the status, so nothing is sent before it is here."""
        try:
            first = await self.call.next_items()
            if first is None:
                raise ApiError(502, f"arm {self.asked.arm} gave no answer", EMPTY_ANSWER)
            raise_if_error(first[0])
            if self.asked.stream:
                return _Stream(self, first)
            return self._answer(first[0])
        except ApiError as error:
            self.finish(error)
            return JSONResponse(error.body, error.status, self.headers)
        except Exception:
            self.finish("router_failed")
            raise
        except BaseException:  # the client has gone
            self.finish(CLIENT_CLOSED)
            raise

    async def drain(self) -> None:
        """Takes the whole reply without giving it to anybody."""
        response = await self.respond()
        if isinstance(response, StreamingResponse):
            async for _ in response.body_iterator:
                pass

    @property
    def headers(self) -> dict[str, str]:
        return {ARM_HEADER: self.asked.arm, HEAD_HEADER: self.asked.head}

    def _answer(self, answer: dict[str, Any]) -> Response:
        self.meter.read_answer(answer)
        if not answer.get("choices") or (self.meter.is_empty and not self.meter.output_tokens):
            raise ApiError(502, f"arm {self.asked.arm} gave an empty answer", EMPTY_ANSWER)
        try:
            response = JSONResponse(answer, headers=self.headers)
        except ValueError:  # infinite or not a number: no client could read it
            raise ApiError(502, f"arm {self.asked.arm} gave an answer that is not JSON", "arm_failed") from None
        self.finish(EMPTY_ANSWER if self.meter.is_empty else None)
        return response

    async def relay(self, first: list[Any]) -> AsyncIterator[str]:
        """The stream's events for the client, those that are there at once in one piece; a failure is an event, for the status has been sent."""
        label = {"arm": self.asked.arm, "head": self.asked.head}
        items: list[Any] | None = first
        shown: list[str] = []
        try:
            items = [label_event(first[0], label), *first[1:]]
            while items is not None:
                for item in items:
                    raise_if_error(item)
                    is_end = item.startswith(STREAM_END)
                    if is_end:  # counted before it is sent: who has the answer finds it in the figures
                        self.finish(EMPTY_ANSWER if self.meter.is_empty else None)
                    if not self.meter.read_event(item) or self.asked.show_usage:
                        shown.append(item)
                    if is_end:
                        yield "".join(shown)
                        return
                if shown:
                    yield "".join(shown)
                    shown = []
                items = await self.call.next_items()
            raise ApiError(502, f"the stream of arm {self.asked.arm} broke off", "broken_stream")
        except Exception as error:
            failure = error if isinstance(error, ApiError) else self._unreadable(error)
            self.finish(failure)
            yield f"{''.join(shown)}data: {json.dumps(failure.body)}\n\n{STREAM_END}\n\n"
        finally:
            self.finish(CLIENT_CLOSED)

    def _unreadable(self, error: Exception) -> ApiError:
        """For an item that is no event of a stream; without its words, which may hold a text."""
        return ApiError(
            502, f"the stream of arm {self.asked.arm} cannot be read ({type(error).__name__})", "arm_failed"
        )

    def finish(self, error: ApiError | str | None) -> None:
        """The end of the exchange; only the first one counts."""
        if self._is_over:
            return
        self._is_over = True
        if error is not None:  # else the arm has ended by itself
            self.call.close()
        if isinstance(error, ApiError) and error.status >= 500:  # without the arm's words: they may hold a text
            log.warning("arm %s failed with %d %s", self.asked.arm, error.status, error.code)
        self._ended(self, error)


class _Stream(StreamingResponse):
    """A stream that ends its exchange even when the client has left before the first event."""

    def __init__(self, exchange: Exchange, first: list[Any]) -> None:
        super().__init__(exchange.relay(first), media_type="text/event-stream", headers=exchange.headers)
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._exchange.finish(CLIENT_CLOSED)


def make_record(asked: Asked, meter: Meter, error: str | None) -> LiveRecord:
    return LiveRecord(
        arm=asked.arm,
        session=asked.session,
        weight_epoch=asked.weight_epoch,
        task=asked.task,
        prompt_tokens=meter.usage.get("prompt_tokens") or 0,
        output_tokens=meter.output_tokens,
        rounds=meter.speculation.get("num_spec_steps") or 0,
        drafted=meter.speculation.get("num_draft_tokens") or 0,
        accepted=meter.speculation.get("num_accepted_draft_tokens") or 0,
        histogram=meter.histogram,
        started_at=meter.started_at,
        ttft_s=meter.ttft_s,
        tpot_s=meter.tpot_s,
        error=error,
        assigned_arm=asked.assigned_arm,
        head=asked.head,
        assigned_head=asked.assigned_head,
        duration_s=meter.duration_s,
        shadow=asked.shadow,
        forced=asked.forced,
    )
