"""The router on a real Serve, in front of arms that fail in every way: a failure is an error, never an empty 200."""

import asyncio
import re
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ray import serve

from components.serving import running
from components.serving.assignment import assign
from components.serving.benchmark import DIRECT, ROUTED, WARM_UP_ROUNDS, measure, time_chunks, time_request
from components.serving.ejection import FAILURES_TO_EJECT
from components.serving.fast_arm import build_fast_arm
from components.serving.router import Router
from components.serving.routing import Routing, with_epoch
from tests.components.serving.faulty import FaultyArm
from tests.components.serving.local import LONG_S, wait_until
from tests.conftest import free_port

TIMEOUT_S = 5.0
"""For an arm's first item: long enough for one that says something, on a busy machine too."""
LEAVES_AFTER_S = 2.0
MAX_BODY_BYTES = 100_000
ROUTES = ("/v1/chat/completions", "/v1/completions")


def routing(**arms):
    return {
        "model": "m",
        "salt": "s",
        "first_item_timeout_s": TIMEOUT_S,
        "max_body_bytes": MAX_BODY_BYTES,
        "arms": {name: {"app": f"{name}-app", "weight": w, "head": f"{name}-head"} for name, w in arms.items()},
    }


@pytest.fixture(scope="module")
def serve_address(ray_cluster):
    serve.shutdown()  # what another module left listens on another port
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture(scope="module")
def faulty(serve_address):
    """A client of a router with one arm, which does what a request says; that arm's handle."""
    handle = serve.run(FaultyArm.bind(), name="faulty-app", route_prefix=None)
    app = Router.options(user_config=routing(faulty=1.0)).bind()
    serve.run(app, name="faulty-router", route_prefix="/faulty")
    with httpx.Client(base_url=f"{serve_address}/faulty", timeout=LONG_S, trust_env=False) as client:
        yield client, handle.options(stream=True)


@pytest.fixture(scope="module")
def client(faulty):
    return faulty[0]


def post(client, do, route=ROUTES[0], **body):
    return client.post(route, json={"do": do} | body)


def is_openai_error(reply):
    return set(reply.json()) == {"error"} and {"message", "type", "param", "code"} <= set(reply.json()["error"])


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_names_its_arm_and_head(client, route, stream):
    reply = post(client, "good", route, stream=stream)
    assert reply.status_code == 200
    assert reply.headers["x-aerie-arm"] == "faulty"
    assert reply.headers["x-aerie-head"] == "faulty-head"
    assert ("text/event-stream" in reply.headers["content-type"]) == stream


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("do", "status", "code"),
    [
        ("refuse", 400, 400),
        ("refuse_as_event", 500, 500),
        ("crash", 502, "arm_failed"),
        ("nothing", 502, "empty_answer"),
    ],
)
def test_a_failure_before_the_first_token_is_an_error_status(client, do, status, code, stream):
    check_error_status(post(client, do, stream=stream), status, code)


def check_error_status(reply, status, code):
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert is_openai_error(reply)
    assert reply.headers["x-aerie-arm"] == "faulty"
    assert "somebody's text" not in reply.text


def test_an_answer_without_choices_is_no_success(client):
    assert post(client, "empty").status_code == 502


@pytest.mark.parametrize(("do", "code"), [("crash_in_stream", "arm_failed"), ("break_off", "broken_stream")])
def test_a_failure_in_a_stream_is_an_event_in_it(client, do, code):
    check_error_event(post(client, do, stream=True), code)


def check_error_event(reply, code):
    assert reply.status_code == 200
    assert f'"code": "{code}"' in reply.text
    assert reply.text.endswith("data: [DONE]\n\n")


def test_an_arm_that_says_nothing_for_too_long_has_failed_before_its_first_token_and_in_a_stream(client):
    asked = [("hang", False), ("hang", True), ("hang_in_stream", True)]
    with ThreadPoolExecutor(len(asked)) as pool:
        *silent, broken = pool.map(lambda of: post(client, of[0], stream=of[1]), asked)
    for reply in silent:
        check_error_status(reply, 504, "arm_timeout")
    check_error_event(broken, "arm_timeout")


