"""What an arm may say: every method's keys, and a message with the fix for the rest."""

from pathlib import Path
from typing import Any

import pytest

from components.arm_config import KEYS, ArmConfig
from components.config import Settings
from components.config_loading import load_settings
from components.section import ConfigError

CONFIG = Path(__file__).resolve().parents[2] / "ray_config.yaml"
HEAD = {"model": "org/head", "num_speculative_tokens": 3}
ARMS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0},
    "draft_model": HEAD | {"parallel_drafting": True, "draft_tensor_parallel_size": 1},
    "eagle": HEAD | {"revision": "main"},
    "eagle3": HEAD | {"num_speculative_tokens_per_batch_size": [[1, 8, 3], [9, 64, 0]]},
    "peagle": {"model": "registry:aerie-head@champion", "num_speculative_tokens": 7},
    "mtp": {"num_speculative_tokens": 1},
}


def refusal(arm: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(CONFIG, None, [f"evaluate.baselines.x={arm}".replace("'", '"').replace("True", "true")])
    assert caught.value.path.startswith("evaluate.baselines.x")
    return str(caught.value)


@pytest.mark.parametrize("method", KEYS)
def test_every_method_can_be_an_arm_beside_the_head(method: str) -> None:
    arm = ArmConfig.model_validate({"method": method} | ARMS[method])
    assert Settings.model_validate({"evaluate": {"baselines": {"none": {"method": "none"}, "x": arm}}})
    assert arm.stated().keys() | {"model"} >= ARMS[method].keys()


@pytest.mark.parametrize("key", sorted({"model"} | set().union(*KEYS.values())))
def test_a_key_that_the_method_does_not_take_is_refused_with_those_that_do(key: str) -> None:
    values: dict[str, Any] = {"model": "m", "revision": "r", "num_speculative_tokens_per_batch_size": [[1, 1, 1]]}
    values |= {"rejection_sample_method": "synthetic", "parallel_drafting": True, "disable_padded_drafter_batch": True}
    said = refusal({"method": "none", key: values.get(key, 1)})
    takers = [method for method, keys in KEYS.items() if key in keys]
    assert f"a none arm does not take {key}" in said
    assert said.endswith(f"it goes with {', '.join(takers)})")


@pytest.mark.parametrize(
    ("method", "fix"),
    [
        ("peegle", "did you mean peagle?"),
        ("p-eagle", "did you mean peagle?"),
        ("EAGLE-3", "did you mean eagle3?"),
        ("n_gram", "did you mean ngram?"),
        ("pard", "write method draft_model with parallel_drafting true"),
        ("deepseek_mtp", "write method mtp"),
        ("medusa", "use one of none, ngram, suffix"),
    ],
)
def test_a_guessed_method_is_refused_with_the_closest_one(method: str, fix: str) -> None:
    assert f"{method!r} is no method. Fix: {fix}" in refusal({"method": method})


@pytest.mark.parametrize(
    ("arm", "problem", "fix"),
    [
        (
            {"method": "eagle3", "tensor_parallel_size": 2},
            "tensor_parallel_size is no key",
            "draft_tensor_parallel_size",
        ),
        ({"method": "ngram", "temperature": 0.5}, "temperature is no key", "data.temperature"),
        ({"method": "peagle", "pipeline_parallel_size": 2}, "pipeline_parallel_size is no key", "one pipeline stage"),
        ({"method": "eagle"}, "needs num_speculative_tokens", "set it"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "a draft_model arm needs model", "name a folder"),
        (
            {"method": "suffix", "num_speculative_tokens": 3},
            "depend on suffix_decoding_max_cached_requests",
            "state it",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5, "prompt_lookup_max": 2},
            "prompt_lookup_min 5 is above prompt_lookup_max 2",
            "swap",
        ),
        ({"method": "peagle", **HEAD, "disable_padded_drafter_batch": True}, "padded batches only", "remove"),
        (
            {"method": "peagle", **HEAD, "num_speculative_tokens_per_batch_size": [[1, 8, 3]]},
            "slots are fixed at K",
            "each K as an arm of its own",
        ),
        (
            ARMS["draft_model"] | {"method": "draft_model", "num_speculative_tokens_per_batch_size": [[1, 8, 3]]},
            "slots are fixed at K",
            "remove",
        ),
        ({"method": "eagle3", **HEAD, "parallel_drafting": True}, "is a P-EAGLE head", "write method peagle"),
        ({"method": "peagle", **HEAD, "model": "registry:head"}, "names no head", "registry:NAME@ALIAS"),
        ({"method": "eagle3", **HEAD, "model": "registry:head@champion"}, "holds P-EAGLE heads", "write method peagle"),
        (
            {"method": "peagle", **HEAD, "model": "registry:h@1", "revision": "x"},
            "no revision",
            "registry:NAME@VERSION",
        ),
        ({"method": "mtp", "num_speculative_tokens": 1, "revision": "x"}, "revision goes with model", "name a"),
        ({"method": "eagle", **HEAD, "rejection_sample_method": "block"}, "'block' is not usable", "'synthetic'"),
        ({"method": "eagle", **HEAD, "rejection_sample_method": "synthetic"}, "needs synthetic_acceptance_length", "4"),
        ({"method": "eagle", **HEAD, "synthetic_acceptance_length": 2}, "goes with rejection_sample_method", "remove"),
        (
            {"method": "eagle", **HEAD, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 5},
            "more than K + 1",
            "between 1 and 4",
        ),
        (
            {"method": "eagle", **HEAD, "num_speculative_tokens_per_batch_size": [[2, 8, 3]]},
            "leaves batch size 1 out",
            "begin at 1",
        ),
        (
            {"method": "eagle", **HEAD, "num_speculative_tokens_per_batch_size": [[1, 8, 3], [8, 9, 1]]},
            "leaves batch size 9 out or names it twice",
            "no gap",
        ),
        (
            {"method": "eagle", **HEAD, "num_speculative_tokens_per_batch_size": [[1, 8, 4]]},
            "above num_speculative_tokens",
            "raise that one",
        ),
        ({"method": "eagle", **HEAD, "num_speculative_tokens_per_batch_size": []}, "without an entry", "remove"),
    ],
)
def test_what_vllm_would_refuse_or_take_for_something_else(arm: dict[str, Any], problem: str, fix: str) -> None:
    said, _, mended = refusal(arm).partition(". Fix: ")
    assert problem in said
    assert fix in mended


