"""The router's HTTP API over real HTTP, in front of arms of this process."""

import json
import logging
import socket
import threading
import time

import httpx
import pytest

from components.serving import api
from components.serving.access import SecretFile
from components.serving.api import MAX_REQUESTS
from components.serving.assignment import Sessions, assign
from components.serving.ejection import FAILURES_TO_EJECT, Ejector
from components.serving.records import decode_records
from components.serving.router import Router
from components.serving.routing import ArmChange, ArmState, change_arms
from tests.components.serving.faulty import NUM_CHUNKS, PACE_S, SPECULATION, USAGE, Faulty
from tests.components.serving.local import CHAT, LONG_S, THREAD, local_router, routing_to, wait_until

TOKEN = "operators-only"
SESSIONS = [f"session-{i}" for i in range(40)]
SHORT_S = 1.0
"""Long enough for a first event, on a busy machine too."""


@pytest.fixture
def two():
    """Arms a and b, half of the sessions each."""
    with local_router({"a": Faulty(), "b": Faulty()}, routing_to("a", "b")) as router:
        yield router


@pytest.fixture
def admin(tmp_path):
    """Arms a, b, c; operators may change them; a is the control."""
    (tmp_path / "token").write_text(f"# of the operators\n{TOKEN}\n")
    routing = routing_to("a", "b", "c", admin_token_file=str(tmp_path / "token"), control="a")
    with local_router({name: Faulty() for name in "abc"}, routing) as router:
        yield router


def change(router, path, token=TOKEN, **body):
    return router.client.post(f"/admin/{path}", json=body, headers={"Authorization": f"Bearer {token}"})


def arms_of(router, sessions=SESSIONS):
    return {key: router.ask(session=key).headers["x-aerie-arm"] for key in sessions}


def events(reply):
    return [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]


def is_openai_error(reply, status):
    error = reply.json()["error"]
    return reply.status_code == status and {"message", "type", "param", "code"} <= set(error)


def test_a_stream_names_its_arm_in_the_header_and_in_its_first_event(two):
    reply = two.ask(stream=True, headers={"x-aerie-arm": "b"})
    shown = events(reply)
    assert (reply.headers["x-aerie-arm"], reply.headers["x-aerie-head"]) == ("b", "b-head")
    assert json.loads(shown[0])["aerie"] == {"arm": "b", "head": "b-head"}
    assert json.loads(shown[0])["choices"][0]["delta"]["content"] == "x"
    assert all("aerie" not in json.loads(event) for event in shown[1:-1])


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (None, False),
        ({"include_usage": False}, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False),
        ({"include_usage": True}, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True),
    ],
)
def test_usage_is_asked_upstream_and_shown_to_those_who_asked(two, options, shown):
    extra = {} if options is None else {"stream_options": options}
    reply = two.ask(stream=True, headers={"x-aerie-arm": "a"}, **extra)
    asked = two.arms["a"].bodies[-1]["stream_options"]
    assert asked["include_usage"] is True
    assert bool(asked.get("continuous_usage_stats")) == shown * bool((options or {}).get("continuous_usage_stats"))
    assert ("usage" in reply.text) == shown
    assert len(events(reply)) == NUM_CHUNKS + shown + 1
    assert two.figure("aerie_accepted_tokens_total", arm="a") == SPECULATION["num_accepted_draft_tokens"]


def test_an_answer_that_is_no_stream_is_asked_as_it_is(two):
    two.ask(headers={"x-aerie-arm": "a"}, temperature=0.5)
    assert two.arms["a"].bodies == [{"do": "good", "temperature": 0.5, "model": "m"}]


