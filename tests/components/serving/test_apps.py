"""The declarative configuration: what an arm is started with, and what may change without a restart."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from ray.serve.schema import ServeDeploySchema

from components.config import Settings, StageResources
from components.evaluation.arms import Arm, SyntheticArm, head_arm
from components.publishing.bundle import HEAD_FILES
from components.section import ConfigError
from components.serving import apps
from components.serving.apps import (
    ServedArm,
    Service,
    application_name,
    arm_application,
    make_routing,
    router_application,
)
from components.serving.cores import BIND_CORES, own_cores
from components.serving.listing import with_routing
from components.serving.routing import Routing
from components.serving.stages import ab_service
from components.stage import Artifact
from components.storage import Location

TARGET = Path("/models/target")


def make_service(weights=(0.5, 0.5), **settings):
    arms = [
        ServedArm(Arm("none", "none"), weights[0]),
        ServedArm(head_arm("challenger", "/heads/h", 3), weights[1], "abc"),
    ]
    return Service(Settings.model_validate({"target": {"model": "bundled:small"}} | settings), TARGET, arms)


def arm_args(service, index):
    return arm_application(service, service.arms[index], {}, {})["args"]


def router(service):
    return router_application(make_routing(service, service.arms), "r", {})


def test_acceptance_is_measured_on_speculative_arms_only():
    service = make_service()
    plain, speculative = arm_args(service, 0)["engine"], arm_args(service, 1)["engine"]
    assert "per_request_spec_decode_metrics" not in plain
    assert "speculative_config" not in plain
    assert speculative["per_request_spec_decode_metrics"] == "summary"
    assert speculative["speculative_config"] == service.arms[1].arm.speculative_config()
    assert "model" not in plain, "the deployment names the model"


def test_every_arm_has_the_switches_of_the_chat_template():
    switches = {"enable_thinking": False}
    service = make_service(target={"model": "bundled:small", "chat_template_kwargs": switches})
    assert [arm_args(service, i)["engine"]["default_chat_template_kwargs"] for i in (0, 1)] == [switches] * 2
    assert "default_chat_template_kwargs" not in arm_args(make_service(), 0)["engine"]


@pytest.mark.parametrize(
    ("num_cpus", "staying", "leaving", "cores"),
    [
        (1, [], [], "4"),
        (1, ["4"], [], "5"),
        (1, ["4", "5"], [], "4"),
        (1, ["5"], ["4"], "4"),
        (1, [], ["4"], "5"),
        (2, [], [], "4,5"),
        (8, ["4,5,6"], [], "4,5,6"),
    ],
)
def test_every_cpu_arm_has_cores_of_its_own_as_long_as_there_are_any(monkeypatch, num_cpus, staying, leaving, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5, 6} if num_cpus > 1 else {4, 5})
    assert own_cores(StageResources(num_cpus=num_cpus), staying, leaving) == {BIND_CORES: cores}


def test_cores_that_the_user_chose_stay_and_a_gpu_needs_none():
    assert own_cores(StageResources(env={BIND_CORES: "7"}), []) == own_cores(StageResources(num_gpus=1), []) == {}
    service = make_service(resources={"ab": {"env": {BIND_CORES: "7"}}})
    assert [arm_args(service, i)["env"][BIND_CORES] for i in (0, 1)] == ["7", "7"]


def test_an_application_is_named_by_what_it_serves():
    service = make_service()
    head = service.arms[1]
    same = [
        dataclasses.replace(head, weight=0.1),
        dataclasses.replace(head, arm=head_arm("champion", "/elsewhere/h", 3), head="v7-abc"),
    ]
    other = [
        dataclasses.replace(head, head="v7-def"),
        dataclasses.replace(head, arm=head_arm("challenger", "/heads/h", 5)),
    ]
    name = application_name(service, head)
    assert name.startswith("aerie-arm-abc-")
    assert [application_name(service, arm) for arm in same] == [name] * 2
    longer = make_service(target={"model": "bundled:small", "max_model_len": 512})
    others = [*(application_name(service, arm) for arm in other), application_name(longer, head)]
    assert len({name, *others}) == 4


def test_without_a_digest_the_drafts_path_tells_one_application_from_another():
    service = make_service()
    arms = [ServedArm(head_arm("a", folder, 3), 1.0) for folder in ("/heads/a", "/heads/b")]
    assert application_name(service, arms[0]) != application_name(service, arms[1])


@pytest.mark.parametrize(
    ("num_gpus", "bundles"),
    [
        (1, [{"GPU": 1.0, "CPU": 4.0}]),
        (2, [{"GPU": 1.0, "CPU": 2.0}] * 2),
        (0.5, [{"GPU": 0.5, "CPU": 4.0}]),
    ],
)
def test_an_arm_asks_for_a_bundle_a_gpu(num_gpus, bundles):
    args = arm_args(make_service(resources={"ab": {"num_gpus": num_gpus, "num_cpus": 4}}), 0)
    assert args["bundles"] == bundles
    assert BIND_CORES not in args["env"]


def test_new_weights_change_the_routers_user_config_and_nothing_else():
    before, after = make_service((0.5, 0.5)), make_service((0.9, 0.1))
    assert [arm_args(before, i) for i in (0, 1)] == [arm_args(after, i) for i in (0, 1)]
    assert router(before)["args"] == router(after)["args"]
    assert router(before)["deployments"] != router(after)["deployments"]


def test_a_router_with_other_code_takes_over_while_the_old_one_ends_its_streams():
    service = make_service(ab={"drain_timeout_s": 77.0})
    (deployment,) = router(service)["deployments"]
    assert (deployment["graceful_shutdown_timeout_s"], deployment["max_surge_percent"]) == (77.0, 100)
    rerouted = with_routing(router(make_service()), make_routing(service, service.arms))
    assert rerouted["deployments"][0]["graceful_shutdown_timeout_s"] == 77.0


def test_a_router_of_another_version_still_understands_its_traffic():
    service = make_service()
    said = router(service)["deployments"][0]["user_config"]
    assert "drain_timeout_s" not in said, "a default is no news"
    newer = said | {"something": 1, "arms": {n: a | {"something": 1} for n, a in said["arms"].items()}}
    assert Routing.model_validate(newer) == make_routing(service, service.arms)


def test_the_router_refuses_an_arm_that_accepts_by_chance():
    synthetic = Arm("load", "ngram", 3, options={"rejection_sample_method": "synthetic"})
    service = make_service()
    service = Service(service.settings, TARGET, [*service.arms, ServedArm(synthetic, 0.0)])
    assert arm_args(service, 2)["engine"]["speculative_config"]["rejection_sample_method"] == "synthetic"
    with pytest.raises(SyntheticArm, match="the router refuses it"):
        router(service)


def test_arms_of_the_evaluation_get_their_share_of_the_traffic(tmp_path):
    baselines = {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
        "released": {"method": "eagle3", "num_speculative_tokens": 2, "model": "org/head", "revision": "main"},
    }
    settings = Settings.model_validate(
        {
            "evaluate": {"baselines": baselines},
            "ab": {"challenger_weight": 0.3, "arms": {"ngram": 0.2, "released": 0.1}},
        }
    )
    service = ab_service(settings, stage_inputs(tmp_path, {"released": {"model": "org/head", "digest": "c0ffee" * 5}}))
    assert [(arm.name, round(arm.weight, 3), arm.head) for arm in service.arms if arm.name != "challenger"] == [
        ("none", 0.4, "none"),
        ("ngram", 0.2, "none"),
        ("released", 0.1, ("c0ffee" * 5)[:12]),
    ]
    assert arm_args(service, 3)["engine"]["speculative_config"] == {
        "method": "eagle3",
        "model": "org/head",
        "revision": "c0ffee" * 5,
        "num_speculative_tokens": 2,
    }


def test_the_control_cannot_have_a_second_share(tmp_path):
    settings = Settings.model_validate({"ab": {"arms": {"none": 0.2}}})
    with pytest.raises(ConfigError, match=r"ab\.arms\.none: it is the control already"):
        ab_service(settings, stage_inputs(tmp_path, {}))


def stage_inputs(folder, drafts):
    """What `ab` reads before it starts anything; there is no champion."""
    head = folder / "head"
    head.mkdir()
    for name in HEAD_FILES:
        (head / name).write_text("{}")
    facts = {
        "target": {"model": "m", "path": "/models/target"},
        "incumbent": {"version": None},
        "drafts": {"drafts": drafts},
        "evaluation": {"candidate": {"place": "head"}},
    }
    return {
        name: Artifact(name, Location(str(folder)), name, {"facts": facts.get(name, {}), "files": {}, "digest": name})
        for name in ("target", "head", "incumbent", "drafts", "evaluation")
    }


def test_only_the_router_has_a_route():
    service = make_service()
    applications = [arm_application(service, arm, {}, {}) for arm in service.arms] + [router(service)]
    assert [application["route_prefix"] for application in applications] == [None, None, "/"]
    assert json.loads(json.dumps(applications)) == applications
    ServeDeploySchema.model_validate({"applications": applications})


@pytest.mark.parametrize(
    ("model", "name"),
    [("bundled:small", "small"), ("org/model-7b", "org/model-7b"), ("/models/mine/", "mine"), ("./mine", "mine")],
)
def test_requests_name_the_model_as_people_do(model, name):
    assert Service(Settings.model_validate({"target": {"model": model}}), TARGET, []).model == name


def test_the_revision_covers_all_code_that_runs_inside_serve():
    folder = Path(apps.__file__).parent
    served, left = set(), {"arm_server", "router"}
    while left:
        name = left.pop()
        served.add(name)
        imports = re.findall(
            r"^from components\.serving\.(\w+) import", (folder / f"{name}.py").read_text(), re.MULTILINE
        )
        left |= set(imports) - served
    assert served == set(apps.SERVED_CODE)


def test_the_first_arm_is_what_the_kill_switch_leaves():
    assert make_routing(make_service(), make_service().arms).control == "none"


def test_secrets_travel_as_the_path_of_their_file(tmp_path):
    (tmp_path / "token").write_text("of-the-operators\n")
    service = make_service(ab={"admin_token_file": str(tmp_path / "token")})
    assert router(service)["deployments"][0]["user_config"]["admin_token_file"] == str(tmp_path / "token")
    assert "of-the-operators" not in json.dumps(router(service))


@pytest.mark.parametrize("text", [None, "", "# only a comment\n"])
@pytest.mark.parametrize("setting", ["api_keys_file", "admin_token_file"])
def test_a_file_without_a_secret_is_refused_with_its_setting(tmp_path, text, setting):
    if text is not None:
        (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=f"ab.{setting}"):
        router(make_service(ab={setting: str(tmp_path / "keys")}))