def test_an_unknown_key_of_an_arm_is_named_with_its_closest() -> None:
    assert "evaluate.baselines.x.modle: unknown setting. Fix: did you mean model?" in refusal(
        {"method": "eagle3", "modle": "m"}
    )


@pytest.mark.parametrize("stage", ["evaluate", "ab"])
@pytest.mark.parametrize(
    ("engine", "fix"),
    [
        (
            "{pipeline_parallel_size: 2}",
            "pipeline_parallel_size and P-EAGLE do not go together. Fix: use tensor_parallel",
        ),
        ("{speculative_config: {method: ngram}}", "plain decoding too. Fix: name an arm in evaluate.baselines"),
    ],
)
def test_engines_that_no_arm_can_run_on_are_refused(stage: str, engine: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"resources\.{stage}\.engine\.") as caught:
        load_settings(CONFIG, None, [f"resources.{stage}.engine={engine}"])
    assert fix in str(caught.value)


@pytest.mark.parametrize("stage", ["responses", "features", "evaluate", "ab"])
@pytest.mark.parametrize(
    ("engine", "fix"),
    [
        ("{dtype: float16}", "dtype would change the target in one stage only. Fix: set target.dtype"),
        ("{model: other}", "Fix: set target.model"),
        ("{seed: 3}", "seed is the same for every engine of a run. Fix: remove it"),
    ],
)
def test_engine_arguments_that_another_setting_gives_are_refused(stage: str, engine: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"resources\.{stage}\.engine\.") as caught:
        load_settings(CONFIG, None, [f"resources.{stage}.engine={engine}"])
    assert fix in str(caught.value)


def test_synthetic_acceptance_needs_a_gpu() -> None:
    arm = "evaluate.baselines.x={method: ngram, num_speculative_tokens: 3, rejection_sample_method: synthetic, synthetic_acceptance_length: 2}"
    assert load_settings(CONFIG, None, [arm, "resources.evaluate.num_gpus=1"])
    with pytest.raises(ConfigError, match=r"needs a GPU.*Fix: set resources\.evaluate\.num_gpus"):
        load_settings(CONFIG, None, [arm])


def test_a_draft_is_spread_like_the_target_or_not_at_all() -> None:
    arm = "evaluate.baselines.x={method: eagle3, model: m, num_speculative_tokens: 3, draft_tensor_parallel_size: 4}"
    wide = [f"resources.{stage}.engine.tensor_parallel_size=4" for stage in ("evaluate", "ab")]
    assert load_settings(CONFIG, None, [arm, *wide])
    with pytest.raises(ConfigError, match=r"x\.draft_tensor_parallel_size is neither 1 nor the target's 1"):
        load_settings(CONFIG, None, [arm, wide[0]])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ab.arms.ngrm=0.1"], r"ab\.arms\.ngrm is no arm of evaluate\.baselines\. Fix: use one of none, ngram"),
        (["ab.arms.ngram=0.5"], r"leave nothing for the control"),
        (["ab.arms.ngram=0"], r"ab\.arms\.ngram: 0 is not usable"),
    ],
)
def test_traffic_goes_to_arms_that_exist_and_leaves_some_for_the_control(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(CONFIG, None, overrides)