def test_metrics_are_the_sums_of_what_the_arms_said(two):
    for _ in range(3):
        assert two.ask(headers={"x-aerie-arm": "a"}).status_code == 200
    two.ask(stream=True, headers={"x-aerie-arm": "a"})
    two.ask("refuse", headers={"x-aerie-arm": "a"})
    two.ask("crash", headers={"x-aerie-arm": "a"})
    wanted = {
        "requests": 6,
        "errors": 1,
        "refused": 1,
        "rounds": 4 * SPECULATION["num_spec_steps"],
        "drafted_tokens": 4 * SPECULATION["num_draft_tokens"],
        "accepted_tokens": 4 * SPECULATION["num_accepted_draft_tokens"],
        "prompt_tokens": 4 * USAGE["prompt_tokens"],
        "output_tokens": 4 * USAGE["completion_tokens"],
    }
    assert {name: two.figure(f"aerie_{name}_total", arm="a") for name in wanted} == wanted
    assert [two.figure("aerie_accepted_at_total", arm="a", position=str(i)) for i in (1, 2, 3)] == [24, 12, 4]
    assert two.figure("aerie_errors_total", arm="a", code="arm_failed") == 1
    assert two.figure("aerie_ttft_seconds_count", arm="a") == two.figure("aerie_tpot_seconds_count", arm="a") == 1
    assert two.figure("aerie_requests_total", arm="b") == 0
    assert 'aerie_requests_total{arm="b"} 0.0' in two.client.get("/metrics").text, "a rate needs the zero"
    assert two.figure("aerie_arm_weight", arm="a") == 1
    assert two.figure("aerie_arm_running", arm="a") == 0


def test_ttft_and_tpot_are_those_of_the_stream(two):
    asked_s = time.perf_counter()
    two.ask(stream=True, headers={"x-aerie-arm": "a"})
    took_s = time.perf_counter() - asked_s
    first_s = two.figure("aerie_ttft_seconds_sum", arm="a")
    spent_s = two.figure("aerie_tpot_seconds_sum", arm="a") * (USAGE["completion_tokens"] - 1)
    assert spent_s >= (NUM_CHUNKS - 1) * PACE_S
    assert 0 < first_s <= took_s - spent_s


@pytest.mark.parametrize(
    ("do", "status", "stream"),
    [
        ("empty", 502, False),
        ("no_tokens", 502, False),
        ("end_token_only", 200, False),
        ("empty_stream", 200, True),
        ("stopped_at_once", 200, True),
    ],
)
def test_an_answer_with_nothing_to_read_counts_as_the_arms_error(two, do, status, stream):
    assert two.ask(do, stream=stream, headers={"x-aerie-arm": "a"}).status_code == status
    assert two.figure("aerie_errors_total", arm="a", code="empty_answer") == 1


@pytest.mark.parametrize(
    ("do", "stream", "ejects"),
    [
        ("end_token_only", False, False),
        ("cut_short", False, False),
        ("stopped_at_once", True, False),
        ("no_tokens", False, True),
        ("empty_stream", True, True),
    ],
)
def test_a_client_cannot_eject_an_arm_by_asking_for_an_empty_answer(two, do, stream, ejects):
    for _ in range(FAILURES_TO_EJECT):
        two.ask(do, stream=stream, headers={"x-aerie-arm": "a"})
    assert two.figure("aerie_errors_total", arm="a", code="empty_answer") == FAILURES_TO_EJECT
    assert two.client.get("/health").json()["arms"]["a"]["ejected"] is ejects


def test_an_answer_that_is_no_json_is_a_failure_in_the_figures_too(two):
    assert is_openai_error(two.ask("no_number", headers={"x-aerie-arm": "a"}), 502)
    assert two.figure("aerie_errors_total", arm="a", code="arm_failed") == 1


@pytest.mark.parametrize("do", ["broken_event", "no_event"])
def test_a_stream_that_cannot_be_read_is_the_arms_failure_and_no_client_that_left(two, do):
    reply = two.ask(do, stream=True, headers={"x-aerie-arm": "a"})
    assert json.loads(events(reply)[-2])["error"]["code"] == "arm_failed"
    assert events(reply)[-1] == "[DONE]"
    assert two.figure("aerie_errors_total", arm="a", code="arm_failed") == 1
    assert two.figure("aerie_client_closed_total", arm="a") == 0


def test_an_empty_header_is_no_header(two):
    by_user = two.ask(user="u").headers["x-aerie-arm"]
    reply = two.ask(user="u", headers={"x-session-id": "", "x-aerie-arm": "", "x-aerie-task": ""})
    assert (reply.status_code, reply.headers["x-aerie-arm"]) == (200, by_user)


