"""The KubeRay and `ray up` manifests fit their schemas, the settings they pass and the versions that are locked."""

import importlib
import itertools
import shlex
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.llm import LLMConfig
from ray.serve.schema import ServeDeploySchema

from components.config_loading import load_settings

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "clusters"
SCHEMA = yaml.safe_load((Path(__file__).parent / "kuberay_schema.yaml").read_text())
KUBERAY = ["kuberay-rayjob.yaml", "kuberay-rayservice.yaml"]


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTERS / name).read_text())


def cluster_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"].get("rayClusterSpec") or manifest["spec"]["rayClusterConfig"]


def pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = cluster_of(manifest)
    return [group["template"]["spec"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]]


@pytest.mark.parametrize("name", KUBERAY)
def test_a_kuberay_manifest_fits_the_schema_and_the_locked_ray(name: str) -> None:
    manifest = load(name)
    jsonschema.validate(manifest, SCHEMA)
    assert cluster_of(manifest)["rayVersion"] == version("ray")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda spec: spec.update(entryPoint="python x.py"),
        lambda spec: spec.pop("entrypoint"),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"].pop("rayStartParams"),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 2}),
        lambda spec: spec["rayClusterSpec"]["workerGroupSpecs"][0].update(nodeSelector={"a": "b"}),
        lambda spec: spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0].update(enV=[]),
    ],
)
def test_the_schema_finds_a_wrong_key(spoil: Any) -> None:
    manifest = deepcopy(load("kuberay-rayjob.yaml"))
    spoil(manifest["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMA)


@pytest.mark.parametrize("name", KUBERAY)
def test_every_pod_has_the_token_and_the_volumes_it_mounts(name: str) -> None:
    for pod in pods(load(name)):
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in pod["containers"]:
            names = {variable["name"] for variable in container["env"]}
            assert names >= {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"}
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes


def test_the_rayjob_entrypoint_is_a_command_that_the_settings_accept() -> None:
    words = shlex.split(load("kuberay-rayjob.yaml")["spec"]["entrypoint"])
    files = [ROOT / word.removeprefix("/aerie/") for word in words if word.startswith("/aerie/")]
    assert [file.name for file in files] == ["full.py", "ray_config.yaml", "h200.yaml"]
    overrides = [word for flag, word in itertools.pairwise(words) if flag == "--set"]
    settings = load_settings(files[1], files[2], overrides)
    assert Path(settings.storage.uri).is_absolute()


def test_the_rayservice_is_a_serve_config_that_builds_an_llm_deployment() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(load("kuberay-rayservice.yaml")["spec"]["serveConfigV2"]))
    (application,) = config.applications
    module, _, builder = application.import_path.partition(":")
    assert callable(getattr(importlib.import_module(module), builder))
    (llm,) = [LLMConfig(**tree) for tree in application.args["llm_configs"]]
    assert llm.engine_kwargs["speculative_config"]["parallel_drafting"] is True


def test_ray_accepts_the_cluster_that_ray_up_starts() -> None:
    config = prepare_config(load("ray-up.yaml"))
    validate_config(config)
    with pytest.raises(jsonschema.ValidationError):
        validate_config(config | {"setup_command": []})
