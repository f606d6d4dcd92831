"""What Serve is given for an arm of every method, read as a replica reads it: vLLM's own configuration, without an engine."""

from pathlib import Path

import pytest
from ray.llm._internal.serve.engines.vllm.vllm_engine import _get_vllm_engine_config
from vllm.config import VllmConfig

from components.config import Settings
from components.evaluation.arms import Arm
from components.serving.apps import ServedArm, Service, arm_application
from components.serving.arm_server import ArmArgs, arm_config
from tests.components.evaluation.test_methods import K, make_arms

METHODS = {
    "none": None,
    "ngram": "ngram",
    "draft_model": "draft_model",
    "pard": "draft_model",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "dynamic": "eagle3",
    "peagle": "eagle3",
    "mtp": "mtp",
}
"""What vLLM calls the method of each arm."""


@pytest.fixture(scope="module")
def arms(
    tmp_path_factory: pytest.TempPathFactory, permutation_target: tuple[Path, list[int]]
) -> dict[str, tuple[Path, Arm]]:
    return {arm.name: (path, arm) for path, arm in make_arms(tmp_path_factory.mktemp("arms"), permutation_target[0])}


def as_a_replica_reads_it(target: Path, arm: Arm) -> VllmConfig:
    settings = Settings.model_validate({"target": {"model": str(target), "dtype": "float32", "max_model_len": 256}})
    served = ServedArm(arm, 1.0)
    application = arm_application(Service(settings, target, [served]), served, {}, {})
    return _get_vllm_engine_config(arm_config(ArmArgs.model_validate(application["args"])))[1]


@pytest.mark.parametrize("name", METHODS)
def test_vllm_takes_what_serve_is_given(arms: dict[str, tuple[Path, Arm]], name: str) -> None:
    target, arm = arms[name]
    config = as_a_replica_reads_it(target, arm)
    assert config.model_config.model == str(target)
    speculative = config.speculative_config
    if METHODS[name] is None:
        assert speculative is None
        return
    assert (speculative.method, speculative.num_speculative_tokens) == (METHODS[name], K)
    assert speculative.parallel_drafting is (name in ("peagle", "pard"))
    assert bool(speculative.num_speculative_tokens_per_batch_size) is (name == "dynamic")
    assert config.observability_config.per_request_spec_decode_metrics == "summary"