def test_requests_that_no_arm_was_asked_for_are_counted_apart(admin):
    assert admin.figure("aerie_rejected_total", code="no_arm") == 0
    assert 'aerie_rejected_total{code="no_arm"} 0.0' in admin.client.get("/metrics").text, "a rate needs the zero"
    admin.client.post(CHAT, content=b"{")
    for arm in "abc":
        change(admin, f"arms/{arm}", state="paused")
    assert admin.ask().status_code == 503
    assert admin.figure("aerie_rejected_total", code="invalid_json") == 1
    assert admin.figure("aerie_rejected_total", code="no_arm") == 1
    assert admin.figure("aerie_requests_total") == 0


def test_clients_of_a_stuck_arm_leave_room_for_operators(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "MAX_REQUESTS", 2)
    (tmp_path / "token").write_text(TOKEN)
    routing = routing_to("a", "b", admin_token_file=str(tmp_path / "token"), control="a")
    with local_router({"a": Faulty(), "b": Faulty()}, routing) as router:
        texts = ([], [])
        streams = [threading.Thread(target=read_into, args=(router, text, "b")) for text in texts]
        for stream in streams:
            stream.start()
        wait_until(lambda: all(texts))
        reply = router.ask(headers={"x-aerie-arm": "a"})
        assert is_openai_error(reply, 503)
        assert (reply.json()["error"]["code"], reply.headers["retry-after"]) == ("overloaded", "1")
        assert router.figure("aerie_rejected_total", code="overloaded") == 1
        assert router.client.get("/health").status_code == change(router, "kill").status_code == 200
        for stream in streams:
            stream.join(LONG_S)
        assert router.ask().status_code == 200
    assert Router.max_ongoing_requests > MAX_REQUESTS, "Serve itself lets operators in"


def test_a_client_that_leaves_while_it_sends_is_no_fault_of_the_router(two, caplog):
    host, port = two.client.base_url.host, two.client.base_url.port
    with socket.create_connection((host, port)) as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    wait_until(lambda: two.figure("aerie_rejected_total", code="client_closed") == 1)
    ours = [record for record in caplog.records if record.threadName == THREAD]
    assert [record for record in ours if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{not json", {}, 400),
        (b"\xff\xfe{}", {}, 400),
        (b"", {}, 400),
        (b"[1]", {}, 400),
        (b'{"temperature": NaN}', {}, 400),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, {}, 400),
        (b'{"user": "\\ud800"}', {}, 400),
        (b'{"stream": "yes"}', {}, 400),
        (b'{"stream": true, "stream_options": [1]}', {}, 400),
        (b'{"user": {"a": 1}}', {}, 400),
        (b'{"n": ' + b"9" * 5000 + b"}", {}, 400),
        (b'{"model": "other"}', {}, 404),
        (b'{"model": ["m"]}', {}, 404),
        (b"{}", {"x-aerie-arm": "nobody"}, 404),
        (b'{"prompt": "' + b"x" * 2000 + b'"}', {}, 413),
    ],
)
def test_a_body_that_cannot_be_used_is_an_openai_error(content, headers, status):
    with local_router(
        {"a": Faulty("good")}, routing_to("a", max_body_bytes=1000 if status == 413 else 2_000_000)
    ) as router:
        reply = router.client.post(CHAT, content=content, headers=headers)
        assert is_openai_error(reply, status), reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert router.arms["a"].bodies == []
        assert router.client.post(CHAT, json={}).status_code == 200


def test_a_long_body_without_a_declared_length_is_refused_too():
    with local_router({"a": Faulty("good")}, routing_to("a", max_body_bytes=1000)) as router:
        reply = router.client.post(CHAT, content=(b"x" * 400 for _ in range(10)))
        assert is_openai_error(reply, 413)


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", CHAT, 405)])
def test_a_wrong_path_is_an_openai_error(two, method, path, status):
    assert is_openai_error(two.client.request(method, path), status)


def test_a_fault_of_the_router_itself_has_the_same_shape(two):
    two.arms = None
    reply = two.client.post(CHAT, json={"do": "good"})
    assert is_openai_error(reply, 500)


