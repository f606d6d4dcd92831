"""The oracle: a target that walks a cycle, a head that knows it, and one whose labels are late by one token.

One run of the evaluation stage on real engines: plain decoding, n-gram, the oracle as the candidate, and as champion the same weights
trained on labels shifted by one.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from components.config import GateConfig
from components.draft.checkpoint import save_head
from components.evaluation.metrics import metrics_of_evaluation
from components.evaluation.results import load_result
from components.evaluation.stages import evaluation_stage
from components.evaluation.summary import evaluation_verdict, load_arm
from components.publishing.bundle import head_digest
from components.publishing.regression import is_reproduced, regression_stage
from components.section import ConfigError
from components.stage import Artifact, Output
from components.storage import Location
from tests.cluster import RayHead
from tests.components.evaluation.artifacts import make_artifact, target_artifact, tiny_settings, write_responses
from tests.components.evaluation.heads import make_permutation_heads

K = 4
VOCAB = 320
NUM_PROMPTS, NEW_TOKENS = 6, 24


def make_prompt(cycle: list[int], number: int) -> list[int]:
    return [9 + number, 40, *cycle[number : number + 3]]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, permutation_target: tuple[Path, list[int]]) -> tuple[Path, Path]:
    """The oracle, and one that drafts every token a place too late."""
    path, cycle = permutation_target
    prompts = [make_prompt(cycle, i) for i in range(NUM_PROMPTS)]
    oracle, late = make_permutation_heads(path, cycle, prompts, NEW_TOKENS, K)
    folder = tmp_path_factory.mktemp("heads")
    return save_head(oracle, folder / "oracle" / "head"), save_head(late, folder / "late" / "head")


@pytest.fixture(scope="module")
def stage_inputs(
    tmp_path_factory: pytest.TempPathFactory, permutation_target: tuple[Path, list[int]], heads: tuple[Path, Path]
) -> dict[str, Artifact]:
    path, cycle = permutation_target
    oracle, late = heads
    rows = [
        {
            "key": f"p-{i}",
            "family": f"family-{i % 2}",
            "split": "held_out" if i < NUM_PROMPTS else "train",
            "prompt_ids": make_prompt(cycle, i),
            "output_ids": (cycle * 2)[i + 3 : i + 20],
        }
        for i in range(NUM_PROMPTS + 3)
    ]
    incumbent = {"version": 7, "head_digest": head_digest(late), "num_speculative_tokens": K}
    return {
        "target": target_artifact(path, VOCAB),
        "responses": write_responses(tmp_path_factory.mktemp("data") / "responses", rows),
        "head": make_artifact("head", oracle.parent, {}),
        "incumbent": make_artifact("incumbent", late.parent, incumbent),
        "drafts": make_artifact("drafts", oracle.parent, {"drafts": {}}),
    }


def write_benchmark(folder: Path) -> Path:
    """Questions with an answer, one of them in two turns, and one that cannot be judged."""
    rows = [{"question": f"{i}+{i}?", "answer": f"#### {2 * i}"} for i in range(4)]
    rows.append({"turns": ["1+1?", "And 2+2?"], "answer": "2", "task": "chains"})
    rows.append({"messages": [{"role": "user", "content": "Hi"}]})
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "sums.jsonl"


@pytest.fixture(scope="module")
def evaluation(
    ray_cluster: RayHead,
    tmp_path_factory: pytest.TempPathFactory,
    permutation_target: tuple[Path, list[int]],
    stage_inputs: dict[str, Artifact],
) -> Artifact:
    settings = tiny_settings(
        permutation_target[0],
        evaluate={
            "num_speculative_tokens": K,
            "num_prompts": NUM_PROMPTS,
            "max_new_tokens": NEW_TOKENS,
            "concurrency": 3,
            "speed_prompts": NUM_PROMPTS,
            "speed_tokens": NEW_TOKENS,
            "tasks": {"editing": ["family-0"]},
            "temperatures": [0.0, 1.0],
            "benchmarks": {
                "sums": {
                    "path": str(write_benchmark(tmp_path_factory.mktemp("benchmark"))),
                    "scorer": "gsm8k",
                    "max_new_tokens": 8,
                }
            },
        },
    )
    location = Location(str(tmp_path_factory.mktemp("evaluation")))
    stage = evaluation_stage(settings)
    outcome = stage.run(stage_inputs, Output("evaluation", location, "fingerprint", lambda figures, step: None))
    arm_files = {name: location.join(name).sha256() for name in location.files()}
    killed_before = location.join("benchmarks", "sums", "turn-2", "champion.json")
    killed_before.delete()
    again = stage.run(stage_inputs, Output("evaluation", location, "fingerprint", lambda figures, step: None))
    assert again == outcome, "a resumed run must find what is finished, and do the rest"
    timed = [name for name in arm_files if name != "benchmarks/sums/turn-2/champion.json"]  # its times are new
    assert {name: location.join(name).sha256() for name in timed} == {name: arm_files[name] for name in timed}
    assert killed_before.exists()
    return Artifact("evaluation", location, "fingerprint", {"facts": outcome.facts, "digest": "digest"})


def test_the_oracle_accepts_everything(evaluation: Artifact) -> None:
    arms = evaluation.facts["arms"]

    assert arms["candidate"]["al"] == K + 1
    assert arms["candidate"]["accepted_at"] == [1.0] * K


def test_our_walk_gives_the_very_figure_of_the_server(evaluation: Artifact) -> None:
    """23 tokens after the first, in rounds of 5: vLLM accepts past the end of every answer, a walk cannot."""
    walked = evaluation.facts["walked"]

    assert walked["al"] == walked["vllm_al_within_answers"] == pytest.approx(1 + (4 * 4 + 3) / 5)
    assert walked["vllm_al"] == K + 1
    assert walked["agrees"]


def test_labels_late_by_one_token_accept_nothing(evaluation: Artifact) -> None:
    champion = evaluation.facts["arms"]["champion"]

    assert champion["al"] == pytest.approx(1.0, abs=0.05)
    assert champion["tokens_per_step"] == pytest.approx(1.0, abs=0.05)


def test_plain_decoding_gives_one_token_a_step_and_has_no_acceptance(evaluation: Artifact) -> None:
    none = evaluation.facts["arms"]["none"]

    assert none["tokens_per_step"] == 1.0
    assert none["target_steps"] == NUM_PROMPTS * (NEW_TOKENS - 1)
    assert none["al"] is none["acceptance_rate"] is none["coverage"] is None
    assert none["tokens_per_s_c1"] > 0


def test_what_the_gate_compares_is_timed_again_after_the_last_arm(evaluation: Artifact) -> None:
    for name in ("none", "candidate", "champion"):
        arm = load_arm(evaluation.location, name)
        assert [speed.key for speed in arm.speeds_again] == [speed.key for speed in arm.speeds]
        first, again = (median(speed.tokens_per_s for speed in speeds) for speeds in (arm.speeds, arm.speeds_again))
        assert evaluation.facts["arms"][name]["tokens_per_s_c1"] == max(first, again)
    assert not load_arm(evaluation.location, "ngram").speeds_again
    assert evaluation.facts["plain_again"]["estimate"] > 0


def test_ngram_reports_its_coverage(evaluation: Artifact) -> None:
    """24 tokens of a cycle of 31 never repeat: there is nothing to look up, and so no AL."""
    ngram = evaluation.facts["arms"]["ngram"]

    assert ngram["coverage"] == 0.0
    assert ngram["tokens_per_step"] == 1.0
    assert ngram["al"] is None


def test_the_walk_of_the_bigram_table_is_on_the_same_answers(evaluation: Artifact) -> None:
    """The training answers hold most of the cycle's pairs: the table is nearly an oracle, and no better."""
    assert 1.5 < evaluation.facts["bigram_walked_al"] <= K + 1


