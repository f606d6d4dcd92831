"""Two vLLM arms behind the router, as the A/B stage serves them: sticky, named, weighed live, measured, removed."""

import dataclasses
import json
import re
import time

import httpx
import psutil
import pytest
from ray import serve

from components.config import ExperimentConfig
from components.evaluation.acceptance import RequestRecord, total
from components.evaluation.arms import head_arm
from components.experiment.conduct import ask_health, conduct
from components.experiment.journal import Plan, open_journal
from components.experiment.monitor import Arms
from components.experiment.policy import Action
from components.section import ConfigError
from components.serving import room
from components.serving.apps import ServedArm
from components.serving.assignment import assign
from components.serving.deploy import deploy, teardown
from components.serving.listing import DeploymentFailed, connect
from components.serving.records import decode_records
from components.serving.stages import ab_stage
from components.stage import Output
from components.storage import Location
from components.target.chat import load_tokenizer, render
from tests.components.serving.conftest import TOKEN, K
from tests.components.serving.faulty import FaultyArm
from tests.conftest import free_port

CHAT = "/v1/chat/completions"
SESSIONS = [f"session-{i}" for i in range(16)]


def ask(client, session=None, route=CHAT, **changes):
    text = {"messages": [{"role": "user", "content": "hello"}]} if route == CHAT else {"prompt": "hello"}
    headers = {"x-session-id": session} if session else {}
    return client.post(route, json=text | {"max_tokens": 4, "temperature": 0} | changes, headers=headers)


def arms_of(client):
    return {key: ask(client, key).headers["x-aerie-arm"] for key in SESSIONS}


def arm_processes():
    """The arms' replicas and the engines that they started."""
    applications = connect().get_serve_details()["applications"]
    deployments = [d for name in applications if "-arm-" in name for d in applications[name]["deployments"].values()]
    replicas = [psutil.Process(replica["pid"]) for d in deployments for replica in d["replicas"]]
    return {process for replica in replicas for process in [replica, *replica.children(recursive=True)]}


def reweighted(deployed, **weights):
    arms = [dataclasses.replace(arm, weight=weights[arm.name]) for arm in deployed.service.arms]
    return dataclasses.replace(deployed.service, arms=arms)


def test_sessions_stay_with_the_arm_that_their_key_and_the_weights_give(deployed, client):
    weights = {arm.name: arm.weight for arm in deployed.service.arms}
    expected = {key: assign(key, weights, deployed.settings.ab.salt) for key in SESSIONS}
    assert arms_of(client) == expected == arms_of(client)
    assert set(expected.values()) == {"none", "challenger"}


def test_user_is_the_session_of_a_request_without_the_header(client):
    for key in SESSIONS[:4]:
        assert ask(client, user=key).headers["x-aerie-arm"] == ask(client, key).headers["x-aerie-arm"]