def test_keys_let_clients_in_and_change_with_their_file(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    with local_router({"a": Faulty("good")}, routing_to("a", api_keys_file=str(keys))) as router:
        assert is_openai_error(router.ask(), 401)
        assert is_openai_error(router.client.get("/v1/models"), 401)
        for header in ("Bearer third", "Basic first", "first", "Bearer", "Bearer first extra"):
            assert router.ask(headers={"Authorization": header}).status_code == 401, header
        assert router.ask(headers={"Authorization": "Bearer second"}).status_code == 200
        assert router.client.get("/health").status_code == router.client.get("/metrics").status_code == 200
        keys.write_text("third key\n")
        assert router.ask(headers={"Authorization": "Bearer second"}).status_code == 401
        assert router.ask(headers={"Authorization": "Bearer third key"}).status_code == 200
        keys.unlink()
        assert router.ask(headers={"Authorization": "Bearer third key"}).status_code == 401


def test_a_file_without_secrets_admits_nobody(tmp_path):
    (tmp_path / "empty").write_text("# nothing\n\n")
    assert not SecretFile(str(tmp_path / "empty")).admits("")


def test_operators_need_their_token(admin, two, caplog):
    for token in ("none", TOKEN[:-1], TOKEN + "x"):
        assert is_openai_error(change(admin, "arms/b", token=token, weight=0), 401)
        assert is_openai_error(change(admin, "kill", token=token), 401)
    assert is_openai_error(change(two, "kill"), 404), "without a token nobody is an operator"
    assert change(admin, "arms/b", weight=2).status_code == 200
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("arms/b", {"weight": -1}, 400),
        ("arms/b", {"state": "asleep"}, 400),
        ("arms/b", {"head": "x"}, 400),
        ("arms/nobody", {"weight": 1}, 404),
    ],
)
def test_a_change_that_makes_no_sense_changes_nothing(admin, path, body, status):
    before = admin.client.get("/health").json()
    assert is_openai_error(change(admin, path, **body), status)
    assert admin.client.get("/health").json() == before
    assert admin.kept == []


def test_a_weight_changes_live_and_is_kept(admin):
    before = arms_of(admin)
    reply = change(admin, "arms/c", weight=4)
    assert reply.json()["arms"]["c"]["weight"] == 4
    after = arms_of(admin)
    assert {after[key] for key in SESSIONS if before[key] != after[key]} == {"c"}
    assert after == {key: assign(key, {"a": 1, "b": 1, "c": 4}, "s") for key in SESSIONS}
    (kept,) = admin.kept
    assert (kept.arms["c"].weight, kept.weight_epoch) == (4, reply.json()["weight_epoch"])
    assert kept.weight_epoch > 1


def test_of_two_operators_who_saw_the_same_traffic_one_wins_and_the_other_is_told(admin):
    seen = admin.client.get("/health").json()["weight_epoch"]
    replies = []
    operators = [
        threading.Thread(target=lambda w=weight: replies.append(change(admin, "arms/b", weight=w, weight_epoch=seen)))
        for weight in (3, 5)
    ]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join()
    won, lost = sorted(replies, key=lambda reply: reply.status_code)
    assert (won.status_code, lost.status_code) == (200, 409)
    assert is_openai_error(lost, 409)
    error, health = lost.json()["error"], admin.client.get("/health").json()
    assert (error["code"], error["param"]) == ("weight_epoch_changed", "weight_epoch")
    assert f"it is {health['weight_epoch']} now" in error["message"]
    assert health == won.json()
    again = change(admin, "arms/b", weight=7, weight_epoch=health["weight_epoch"])
    assert again.json()["arms"]["b"] == {"weight": 7, "head": "b-head", "state": "serving", "ejected": False}
    assert change(admin, "kill").status_code == 200, "whatever was changed meanwhile"


def test_a_paused_arm_gets_no_request_until_it_serves_again(admin):
    before = arms_of(admin)
    change(admin, "arms/b", state="paused")
    paused = arms_of(admin)
    assert set(paused.values()) == {"a", "c"}
    assert all(paused[key] == before[key] for key in SESSIONS if before[key] != "b")
    assert is_openai_error(admin.ask(headers={"x-aerie-arm": "b"}), 503)
    change(admin, "arms/b", state="serving")
    assert arms_of(admin) == before