def test_every_answer_is_that_of_plain_decoding(evaluation: Artifact) -> None:
    for name in ("ngram", "candidate", "champion"):
        lossless = evaluation.facts["arms"][name]["lossless"]
        assert lossless == {"compared": NUM_PROMPTS, "equal": NUM_PROMPTS, "ties": 0, "faults": 0}
    assert json.loads(evaluation.join("evaluation.json").read_bytes())["differences"]["candidate"] == []


def test_the_requests_counters_sum_to_the_engines(evaluation: Artifact) -> None:
    for name in ("ngram", "candidate", "champion"):
        result = load_result(evaluation.join("arms", f"{name}.json"))
        assert result.problems == ()
        assert result.engine_counters is not None
        assert result.engine_counters.rounds == sum(record.rounds for record in result.records)
        assert result.engine_counters.accepted == sum(record.accepted for record in result.records)
    assert result.engine_counters.rounds > 0


def test_each_task_has_its_own_figures(evaluation: Artifact) -> None:
    tasks = evaluation.facts["tasks"]

    assert list(tasks) == ["editing", "family-1", "sums"]
    assert tasks["editing"]["num_prompts"] == tasks["family-1"]["num_prompts"] == NUM_PROMPTS / 2
    oracle = tasks["editing"]["arms"]["candidate"]
    assert oracle["al"]["estimate"] == K + 1
    assert oracle["histogram"] == [0] * K + [5 * NUM_PROMPTS // 2]
    assert oracle["finish_reasons"] == {"length": NUM_PROMPTS // 2}
    assert oracle["looped"] == 0.0
    assert evaluation.facts["against_champion"]["tasks"]["editing"]["acceptance_length"] == K + 1


def test_a_benchmark_is_answered_by_every_arm_and_scored_beside_plain_decoding(evaluation: Artifact) -> None:
    sums = evaluation.facts["tasks"]["sums"]

    assert (sums["num_prompts"], sums["num_too_long"], sums["scorer"]) == (6, 0, "gsm8k")
    assert list(sums["arms"]) == ["none", "ngram", "candidate", "champion"]
    for name, arm in sums["arms"].items():
        assert arm["requests"] == 7  # six first turns and one second
        assert arm["problems"] == []
        assert arm["score"]["num_prompts"] == 5
        assert arm["score"]["against_none"] == {"estimate": 0.0, "low": 0.0, "high": 0.0}
        assert arm["lossless"] == (None if name == "none" else {"compared": 7, "equal": 7, "ties": 0, "faults": 0})


def test_sampled_answers_are_apart(evaluation: Artifact) -> None:
    sampled = evaluation.facts["sampled"]["1.0"]

    assert set(sampled) == {"none", "ngram", "candidate", "champion"}
    assert sampled["candidate"]["al"]["estimate"] > 3  # the target's own choices have a probability near 1
    assert evaluation.facts["arms"]["candidate"]["requests"] == NUM_PROMPTS


def test_what_the_engine_has_room_for_and_put_back(evaluation: Artifact) -> None:
    for arm in evaluation.facts["arms"].values():
        assert arm["kv_capacity_tokens"] > 10_000  # 1 GiB of a tiny model's
        assert arm["preemptions"] == 0


def test_mlflow_gets_every_tasks_figures_and_none_of_an_arm_that_is_not_valid(evaluation: Artifact) -> None:
    figures = metrics_of_evaluation(evaluation.facts)

    assert figures["eval/candidate/al"] == figures["eval/candidate/editing/al"] == K + 1
    assert figures["eval/candidate/sums/score"] == figures["eval/none/sums/score"]
    assert figures["eval/candidate/sampled_t1.0/al"] > 3
    assert "eval/none/al" not in figures
    broken = json.loads(json.dumps(evaluation.facts))
    broken["arms"]["candidate"]["problems"] = ["2 of 6 answers: empty answer"]
    left = [name for name in metrics_of_evaluation(broken) if name.startswith("eval/candidate/")]
    assert left == ["eval/candidate/errors"]


def test_the_head_is_measured_again_on_the_prompts_that_were_recorded(
    evaluation: Artifact, stage_inputs: dict[str, Artifact], tmp_path: Path, permutation_target: tuple[Path, list[int]]
) -> None:
    registered = register(evaluation, stage_inputs, tmp_path / "registered")
    stage = regression_stage(tiny_settings(permutation_target[0]))
    output = Output("regression", Location(str(tmp_path / "out")), "fingerprint", lambda figures, step: None)

    facts = stage.run({"target": stage_inputs["target"], "registered": registered}, output).facts

    assert (facts["al"], facts["recorded_al"], facts["num_prompts"]) == (K + 1, K + 1, NUM_PROMPTS)
    assert is_reproduced(facts, 0.02)
    other = registered.facts | {"target_digest": "another"}
    with pytest.raises(ConfigError, match=r"target\.model"):
        stage.run({"target": stage_inputs["target"], "registered": with_facts(registered, other)}, output)


def register(evaluation: Artifact, inputs: dict[str, Artifact], folder: Path) -> Artifact:
    """What the stage `registered` leaves of the oracle."""
    shutil.copytree(inputs["head"].join("head").path, folder / "head")
    shutil.copy(evaluation.join("prompts.json").path, folder / "prompts.json")
    recorded = {
        "al": evaluation.facts["arms"]["candidate"]["al"],
        "vllm": "0.31.0",
        "evaluate": {"max_new_tokens": NEW_TOKENS, "concurrency": 3},
        "target": {"dtype": "float32", "max_model_len": 256},
    }
    facts = {"name": "aerie-head", "version": 3, "num_speculative_tokens": K, "target_digest": "target digest"}
    return make_artifact("registered", folder, facts | {"target_model": "tiny", "recorded": recorded})


def with_facts(artifact: Artifact, facts: dict) -> Artifact:
    return replace(artifact, manifest={**artifact.manifest, "facts": facts})


def test_the_gate_lets_the_oracle_replace_the_late_head(evaluation: Artifact) -> None:
    policy = GateConfig(speed_margin=0.9)  # a few tokens on a shared machine say nothing of speed

    verdict = evaluation_verdict(evaluation, policy)

    assert verdict.promote, verdict.failures
    reasons = {reason.check: reason.measured for reason in verdict.reasons}
    assert "1.000 -> 5.000" in reasons["acceptance length at K=4"]


def test_the_gate_refuses_an_arm_that_is_not_valid(evaluation: Artifact) -> None:
    place = evaluation.join("arms", "candidate.json")
    whole = place.read_bytes()
    body = json.loads(whole)
    body["problems"] = ["the requests' counters do not sum to the engine's"]
    place.write_bytes(json.dumps(body).encode())
    try:
        verdict = evaluation_verdict(evaluation, GateConfig(speed_margin=0.9))
    finally:
        place.write_bytes(whole)

    assert [reason.check for reason in verdict.failures] == ["no errors"]


@pytest.mark.parametrize("name", ["candidate", "candidate_2", "champion", "challenger"])
def test_a_baseline_cannot_take_the_heads_name(permutation_target: tuple[Path, list[int]], name: str) -> None:
    baselines = {"none": {"method": "none"}, name: {"method": "ngram", "num_speculative_tokens": 2}}

    with pytest.raises(ConfigError, match=rf"evaluate\.baselines\.{name}"):
        evaluation_stage(tiny_settings(permutation_target[0], evaluate={"baselines": baselines}))


def test_only_what_changes_the_output_is_in_the_identity(permutation_target: tuple[Path, list[int]]) -> None:
    one, other, changed = (
        evaluation_stage(tiny_settings(permutation_target[0], **sections)).config
        for sections in (
            {},
            {"resources": {"evaluate": {"num_cpus": 2}}},
            {"evaluate": {"max_new_tokens": 5}},
        )
    )
    assert one == other
    assert one != changed
