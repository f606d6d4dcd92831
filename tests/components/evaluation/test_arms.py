import importlib.util
import pickle

import pytest

from components.arm_config import ArmConfig
from components.evaluation import arms as arms_module
from components.evaluation.arms import (
    Arm,
    SyntheticArm,
    baseline_arm,
    baseline_arms,
    check_baselines,
    head_arm,
    refuse_synthetic,
    synthetic_arms,
)
from components.section import ConfigError


def arm_of(draft: dict[str, str] | None = None, **config: object) -> Arm:
    return baseline_arm("x", ArmConfig.model_validate(config), draft or {})


def test_a_head_is_served_as_eagle3_with_parallel_drafting() -> None:
    assert head_arm("candidate", "/heads/1", 3).speculative_config() == {
        "method": "eagle3",
        "model": "/heads/1",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }


def test_baselines_come_with_plain_decoding_first() -> None:
    arms = baseline_arms(
        {
            "ngram": ArmConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4),
            "none": ArmConfig(method="none"),
        }
    )

    assert [arm.name for arm in arms] == ["none", "ngram"]
    assert arms[0].speculative_config() is None
    assert arms[1].speculative_config() == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def test_a_released_head_is_named_at_the_commit_that_was_found() -> None:
    arm = arm_of(
        {"model": "org/head", "revision": "c0ffee"}, method="eagle3", model="org/head", num_speculative_tokens=2
    )

    assert arm.speculative_config() == {
        "method": "eagle3",
        "model": "org/head",
        "revision": "c0ffee",
        "num_speculative_tokens": 2,
    }


def test_what_was_found_stands_in_for_the_branch_that_was_given() -> None:
    given = {"method": "eagle", "model": "org/head", "revision": "main", "num_speculative_tokens": 2}
    assert arm_of({"model": "org/head", "revision": "c0ffee"}, **given).options["revision"] == "c0ffee"


def test_only_keys_that_differ_from_vllms_defaults_are_passed_on() -> None:
    assert arm_of(method="mtp", num_speculative_tokens=1, parallel_drafting=False).speculative_config() == {
        "method": "mtp",
        "num_speculative_tokens": 1,
    }


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"method": "peagle", "num_speculative_tokens": 3}, "model"),
        ({"method": "ngram", "num_speculative_tokens": 3, "model": "/x"}, "model"),
        ({"method": "ngram"}, "num_speculative_tokens"),
    ],
)
def test_an_arm_that_cannot_be_served_is_refused(arguments: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Arm("arm", **arguments)


@pytest.mark.parametrize("folder", ["/runs/eagle-1/small", "/runs/EAGLE3/small", "org/dflash-7b", "org/dspark_block7"])
def test_a_draft_that_vllm_would_take_for_another_methods_is_refused(folder: str) -> None:
    given = {"num_speculative_tokens": 3, "model": folder}
    with pytest.raises(ConfigError, match=r"evaluate\.baselines\.x\.model: vLLM would serve .* not by draft_model"):
        arm_of({"model": folder}, method="draft_model", **given)
    assert arm_of({"model": folder}, method="eagle3", **given).model == folder


def test_suffix_without_its_package_is_refused_by_the_packages_name(monkeypatch: pytest.MonkeyPatch) -> None:
    baselines = {
        "s": ArmConfig(method="suffix", num_speculative_tokens=3, suffix_decoding_max_cached_requests=0),
        "none": ArmConfig(method="none"),
    }
    installed = importlib.util.find_spec("arctic_inference") is not None
    if installed:
        check_baselines(baselines)
        monkeypatch.setattr(arms_module, "SUFFIX_MODULE", "a_module_that_is_not_there")
    with pytest.raises(ConfigError, match=r"evaluate\.baselines\.s\.method: .*arctic-inference.*pip install"):
        check_baselines(baselines)


def test_synthetic_acceptance_is_seen_and_refused_by_type() -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    synthetic = config | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    baselines = {"real": ArmConfig.model_validate(config), "load": ArmConfig.model_validate(synthetic)}

    assert [arm.is_synthetic for arm in baseline_arms(baselines)] == [False, True]
    assert synthetic_arms(baselines) == ["load"]
    refuse_synthetic([], "the router")
    with pytest.raises(SyntheticArm, match="the router refuses it") as caught:
        refuse_synthetic(["load"], "the router")
    assert caught.value.path == "evaluate.baselines.load.rejection_sample_method"
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), SyntheticArm)
