"""Every method that can be an arm, measured by the evaluation's own task on tiny models: do its counters say what it did?"""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm.config.speculative import SpeculativeConfig

from components.arm_config import KEYS
from components.draft.checkpoint import save_head
from components.evaluation.acceptance import total
from components.evaluation.arms import Arm, head_arm
from components.evaluation.job import Job
from components.evaluation.results import ArmResult, load_result
from components.evaluation.tasks import fresh_processes, measure_task
from components.storage import Location
from tests.cluster import RayHead
from tests.components.evaluation.artifacts import tiny_settings, write_responses
from tests.components.evaluation.heads import MASK_TOKEN, make_head
from tests.drafts import make_pard, make_tiny_eagle, make_tiny_mtp

K = 3
NUM_PROMPTS, NEW_TOKENS = 3, 24
LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
HAS_SUFFIX = importlib.util.find_spec("arctic_inference") is not None

Load = Callable[[str], ArmResult]


@pytest.fixture(scope="module")
def load(
    ray_cluster: RayHead, tmp_path_factory: pytest.TempPathFactory, permutation_target: tuple[Path, list[int]]
) -> Load:
    """Gives an arm's result, or raises what it ended with."""
    target, cycle = permutation_target
    folder = tmp_path_factory.mktemp("methods")
    # the whole cycle and a little more: what comes next can be looked up
    prompts = [[*cycle[i:], *cycle[:i], *cycle[i : i + 4]] for i in range(NUM_PROMPTS)]
    job = make_job(target, folder, prompts)
    errors: dict[str, Exception] = {}
    with fresh_processes(job) as processes:
        for path, arm in make_arms(folder, target):
            try:
                measured = dataclasses.replace(job, target_path=str(path))
                processes.run(arm.name, measure_task, measured, arm, True)
            except Exception as error:
                errors[arm.name] = error

    def result(name: str) -> ArmResult:
        if name in errors:
            raise errors[name]
        return load_result(job.arm_file(name))

    return result


def make_job(target: Path, folder: Path, prompts: list[list[int]]) -> Job:
    rows = [
        {"key": f"p-{i}", "family": "f", "split": "held_out", "prompt_ids": ids, "output_ids": [9]}
        for i, ids in enumerate(prompts)
    ]
    evaluate = {"num_prompts": NUM_PROMPTS, "max_new_tokens": NEW_TOKENS, "concurrency": 2}
    return Job(
        settings=tiny_settings(target, evaluate=evaluate),
        target_path=str(target),
        target_digest="target",
        vocab_size=320,
        responses=write_responses(folder / "responses", rows).location,
        output=Location(str(folder)),
    )


def make_arms(folder: Path, target: Path) -> list[tuple[Path, Arm]]:
    """(target, arm): every method on the target that walks a cycle, and mtp on a model that has such layers."""
    mtp = make_tiny_mtp(folder / "mtp-target")
    head = save_head(make_head(target, torch.arange(320), aux_layers=(1, 2, 4)), folder / "head")
    eagle = make_tiny_eagle(folder / "one-layer", target)
    pard = make_pard(folder / "pard", target, MASK_TOKEN)
    dynamic = {"num_speculative_tokens_per_batch_size": [[1, 1, K], [2, 8, 0]]}
    suffix = [(target, Arm("suffix", "suffix", K, None, {"suffix_decoding_max_cached_requests": 0}))]
    return [
        (target, Arm("none", "none")),
        (target, Arm("ngram", "ngram", K, None, LOOKUP)),
        (target, Arm("draft_model", "draft_model", K, str(target))),
        (target, Arm("pard", "draft_model", K, str(pard), {"parallel_drafting": True})),
        (target, Arm("eagle", "eagle", K, str(eagle))),
        (target, Arm("eagle3", "eagle3", K, str(head))),
        (target, Arm("dynamic", "eagle3", K, str(head), dynamic)),
        (target, head_arm("peagle", head, K)),
        (mtp, Arm("plain_mtp_target", "none")),
        (mtp, Arm("mtp", "mtp", K)),
        *(suffix if HAS_SUFFIX else []),
    ]


def figures(result: ArmResult) -> tuple[int, int, int]:
    sums = total(result.records)
    return sums.rounds, sums.drafted, sums.accepted


def test_every_key_is_one_of_vllms() -> None:
    keys = set().union(*KEYS.values())
    assert keys <= {field.name for field in dataclasses.fields(SpeculativeConfig)}


@pytest.mark.parametrize("name", ["draft_model", "pard", "eagle", "eagle3", "peagle", "mtp"])
def test_what_has_a_draft_proposes_k_tokens_in_every_round(load: Load, name: str) -> None:
    rounds, drafted, accepted = figures(load(name))
    assert rounds > 0
    assert drafted == K * rounds
    assert 0 <= accepted <= drafted


@pytest.mark.parametrize("name", ["ngram", "draft_model", "dynamic", "pard", "eagle", "eagle3", "peagle", "mtp"])
def test_requests_and_engine_count_the_same_and_no_answer_changes(load: Load, name: str) -> None:
    result, plain = load(name), load("plain_mtp_target" if name == "mtp" else "none")
    assert result.problems == ()  # the requests' counters sum to the engine's
    assert [answer.output_ids for answer in result.answers] == [answer.output_ids for answer in plain.answers]
    assert {answer.record.output_tokens for answer in result.answers} == {NEW_TOKENS}


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_drafts_that_are_right_are_all_accepted(load: Load, name: str) -> None:
    """The target as its own draft, and a text that only repeats: AL is K + 1."""
    assert total(load(name).records).acceptance_length == K + 1


def test_a_parallel_draft_sees_the_next_token_and_masks_after_it(load: Load) -> None:
    """PARD with the target's own weights, which were never trained on masks: the first draft is right, the others are not."""
    assert total(load("pard").records).acceptance_length == 2


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle"])
def test_drafts_of_random_weights_are_worth_little(load: Load, name: str) -> None:
    al = total(load(name).records).acceptance_length
    assert al is not None
    assert 1 <= al < 2


def test_dynamic_k_drafts_by_the_number_of_requests(load: Load) -> None:
    """Two at once draft nothing, the last one alone drafts K tokens."""
    rounds, drafted, accepted = figures(load("dynamic"))
    assert 0 < rounds < figures(load("eagle3"))[0]
    assert accepted < drafted == K * rounds


@pytest.mark.skipif(not HAS_SUFFIX, reason="arctic-inference is not installed; test_arms.py has the refusal")
def test_suffix_finds_what_the_text_repeats(load: Load) -> None:
    result = load("suffix")
    assert result.problems == ()
    assert (total(result.records).acceptance_length or 0) > 1.5
    assert [a.output_ids for a in result.answers] == [a.output_ids for a in load("none").answers]
