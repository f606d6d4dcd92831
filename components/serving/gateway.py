"""The router's mind: which arm a request goes to, what is counted of it, and what an operator may change. It knows no Ray."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from components.serving.access import SecretFile, check_bearer
from components.serving.assignment import Sessions
from components.serving.calls import Calls
from components.serving.dealing import Dealer
from components.serving.ejection import Ejector
from components.serving.exchange import EMPTY_ANSWER, Asked, Exchange, make_record
from components.serving.meter import Meter
from components.serving.metrics import NO_ARM, OVERLOADED, Metrics, Outcome
from components.serving.protocol import CLIENT_CLOSED, ApiError, parse_body, read_body, upstream_body
from components.serving.recording import Recording
from components.serving.routing import ArmState, Routing, check_epoch, describe_arms, describe_changes, follows
from components.serving.upstream import ARM_KILLED, Call, NotThere, Upstream

log = logging.getLogger("ray.serve")

MAX_SHADOWED = 32
"""Copies that run at once on one shadow; more would queue up without an end behind a slow one."""
RETRY_AFTER_S = 1

Ask = Callable[[str, str, dict[str, Any]], Upstream]
"""(application, route, body) -> the arm's items."""
Keep = Callable[[Routing], Awaitable[None]]
"""Makes a routing outlive this process."""