def test_a_draining_arm_keeps_its_sessions_until_they_fall_silent(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    routing = routing_to("a", "b", admin_token_file=str(tmp_path / "token"))
    now = [0.0]
    sessions = Sessions(idle_s=100, clock=lambda: now[0])
    with local_router({"a": Faulty(), "b": Faulty()}, routing, sessions=sessions) as router:
        known = arms_of(router)
        assert change(router, "arms/b", state="draining").status_code == 200
        assert arms_of(router) == known
        assert set(arms_of(router, [f"new-{i}" for i in range(30)]).values()) == {"a"}
        assert router.client.get("/health").json()["arms"]["b"]["sessions"] == list(known.values()).count("b")
        now[0] = 101.0
        assert router.client.get("/health").json()["arms"]["b"]["sessions"] == 0
        assert set(arms_of(router).values()) == {"a"}


def test_a_shadow_sees_a_copy_and_never_answers(tmp_path):
    shadow = Faulty()
    routing = routing_to("a", "s:shadow", records=str(tmp_path))
    with local_router({"a": Faulty(), "s": shadow}, routing) as router:
        assert set(arms_of(router, SESSIONS[:5]).values()) == {"a"}
        assert router.ask(stream=True, session="k").headers["x-aerie-arm"] == "a"
        assert is_openai_error(router.ask(headers={"x-aerie-arm": "s"}), 503)
        wait_until(lambda: router.figure("aerie_shadow_requests_total", arm="s") == 6)
        assert shadow.bodies == router.arms["a"].bodies
        assert router.figure("aerie_requests_total", arm="s") == 0
        assert router.figure("aerie_rounds_total", arm="s") == 6 * SPECULATION["num_spec_steps"]
        shadow.always = "crash"
        assert router.ask(session="k").status_code == 200
    records = read_records(tmp_path)
    assert [r.arm for r in records if not r.shadow] == ["a"] * 7
    assert [(r.arm, r.assigned_arm) for r in records if r.shadow] == [("s", "a")] * 7


def test_a_failing_shadow_is_no_failing_arm():
    with local_router({"a": Faulty(), "s": Faulty("crash")}, routing_to("a", "s:shadow")) as router:
        assert router.ask().status_code == 200
        # Nobody waits for a copy: the arm must not change its ways before this one has ended.
        wait_until(lambda: router.figure("aerie_shadow_errors_total", arm="s", code="arm_failed") == 1)
        router.arms["s"].always = "refuse"
        assert router.ask().status_code == 200
        wait_until(lambda: router.figure("aerie_shadow_errors_total", arm="s", code="400") == 1)
        assert router.figure("aerie_shadow_requests_total", arm="s") == 2
        assert router.figure("aerie_errors_total") == router.figure("aerie_refused_total", arm="s") == 0


def test_a_shadow_that_cannot_be_asked_does_not_hold_up_the_answer(monkeypatch):
    with local_router({"a": Faulty()}, routing_to("a", "s:shadow")) as router:
        ask = router._ask

        def fail(application, route, body):
            if application == "s":
                raise RuntimeError("of Serve")
            return ask(application, route, body)

        monkeypatch.setattr(router.gateway, "_ask", fail)
        assert router.ask().status_code == 200
        assert router.figure("aerie_shadow_dropped_total", arm="s") == 1


def test_a_slow_shadow_does_not_hold_up_the_answer():
    with local_router({"a": Faulty("good"), "s": Faulty("hang")}, routing_to("a", "s:shadow")) as router:
        for _ in range(40):
            assert router.ask().status_code == 200
        assert router.figure("aerie_arm_running", arm="s") == 32, "nobody has waited for them"
        assert router.figure("aerie_shadow_dropped_total", arm="s") == 8
        router.configure(routing_to("a", "s:killed", weight_epoch=2, replaces=1))
        wait_until(lambda: router.figure("aerie_arm_running", arm="s") == 0)


def test_the_kill_switch_leaves_the_control_and_cuts_off_what_runs(admin):
    texts = ([], [])
    streams = [threading.Thread(target=read_into, args=(admin, texts[i], arm)) for i, arm in enumerate("ab")]
    for thread in streams:
        thread.start()
    wait_until(lambda: all(texts))
    assert change(admin, "kill").status_code == 200
    streams[1].join(LONG_S)
    assert "arm_killed" in texts[1][-1]
    assert texts[1][-1].endswith("data: [DONE]\n\n")
    assert set(arms_of(admin).values()) == {"a"}
    assert streams[0].is_alive(), "the control goes on"
    assert admin.kept[-1].arms["c"].state == "killed"
    change(admin, "arms/a", state="killed")
    streams[0].join(LONG_S)
    assert is_openai_error(admin.ask(), 503)


def read_into(router, texts, arm):
    """Streams from an arm that hangs after its first event; another connection than the tests' own."""
    with (
        httpx.Client(base_url=router.client.base_url, timeout=30, trust_env=False) as client,
        client.stream(
            "POST", CHAT, json={"do": "hang_in_stream", "stream": True}, headers={"x-aerie-arm": arm}
        ) as reply,
    ):
        for text in reply.iter_text():
            texts.append(text)


def test_without_a_control_the_kill_switch_refuses(tmp_path):
    (tmp_path / "token").write_text(TOKEN)
    with local_router({"a": Faulty()}, routing_to("a", admin_token_file=str(tmp_path / "token"))) as router:
        assert is_openai_error(change(router, "kill"), 409)
        assert router.ask().status_code == 200


def test_a_change_that_cannot_be_kept_is_live_and_says_so(admin, monkeypatch):
    async def fail(routing):
        raise ConnectionError

    monkeypatch.setattr(admin.gateway, "_keep", fail)
    reply = change(admin, "arms/b", weight=0)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "not_kept")
    assert "b" not in arms_of(admin).values()


