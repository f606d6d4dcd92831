"""Which arm one request goes to: by its session and the weights, past arms that are out, or as the client or a drain wants it."""

from collections.abc import Mapping
from typing import Any

from components.serving.assignment import Sessions, assign, session_hash, session_key
from components.serving.ejection import Ejector
from components.serving.exchange import Asked
from components.serving.metrics import NO_ARM
from components.serving.protocol import ARM_HEADER, ApiError, task_name, wants_usage
from components.serving.routing import ArmState, Routing


class Dealer:
    def __init__(self, ejector: Ejector, sessions: Sessions) -> None:
        self._ejector, self._sessions = ejector, sessions

    def deal(self, routing: Routing, headers: Mapping[str, str], body: Mapping[str, Any], raw_body: bytes) -> Asked:
        """The request with its arm.

        Raises:
            ApiError: 404 or 503 when the arm that the client names cannot answer, 503 when no arm takes new sessions.
        """
        key = session_key(headers, body, raw_body)
        session = session_hash(key, routing.salt)
        wanted = headers.get(ARM_HEADER) or None
        assigned, arm, forced = self._arms(routing, wanted, key, session)
        if wanted is None:
            self._sessions.saw(session, arm)
        return Asked(
            arm=arm,
            head=routing.arms[arm].head,
            assigned_arm=assigned,
            assigned_head=routing.arms[assigned].head,
            session=session,
            task=task_name(headers),
            weight_epoch=routing.weight_epoch,
            stream=bool(body.get("stream")),
            show_usage=wants_usage(body),
            forced=forced,
        )

    def _arms(self, routing: Routing, wanted: str | None, key: str, session: str) -> tuple[str, str, bool]:
        """(arm by the weights, arm to ask, whether something else than the weights decided)."""
        if wanted is not None:
            return wanted, _wanted_arm(routing, wanted), True
        stays = self._sessions.arm_of(session)
        if stays in routing.arms and routing.arms[stays].state == ArmState.DRAINING and self._ejector.admits(stays):
            return stays, stays, True
        weights = routing.weights
        assigned = assign(key, weights, routing.salt)
        if assigned is None:
            raise ApiError(503, "no arm takes new sessions", NO_ARM)
        admitted = {name: weight for name, weight in weights.items() if self._ejector.admits(name)}
        # where all are out it is better to try one than to refuse
        return assigned, assign(key, admitted, routing.salt) or assigned, False


def _wanted_arm(routing: Routing, wanted: str) -> str:
    """The arm that a client asks for by name; ApiError for one that answers nobody."""
    if wanted not in routing.arms:
        raise ApiError(404, f"there is no arm {wanted!r}; arms: {', '.join(routing.arms)}", "arm_not_found")
    state = routing.arms[wanted].state
    if state not in (ArmState.SERVING, ArmState.DRAINING):
        raise ApiError(503, f"arm {wanted} is {state.value}", "arm_unavailable")
    return wanted