class Gateway:
    def __init__(self, ask: Ask, keep: Keep, ejector: Ejector | None = None, sessions: Sessions | None = None) -> None:
        self._ask, self._keep = ask, keep
        self._ejector = ejector or Ejector()
        self._sessions = sessions or Sessions()
        self._dealer = Dealer(self._ejector, self._sessions)
        self._metrics = Metrics()
        self._routing: Routing | None = None
        self._api_keys: SecretFile | None = None
        self._admin_token: SecretFile | None = None
        self._recording = Recording(self._oldest_running, self._metrics.lost.inc)
        self._calls = Calls()
        self._beside: set[asyncio.Task[None]] = set()
        """Copies to shadows, and words to Serve."""
        self._changing = asyncio.Lock()

    def configure(self, routing: Routing) -> None:
        """Takes a routing from Serve, unless the traffic was changed since it was made: then Serve is told what is live."""
        if follows(routing, self._routing):
            return self._take(routing)
        log.warning(
            "weight epoch %d was made from %s, which is not live: refused", routing.weight_epoch, routing.replaces
        )
        self._start_beside(self._keep_live())

    async def replace(self, routing: Routing) -> Routing:
        """The compare-and-set of a command: takes `routing` if it was made from what is live. What is live then."""
        async with self._changing:
            if follows(routing, self._routing):
                self._take(routing)
            return self._routing or routing

    def _take(self, routing: Routing) -> None:
        """Makes a routing live for every request from now on; what runs on a killed arm is cut off."""
        before, self._routing = self._routing, routing
        if before is None or before.api_keys_file != routing.api_keys_file:
            self._api_keys = SecretFile(routing.api_keys_file) if routing.api_keys_file else None
        if before is None or before.admin_token_file != routing.admin_token_file:
            self._admin_token = SecretFile(routing.admin_token_file) if routing.admin_token_file else None
        if before is None or (before.records, before.records_retention_days) != (
            routing.records,
            routing.records_retention_days,
        ):
            self._recording.open(routing.records, routing.records_retention_days)
        weights = routing.weights
        arms = [(name, arm.head, arm.state.value, weights.get(name, 0.0)) for name, arm in routing.arms.items()]
        self._metrics.set_arms(arms, routing.weight_epoch)
        for name, arm in routing.arms.items():
            if before is not None and name in before.arms and before.arms[name].app != arm.app:
                self._ejector.forget(name)  # what failed under this name was another engine
        self._calls.cut_off_killed(routing)

    def close(self) -> None:
        """Writes what is left of the records."""
        self._recording.close()

    async def answer(self, request: Request, route: str) -> Response:
        """Answers a request of the OpenAI API; `route` is `chat` or `completions`.

        Raises:
            ApiError: what is wrong before an arm is asked.
        """
        try:
            return await self._answer(request, route)
        except ApiError as error:
            self._metrics.rejected(error.code)
            raise

    def turn_away(self) -> ApiError:
        """What to tell one request more than may be here at once; counted."""
        self._metrics.rejected(OVERLOADED)
        return ApiError(503, "too many requests run at once: ask again later", OVERLOADED, retry_after_s=RETRY_AFTER_S)

    async def _answer(self, request: Request, route: str) -> Response:
        routing = self.live()
        check_bearer(request.headers, self._api_keys)
        raw_body = await read_body(request, routing.max_body_bytes)
        meter = Meter()  # now it begins: from here on nothing is waited for until it counts as running
        body = parse_body(raw_body, routing.model)
        asked = self._dealer.deal(routing, request.headers, body, raw_body)
        upstream = upstream_body(body)
        self._copy_to_shadows(routing, asked, route, upstream)
        return await self._exchange(routing, asked, route, upstream, meter).respond()

    def models(self, headers: Mapping[str, str]) -> dict[str, Any]:
        check_bearer(headers, self._api_keys)
        card = {"id": self.live().model, "object": "model", "created": 0, "owned_by": "aerie"}
        return {"object": "list", "data": [card]}

    def health(self) -> dict[str, Any]:
        routing = self.live()
        out = {name: self._ejector.is_out(name) for name in routing.arms}
        sessions = {
            name: self._sessions.num_on(name) for name, arm in routing.arms.items() if arm.state == ArmState.DRAINING
        }
        return {
            "status": "ok",
            "weight_epoch": routing.weight_epoch,
            "arms": describe_arms(routing, out, sessions),
            "leaving": self._calls.num_leaving(routing),
            "oldest_running_at": self._oldest_running_at(),
        }

    def metrics(self) -> bytes:
        for name in self._routing.arms if self._routing else ():
            self._metrics.ejected.labels(name).set(self._ejector.is_out(name))
            self._metrics.running.labels(name).set(self._calls.num_on(name))
        return self._metrics.text()

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError: 401 without the operators' token, 404 where none was set."""
        if self._admin_token is None:
            raise ApiError(404, "operators' endpoints are off: set ab.admin_token_file", "admin_off")
        check_bearer(headers, self._admin_token)

    async def change(self, change: Callable[[Routing], Routing], epoch: int | None = None) -> dict[str, Any]:
        """An operator's change: live at once in this process, then kept for those that follow it.

        Args:
            change: Of the live routing.
            epoch: The weight epoch that the operator saw; None: whatever is live.

        Raises:
            ApiError: what `change` raises; 409 when another epoch is live; 500 when the change is live but was not kept.
        """
        async with self._changing:
            before = self.live()
            check_epoch(before, epoch)
            changed = change(before)
            self._take(changed)
            log.info("an operator changed the arms: %s", describe_changes(changed))
            try:
                await self._keep(changed)
            except Exception as error:  # of the cluster: the change has been made, but a new router would not know it
                log.exception("the change was not kept")
                problem = f"the change is live, but will not outlive this router ({type(error).__name__})"
                raise ApiError(500, problem, "not_kept") from error
        return self.health()

    def live(self) -> Routing:
        """The routing; ApiError 503 while there is no arm."""
        if self._routing is None or not self._routing.arms:
            raise ApiError(503, "no arm is being served yet", NO_ARM)
        return self._routing

    def _exchange(self, routing: Routing, asked: Asked, route: str, body: dict[str, Any], meter: Meter) -> Exchange:
        app = routing.arms[asked.arm].app
        try:
            items = self._ask(app, route, body)
        except LookupError as error:
            items = NotThere(asked.arm, str(error))
        sent_at = self._ejector.started(asked.arm)
        call = Call(asked.arm, app, items, routing.first_item_timeout_s, meter.started_at, sent_at)
        self._calls.add(call)
        return Exchange(asked, call, meter, self._ended)

    def _oldest_running_at(self) -> float | None:
        """Unix time in seconds at which the oldest request began that runs now (shadows' copies aside) or whose record is still to be
        written, by this router or one that gives way to it; None without one. Who reads the records after this finds all of what began before."""
        oldest = min(self._oldest_running(), self._recording.waiting_since)
        return None if oldest == math.inf else oldest

    def _oldest_running(self) -> float:
        return self._calls.oldest_start(self._routing.shadows if self._routing else [])

    def _copy_to_shadows(self, routing: Routing, asked: Asked, route: str, body: dict[str, Any]) -> None:
        for arm in routing.shadows:
            if self._calls.num_on(arm) >= MAX_SHADOWED or not self._ejector.admits(arm):
                self._metrics.dropped(arm)
                continue
            copy = replace(asked, arm=arm, head=routing.arms[arm].head, shadow=True)
            try:
                exchange = self._exchange(routing, copy, route, body, Meter())
            except Exception:  # the client's own request goes on
                log.exception("no copy for shadow %s", arm)
                self._metrics.dropped(arm)
                continue
            self._start_beside(exchange.drain())

    def _start_beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _keep_live(self) -> None:
        async with self._changing:
            try:
                await self._keep(self.live())
            except Exception:
                log.exception("what is live was not kept")

    def _ended(self, exchange: Exchange, error: ApiError | str | None) -> None:
        asked, code, outcome = exchange.asked, _code(error), _outcome(error)
        self._recording.add(make_record(asked, exchange.meter, code))  # first: see `Recording`
        self._calls.discard(exchange.call)
        if outcome == Outcome.ANSWERED:
            self._ejector.succeeded(asked.arm, exchange.call.sent_at)
        elif outcome == Outcome.FAILED and _blames_arm(exchange, code):
            self._ejector.failed(asked.arm, exchange.call.sent_at)
        self._metrics.ended(asked.arm, exchange.meter, outcome, code, asked.shadow)


def _code(error: ApiError | str | None) -> str | None:
    return error.code if isinstance(error, ApiError) else error


def _blames_arm(exchange: Exchange, code: str | None) -> bool:
    """Whether a failure may eject the arm: not where it was switched off, nor where its client may have asked for nothing to read."""
    return code != ARM_KILLED and not (code == EMPTY_ANSWER and exchange.meter.is_asked_empty)


def _outcome(error: ApiError | str | None) -> Outcome:
    if isinstance(error, ApiError):
        return Outcome.REFUSED if error.status < 500 else Outcome.FAILED
    if error == CLIENT_CLOSED:
        return Outcome.LEFT
    return Outcome.ANSWERED if error is None else Outcome.FAILED