@pytest.mark.parametrize("route", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("arm", ["none", "challenger"])
def test_every_answer_names_its_arm_and_head_streamed_or_not(deployed, client, route, arm):
    head = {served.name: served.head for served in deployed.service.arms}[arm]
    text = {"messages": [{"role": "user", "content": "hello"}]} if route == CHAT else {"prompt": "hello"}
    for extra in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
        reply = client.post(route, json=text | {"max_tokens": 4} | extra, headers={"x-aerie-arm": arm})
        assert reply.status_code == 200, reply.text
        assert (reply.headers["x-aerie-arm"], reply.headers["x-aerie-head"]) == (arm, head)
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["aerie"] == {"arm": arm, "head": head}
    last = json.loads(events[-2])
    assert last["usage"]["completion_tokens"] == 4
    assert bool(last.get("metrics")) == (arm == "challenger")


@pytest.mark.parametrize("arm", ["none", "challenger"])
def test_an_arm_writes_the_prompts_that_the_target_was_answered_with(client, served_target, arm):
    tokenizer, messages = load_tokenizer(served_target), [{"role": "user", "content": "hello"}]
    lengths = [len(render(tokenizer, messages, template_kwargs={"brief": value})) for value in (True, False)]
    assert lengths[0] > lengths[1]
    for own, length in zip(({}, {"chat_template_kwargs": {"brief": False}}), lengths, strict=True):
        body = {"messages": messages, "max_tokens": 1} | own
        reply = client.post(CHAT, json=body, headers={"x-aerie-arm": arm})
        assert reply.json()["usage"]["prompt_tokens"] == length


def test_speculation_does_not_change_the_greedy_text(client):
    texts = {
        arm: client.post(
            CHAT,
            json={"messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "temperature": 0},
            headers={"x-aerie-arm": arm},
        ).json()["choices"][0]["message"]["content"]
        for arm in ("none", "challenger")
    }
    assert texts["none"]
    assert texts["none"] == texts["challenger"]


@pytest.mark.parametrize(
    "changes",
    [
        {"messages": 5},
        {"messages": [{"role": "user", "content": "word " * 400}]},
        {"messages": [{"role": "nobody", "content": "x"}]},
        {"max_tokens": -1},
        {"messages": [{"role": "user", "content": "word " * 400}], "stream": True},
    ],
)
def test_what_the_engine_refuses_is_the_clients_error(client, changes):
    reply = ask(client, **changes)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"]
    assert reply.headers["x-aerie-arm"] in ("none", "challenger")


def test_content_in_parts_is_understood(client):
    parts = [{"type": "text", "text": "hello"}]
    assert ask(client, messages=[{"role": "user", "content": parts}]).status_code == 200


def test_the_port_is_open_on_loopback_only(deployed):
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    addresses = {c.laddr.ip for c in listening if c.laddr.port == deployed.settings.ab.port}
    assert addresses == {"127.0.0.1"}


def test_weights_change_live_without_a_restart(deployed, client):
    before = arm_processes()
    assert len(before) >= 4  # two replicas and their engines
    deploy(reweighted(deployed, none=1.0, challenger=0.0))
    assert set(arms_of(client).values()) == {"none"}
    deploy(deployed.service)
    assert set(arms_of(client).values()) == {"none", "challenger"}
    assert arm_processes() == before


def test_an_operators_change_is_live_is_kept_and_restarts_nothing(deployed, client):
    serve.run(FaultyArm.bind("good"), name="foreign", route_prefix="/foreign")
    before, calm = arm_processes(), client.get("/health").json()
    header = {"Authorization": f"Bearer {TOKEN}"}
    try:
        changed = client.post("/admin/arms/challenger", json={"state": "shadow"}, headers=header)
        assert changed.status_code == 200, changed.text
        assert set(arms_of(client).values()) == {"none"}
        wait_until(lambda: figures(client)["aerie_shadow_requests_total", "challenger"] >= len(SESSIONS))
        kept = connect().get_serve_details()["applications"]["aerie-router"]["deployed_app_config"]
        (deployment,) = kept["deployments"]
        assert deployment["user_config"]["arms"]["challenger"]["state"] == "shadow"
        assert deployment["user_config"]["weight_epoch"] == changed.json()["weight_epoch"] > calm["weight_epoch"]
        assert client.get("/foreign", follow_redirects=True).status_code != 404, "what others serve is left alone"
        assert client.post("/admin/kill", headers=header).json()["arms"]["challenger"]["state"] == "killed"
        assert client.post("/admin/kill").status_code == 401
    finally:
        serve.delete("foreign")
    deploy(deployed.service)
    assert set(arms_of(client).values()) == {"none", "challenger"}
    assert arm_processes() == before


def figures(client):
    """{(metric, arm): value} of the lines of `/metrics` whose only label is the arm."""
    lines = [re.fullmatch(r'(\w+)\{arm="(\w+)"\} (\S+)', line) for line in client.get("/metrics").text.splitlines()]
    return {(line[1], line[2]): float(line[3]) for line in lines if line}


def wait_until(happens):
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_stage_measures_each_arm_and_takes_up_where_it_was(deployed, client, tmp_path):
    reported = {}
    folder = tmp_path / "ab" / "f"
    output = Output("ab", Location(str(folder)), "f", lambda figures, step: reported.update(figures))
    stage = ab_stage(deployed.settings)
    before, engines = figures(client), arm_processes()
    facts = stage.run(deployed.inputs, output).facts
    text = (folder / "requests.jsonl").read_text()
    records = [RequestRecord(**json.loads(line)) for line in text.splitlines()]
    assert (facts["requests"], facts["errors"]) == (12, 0) == (len(records), 0)
    assert (facts["control"], facts["challenger"]) == ("none", "challenger")
    plain, ours = facts["arms"]["none"], facts["arms"]["challenger"]
    assert plain["requests"] + ours["requests"] == 12
    assert plain["al"] is None
    assert ours["rounds"] > 0
    assert ours["drafted"] == ours["rounds"] * K
    assert ours["al"] == total(r for r in records if r.arm == "challenger").acceptance_length >= 1
    assert reported["ab/challenger/al"] == ours["al"]
    assert "bread" not in text
    check_live_figures(tmp_path / "live", facts["arms"], before, figures(client))
    weights = {name: arm["weight"] for name, arm in client.get("/health").json()["arms"].items()}
    assert weights == {"none": 1.0, "challenger": 0.0}, "nobody has judged the challenger yet"

    kept = {path: path.stat().st_mtime_ns for path in (folder / "_sessions").iterdir()}
    lost = sorted(kept)[0]
    lost.unlink()
    again = stage.run(deployed.inputs, output).facts
    assert (again["requests"], again["arms"]["none"]["sessions"]) == (12, plain["sessions"])
    after = {path: path.stat().st_mtime_ns for path in (folder / "_sessions").iterdir()}
    assert {path for path in kept if kept[path] != after[path]} == {lost}
    deploy(deployed.service)
    assert arm_processes() == engines


def test_the_stage_leaves_another_models_endpoint_alone(deployed, client, tmp_path):
    target = deployed.settings.target.model_copy(update={"model": str(tmp_path / "another-model")})
    stage = ab_stage(deployed.settings.model_copy(update={"target": target}))
    before = client.get("/health").json()
    with pytest.raises(ConfigError, match=r"target\.model: the endpoint .* serves target, .* lose it to another-model"):
        stage.run(deployed.inputs, Output("ab", Location(str(tmp_path)), "f", lambda figures, step: None))
    assert client.get("/health").json() == before


def check_live_figures(folder, arms, before, after):
    """What the client counted, what the router recorded and what its metrics gained are equal, to the token."""
    wait_until(lambda: len(live_rows(folder)) == 12)
    rows = live_rows(folder)
    for arm, figures_of in arms.items():
        mine = [row for row in rows if row.arm == arm]
        assert {row.task for row in mine} <= {"f0", "f1"}
        assert not any(row.failed or row.forced or row.shadow for row in mine)
        for name, metric in (
            ("prompt_tokens", "prompt_tokens"),
            ("output_tokens", "output_tokens"),
            ("rounds", "rounds"),
            ("drafted", "drafted_tokens"),
            ("accepted", "accepted_tokens"),
        ):
            gained = after[f"aerie_{metric}_total", arm] - before[f"aerie_{metric}_total", arm]
            assert sum(getattr(row, name) for row in mine) == figures_of[name] == gained, (arm, name)
        assert len(mine) == figures_of["requests"]


def live_rows(folder):
    return [row for path in folder.rglob("*.jsonl") for row in decode_records(path.read_bytes())]


def test_an_arm_that_cannot_take_over_says_why_and_the_others_serve_on(deployed, client, tmp_path):
    before = arm_processes()
    broken = ServedArm(head_arm("broken", tmp_path / "no-head-here", K), 1.0)
    with pytest.raises(DeploymentFailed, match="no-head-here"):
        deploy(dataclasses.replace(deployed.service, arms=[broken]))
    assert set(arms_of(client).values()) == {"none", "challenger"}
    wait_until(lambda: len(connect().get_serve_details()["applications"]) == 3)
    deploy(deployed.service)
    assert set(client.get("/health").json()["arms"]) == {"none", "challenger"}
    assert arm_processes() == before


def test_without_room_for_a_second_copy_nothing_changes_and_the_fix_is_named(deployed, client, monkeypatch):
    monkeypatch.setattr(room, "ROOM_TIMEOUT_S", 0.5)
    before = arm_processes()
    resources = deployed.settings.resources
    large = resources.model_copy(update={"ab": resources.ab.model_copy(update={"num_cpus": 1000.0})})
    settings = deployed.settings.model_copy(update={"resources": large})
    with pytest.raises(ConfigError, match=r"resources\.ab: there is no room .* nothing was changed.* --allow-gap"):
        deploy(dataclasses.replace(deployed.service, settings=settings))
    assert set(arms_of(client).values()) == {"none", "challenger"}
    assert arm_processes() == before


def test_the_endpoint_does_not_move_to_another_address_by_accident(deployed, client):
    elsewhere = deployed.settings.ab.model_copy(update={"port": free_port()})
    settings = deployed.settings.model_copy(update={"ab": elsewhere})
    with pytest.raises(ConfigError, match=r"ab\.port: the endpoint is up at .*--allow-gap to move it"):
        deploy(dataclasses.replace(deployed.service, settings=settings))
    assert client.get("/health").status_code == 200


def test_an_experiment_reads_what_the_router_records_and_traffic_follows_its_end(deployed, client, tmp_path):
    """The control never speculates, so there is nothing to gain: the planned end is the end."""
    records = Location(str(tmp_path / "live"))
    before = arm_processes()
    deploy(dataclasses.replace(deployed.service, records=records))
    policy = ExperimentConfig(max_requests=len(SESSIONS), session_idle_s=60, poll_s=0.2)
    plan = Plan("heads", 2, 1, "d" * 64, policy.model_dump(mode="json"), time.time())
    journal = open_journal(Location(str(tmp_path)), plan)
    expected = arms_of(client)
    arms = Arms("challenger", "none")
    decision, monitor = conduct(
        journal, arms, records, lambda: ask_health(deployed.service.address), lambda *look: None
    )
    found = monitor.findings()
    assert decision.action == Action.STOP_FUTILE
    assert found.sessions == {name: list(expected.values()).count(name) for name in ("challenger", "none")}
    assert found.al["challenger"] >= 1
    assert found.al["none"] is None
    assert list(journal.shares.values()) == [0.5]
    deploy(reweighted(deployed, none=1.0, challenger=0.0))
    assert set(arms_of(client).values()) == {"none"}
    deploy(deployed.service)
    assert arm_processes() == before


def test_teardown_leaves_nothing_but_what_others_serve(deployed):
    serve.run(FaultyArm.bind("good"), name="foreign", route_prefix="/foreign")
    deploy(reweighted(deployed, none=0.4, challenger=0.6))
    processes = arm_processes()
    teardown()
    assert set(connect().get_serve_details()["applications"]) == {"foreign"}
    _, left = psutil.wait_procs(processes, timeout=120)
    assert not left, "engines outlive their application"
    serve.delete("foreign")
    teardown()
    assert connect().get_serve_details()["applications"] == {}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{deployed.service.address}/health", trust_env=False)