def test_what_serve_says_late_does_not_undo_an_operators_change(admin):
    first = change_arms(admin.gateway.live(), {"b": ArmChange(weight=0.5)})
    assert change(admin, "arms/b", weight=0.5).status_code == 200
    assert change(admin, "kill").status_code == 200
    admin.configure(admin.kept[0])
    wait_until(lambda: len(admin.kept) == 3)
    assert admin.kept[2] == admin.kept[1], "Serve is told what is live"
    assert first.arms == admin.kept[0].arms
    assert admin.client.get("/health").json()["arms"]["b"]["state"] == "killed"
    admin.configure(admin.kept[1])
    later = change_arms(admin.gateway.live(), {"b": ArmChange(state="serving")})
    admin.configure(later)
    assert admin.client.get("/health").json()["arms"]["b"]["state"] == "serving"


def test_a_killed_arm_is_cut_off_under_its_old_name_too():
    arms = {"v1": Faulty(), "v2": Faulty()}
    routing = routing_to("challenger", "champion")
    both = {
        name: arm.model_copy(update={"app": app}) for (name, arm), app in zip(routing.arms.items(), arms, strict=True)
    }
    with local_router(arms, routing.model_copy(update={"arms": both})) as router:
        texts = ([], [])
        names = ("challenger", "champion")
        streams = [
            threading.Thread(target=read_into, args=(router, text, name))
            for text, name in zip(texts, names, strict=True)
        ]
        for thread in streams:
            thread.start()
        wait_until(lambda: all(texts))
        renamed = {
            "champion": both["challenger"],
            "previous": both["champion"].model_copy(update={"state": ArmState.KILLED}),
        }
        router.configure(routing.model_copy(update={"arms": renamed, "weight_epoch": 2, "replaces": 1}))
        streams[1].join(LONG_S)
        assert "arm_killed" in texts[1][-1]
        assert streams[0].is_alive(), "its engine is not the killed one"
        router.configure(routing_to("champion:killed", app="v1", weight_epoch=3, replaces=2))
        streams[0].join(LONG_S)
        assert "arm_killed" in texts[0][-1]