def test_clients_that_leave_cancel_the_arm(faulty):
    client, handle = faulty

    def ended():
        """(answers that the arm was told to break off, clients that had left then)"""
        gone = re.search(r'^aerie_client_closed_total{arm="faulty"} (\S+)', client.get("/metrics").text, re.MULTILINE)
        return next(handle.num_cancelled.remote()), float(gone[1])

    def leave(asked):
        with pytest.raises(httpx.TimeoutException):
            client.post(ROUTES[0], json={"do": asked[0], "stream": asked[1]}, timeout=LEAVES_AFTER_S)

    before = ended()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(leave, [("hang", False), ("hang_in_stream", True)]))
    wait_until(lambda: all(now >= then + 2 for now, then in zip(ended(), before, strict=True)))


def test_a_body_that_is_too_long_is_refused(client):
    reply = client.post(ROUTES[0], content=b'{"do": "good", "x": "' + b"x" * MAX_BODY_BYTES + b'"}')
    assert reply.status_code == 413
    assert is_openai_error(reply)


def test_models_lists_the_one_model(client):
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["m"]


def test_a_failing_arm_loses_its_sessions_and_keeps_its_name_in_the_errors(serve_address):
    serve.run(FaultyArm.bind("crash"), name="bad-app", route_prefix=None)
    serve.run(FaultyArm.bind("good"), name="sound-app", route_prefix=None)
    config = routing(bad=1.0, sound=1.0)
    serve.run(Router.options(user_config=config).bind(), name="two-router", route_prefix="/two")
    sessions = [f"s{i}" for i in range(200)]
    bad = [key for key in sessions if assign(key, {"bad": 1.0, "sound": 1.0}, "s") == "bad"]
    with httpx.Client(base_url=f"{serve_address}/two", timeout=LONG_S, trust_env=False) as client:
        replies = [
            client.post(ROUTES[0], json={}, headers={"x-session-id": key}) for key in bad[: FAILURES_TO_EJECT + 5]
        ]
        health = client.get("/health").json()
    statuses = [reply.status_code for reply in replies]
    assert statuses == [502] * FAILURES_TO_EJECT + [200] * 5
    assert {reply.headers["x-aerie-arm"] for reply in replies[FAILURES_TO_EJECT:]} == {"sound"}
    assert health["arms"]["bad"]["ejected"] is True
    assert health["arms"]["sound"]["ejected"] is False


def test_without_an_arm_the_endpoint_says_so_and_the_first_of_two_commands_gives_it_one(serve_address, monkeypatch):
    serve.run(Router.options(user_config=routing()).bind(), name="no-router", route_prefix="/no")
    reply = httpx.get(f"{serve_address}/no/health", trust_env=False, timeout=LONG_S)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_arm")
    monkeypatch.setattr(running, "ROUTER", "no-router")
    none, one, other = (Routing.model_validate(routing(**arms)) for arms in ({}, {"one": 1.0}, {"other": 1.0}))
    won, lost = with_epoch(one, none), with_epoch(other, none)
    assert running.replace_traffic(won) == won
    assert running.replace_traffic(lost) == won
    assert list(httpx.get(f"{serve_address}/no/health", trust_env=False, timeout=LONG_S).json()["arms"]) == ["one"]


def test_the_benchmark_measures_both_ways_on_one_arm(serve_address):
    serve.run(build_fast_arm(), name="fast-app", route_prefix=DIRECT)
    serve.run(Router.options(user_config=routing(fast=1.0)).bind(), name="timed-router", route_prefix=ROUTED)
    body = {"model": "m", "messages": [], "chunks": 4, "pace_s": 0.01}
    for timer in (time_request, time_chunks):
        began_s = time.perf_counter()
        direct_ms, routed_ms = asyncio.run(measure(serve_address, timer, 2, 3, body))
        assert len(direct_ms) == len(routed_ms) == 3
        assert min(direct_ms + routed_ms) > 0
        assert max(direct_ms + routed_ms) < 1000 * (time.perf_counter() - began_s)
    figures = httpx.get(f"{serve_address}{ROUTED}/metrics", trust_env=False, timeout=LONG_S).text
    assert f'aerie_requests_total{{arm="fast"}} {2 * 2 * (WARM_UP_ROUNDS + 3):.1f}' in figures, (
        "half of them came by it"
    )