def test_another_engine_takes_over_an_arm_and_what_runs_on_the_old_one_ends_there():
    arms = {"v1": Faulty(), "v2": Faulty()}
    with local_router(arms, routing_to("champion", app="v1")) as router:
        assert router.client.get("/health").json()["oldest_running_at"] is None
        asked_at = time.time()
        with router.client.stream("POST", CHAT, json={"do": "held_stream", "stream": True}) as running:
            assert router.client.get("/health").json()["leaving"] == {}
            assert asked_at <= router.client.get("/health").json()["oldest_running_at"] <= time.time()
            router.configure(routing_to("champion", app="v2", weight_epoch=2, replaces=1))
            assert router.client.get("/health").json()["leaving"] == {"v1": 1}
            assert router.ask().status_code == 200
            arms["v1"].may_end = True
            assert running.read().endswith(b"data: [DONE]\n\n")
        assert router.client.get("/health").json()["leaving"] == {}
        assert router.client.get("/health").json()["oldest_running_at"] is None
    assert [len(arm.bodies) for arm in arms.values()] == [1, 1]


def test_an_engine_that_takes_over_an_arm_starts_without_the_old_ones_failures():
    with local_router({"v1": Faulty("crash"), "v2": Faulty()}, routing_to("champion", app="v1")) as router:
        assert [router.ask().status_code for _ in range(FAILURES_TO_EJECT)] == [502] * FAILURES_TO_EJECT
        assert router.client.get("/health").json()["arms"]["champion"]["ejected"] is True
        router.configure(routing_to("champion", app="v2", weight_epoch=2, replaces=1))
        assert router.client.get("/health").json()["arms"]["champion"]["ejected"] is False


def test_a_failing_arm_is_ejected_its_sessions_move_and_come_back(tmp_path):
    now = [0.0]
    ejector = Ejector(ejected_s=10, clock=lambda: now[0])
    arms = {"a": Faulty("good"), "b": Faulty("crash")}
    with local_router(arms, routing_to("a", "b", records=str(tmp_path)), ejector=ejector) as router:
        key = next(key for key in SESSIONS if assign(key, {"a": 1, "b": 1}, "s") == "b")
        statuses = [router.ask(session=key).status_code for _ in range(FAILURES_TO_EJECT + 2)]
        assert statuses == [502] * FAILURES_TO_EJECT + [200] * 2
        assert router.figure("aerie_arm_ejected", arm="b") == 1
        assert router.client.get("/health").json()["arms"]["b"]["ejected"] is True
        now[0] = 11.0
        assert [router.ask(session=key).status_code for _ in range(2)] == [502, 200], "one request probes"
        arms["b"].always = "refuse"
        now[0] = 22.0
        assert [router.ask(session=key).status_code for _ in range(2)] == [400, 200], "a refusal brings nobody back"
        arms["b"].always = "good"
        now[0] = 33.0
        replies = [router.ask(session=key) for _ in range(3)]
        assert [reply.headers["x-aerie-arm"] for reply in replies] == ["b"] * 3
        assert router.figure("aerie_arm_ejected", arm="b") == 0
    records = read_records(tmp_path)
    assert {record.assigned_arm for record in records} == {"b"}, "by the weights nothing changed"
    assert {(r.arm, r.head, r.assigned_head) for r in records} == {(arm, f"{arm}-head", "b-head") for arm in "ab"}
    assert [r.arm for r in records if not r.error] == ["a", "a", "a", "a", "b", "b", "b"]


def test_a_stream_that_began_before_its_arm_failed_does_not_bring_it_back(two):
    at_b = {"x-aerie-arm": "b"}
    with two.client.stream("POST", CHAT, json={"do": "held_stream", "stream": True}, headers=at_b) as running:
        for _ in range(FAILURES_TO_EJECT):
            assert two.ask("crash", headers=at_b).status_code == 502
        two.arms["b"].may_end = True
        assert running.read().endswith(b"data: [DONE]\n\n")
    assert two.client.get("/health").json()["arms"]["b"]["ejected"] is True
    assert two.ask(headers=at_b).status_code == 200
    assert two.client.get("/health").json()["arms"]["b"]["ejected"] is False


def test_records_hold_figures_and_no_text(tmp_path):
    routing = routing_to("a", "b", records=str(tmp_path), weight_epoch=7)
    with local_router({"a": Faulty(), "b": Faulty()}, routing) as router:
        secret = "the prompt of somebody"
        for stream in (False, True):
            body = {"stream": stream, "messages": [{"role": "user", "content": secret}]}
            router.ask(session="somebody", headers={"x-aerie-task": "code:edit"}, **body)
        router.ask("crash", session="somebody", headers={"x-aerie-task": secret})
        router.ask("refuse", session="somebody", headers={"x-aerie-arm": "b"})
    whole, streamed, crashed, refused = read_records(tmp_path)
    assert whole.session == streamed.session == crashed.session
    arm = assign("somebody", {"a": 1, "b": 1}, "s")
    assert (whole.arm, whole.assigned_arm, whole.weight_epoch, whole.task) == (arm, arm, 7, "code:edit")
    assert whole.head == whole.assigned_head == f"{arm}-head"
    for record in (whole, streamed):
        assert record.histogram == SPECULATION["acceptance_histogram"]
        assert (record.rounds, record.drafted, record.accepted) == (10, 30, 10)
        assert (record.prompt_tokens, record.output_tokens) == (7, 20)
        assert record.error is None
        assert not record.failed
    assert whole.ttft_s is None
    assert 0 < streamed.ttft_s < streamed.duration_s
    assert streamed.tpot_s > 0
    assert (crashed.error, crashed.failed, crashed.task) == ("arm_failed", True, None)
    assert (refused.error, refused.failed, refused.forced, refused.arm) == ("400", False, True, "b")
    text = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert "somebody" not in text


def test_a_request_counts_as_running_until_its_record_can_be_read(tmp_path):
    blocked = tmp_path / "live"
    blocked.write_text("a file where the folder should be")
    with local_router({"a": Faulty()}, routing_to("a", records=str(blocked))) as router:
        wait_until(lambda: router.client.get("/health").json()["oldest_running_at"] is None)
        asked_at = time.time()
        router.ask()
        assert asked_at <= router.client.get("/health").json()["oldest_running_at"] <= time.time()
        blocked.unlink()
        wait_until(lambda: router.client.get("/health").json()["oldest_running_at"] is None)
        assert len(read_records(blocked)) == 1


def test_a_request_begins_when_it_was_read_for_until_then_health_cannot_know_of_it(tmp_path):
    sent_at = []

    def slowly():
        yield b'{"do": '
        time.sleep(0.1)
        sent_at.append(time.time())
        yield b'"good"}'

    with local_router({"a": Faulty()}, routing_to("a", records=str(tmp_path / "live"))) as router:
        assert router.client.post(CHAT, content=slowly()).status_code == 200
    (record,) = read_records(tmp_path)
    assert record.started_at >= sent_at[0]


def test_a_client_that_leaves_is_no_fault_of_the_arm(tmp_path):
    with local_router({"a": Faulty()}, routing_to("a", records=str(tmp_path))) as router:
        with pytest.raises(httpx.ReadTimeout):
            router.client.post(CHAT, json={"do": "hang_in_stream", "stream": True}, timeout=SHORT_S)
        wait_until(lambda: router.figure("aerie_client_closed_total", arm="a") == 1)
        assert router.arms["a"].cancelled == 1
        assert router.figure("aerie_errors_total", arm="a") == 0
    (record,) = read_records(tmp_path)
    assert (record.error, record.failed) == ("client_closed", False)


def test_an_arm_that_is_not_there_is_an_error_with_its_reason():
    with local_router({}, routing_to("gone")) as router:
        reply = router.ask()
        assert is_openai_error(reply, 503)
        assert reply.json()["error"]["code"] == "arm_unavailable"
        assert router.figure("aerie_errors_total", arm="gone", code="arm_unavailable") == 1


def test_an_arm_that_is_not_there_loses_its_sessions():
    with local_router({"a": Faulty("good")}, routing_to("gone", "a")) as router:
        key = next(key for key in SESSIONS if assign(key, {"gone": 1, "a": 1}, "s") == "gone")
        statuses = [router.ask(session=key).status_code for _ in range(FAILURES_TO_EJECT + 1)]
        assert statuses == [503] * FAILURES_TO_EJECT + [200]


def read_records(folder):
    return [record for path in sorted(folder.rglob("*.jsonl")) for record in decode_records(path.read_bytes())]
