"""The stage: nothing when left out, finished points read and not measured again, and its plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from components.config import Settings
from components.evaluation.arms import Arm
from components.section import ConfigError
from components.speed.dynamic import SUFFIX, dynamic_server
from components.speed.loads import LATENCIES
from components.speed.results import PointFiles
from components.speed.stages import arms_of, speed_stage
from components.speed.sweep import points, servers
from components.stage import Artifact, Output, run_stage
from components.storage import Location
from tests.components.evaluation.artifacts import make_artifact, target_artifact, tiny_settings
from tests.components.speed.loads import NUM_PROMPTS, TOKENS, make_measured
from tests.components.speed.test_inputs import held_out

SPEED = {"concurrencies": [1, 8], "num_speculative_tokens": [1, 3], "output_tokens": TOKENS}
BEST_NGRAM_K = {1: 3, 8: 0}
"""By concurrency, as `seconds_of` has it."""


@pytest.fixture
def inputs(tmp_path: Path, tiny_target: Path) -> dict[str, Artifact]:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "heads" / "head").mkdir(parents=True, exist_ok=True)
        (tmp_path / "heads" / "head" / name).write_text("{}")
    held_out(tiny_target, tmp_path, ["code_editing", "explanation", "rewriting"])
    return {
        "target": target_artifact(tiny_target, 512),
        "responses": make_artifact("responses", tmp_path / "responses", {}),
        "head": make_artifact("head", tmp_path / "heads", {}),
        "incumbent": make_artifact("incumbent", tmp_path, {"version": None}),
        "drafts": make_artifact("drafts", tmp_path, {"drafts": {}}),
        "evaluation": make_artifact("evaluation", tmp_path, {"candidate": {"arm": "candidate", "place": "head"}}),
    }


def seconds_of(arm: Arm, concurrency: int) -> float:
    """A token's: n-grams pay alone, the more the better, and cost time where eight run; with dynamic K they have the best of both."""
    k = arm.num_speculative_tokens or 0
    if arm.name == "ngram" + SUFFIX:
        return 0.6 if concurrency == 1 else 8.0
    if arm.name == "ngram":
        return 0.9 - 0.1 * k if concurrency == 1 else 8.0 * (1 + 0.1 * k)
    return {"none": 1.0, "candidate": 0.5}[arm.name] * (1 + 0.1 * k) * concurrency


def write_points(settings: Settings, inputs: dict[str, Artifact], output: Location) -> None:
    """All points, as earlier runs would have left them; one of them without a valid answer."""
    arms = arms_of(settings, inputs)
    ngram = next(arm for arm in arms if arm.name == "ngram")
    swept = servers(arms, settings.speed.num_speculative_tokens)
    for served in [*swept, dynamic_server(ngram, BEST_NGRAM_K)]:
        arm, k = served.arm.name, served.arm.num_speculative_tokens
        for point in points(["code_editing", "chat"], settings.speed):
            for repetition in range(settings.speed.repetitions):
                empty = (arm, point.task, point.concurrency, k, repetition) == ("candidate", "chat", 8, 1, 1)
                measured = make_measured(
                    arm,
                    k,
                    point.concurrency,
                    seconds_of(served.arm, point.concurrency),
                    task=point.task,
                    invalid="empty" if empty else None,
                    seed=repetition,
                )
                requests = range(NUM_PROMPTS)
                bench = {
                    "ttfts": [0.5 for _ in requests],
                    "latencies": [0.5 + 0.1 * (TOKENS - 1) for _ in requests],
                    "output_lens": [TOKENS for _ in requests],
                    "itls": [[0.2] * 3 for _ in requests],
                }
                PointFiles(output, served, point, repetition).save(measured, bench)


def test_it_is_left_out_without_a_load_whatever_comes_before(tmp_path: Path, tiny_target: Path) -> None:
    stage = speed_stage(tiny_settings(tiny_target))

    artifact, made = run_stage(stage, {}, Location(str(tmp_path)), 60.0)

    assert made
    assert artifact.facts == {"left_out": True, "points": [], "arms": {}, "recommended": {}}
    assert "left out" in stage.plan({})
    assert run_stage(stage, {}, Location(str(tmp_path)), 60.0)[1] is False


def test_finished_points_are_not_measured_again(tmp_path: Path, tiny_target: Path, inputs: dict[str, Artifact]) -> None:
    """Nothing can start here, no Ray and no server: all comes from what earlier runs finished."""
    settings, output = tiny_settings(tiny_target, speed=SPEED), Location(str(tmp_path / "output"))
    write_points(settings, inputs, output)
    reported: list[Any] = []

    outcome = speed_stage(settings).run(
        inputs, Output("speed", output, "fingerprint", lambda figures, step: reported.append((figures, step)))
    )

    facts = json.loads(output.join("speed.json").read_bytes())
    assert facts == json.loads(json.dumps(outcome.facts))
    assert len(facts["points"]) == (1 + 2 + 2 + 1) * 2 * 2
    row = next(r for r in facts["points"] if (r["arm"], r["num_speculative_tokens"]) == ("candidate", 3))
    assert [row[name]["p50"] for name in LATENCIES] == pytest.approx([500.0, 100.0, 200.0])
    assert facts["recommended"]["chat"]["1"]["arm"] == "candidate"
    assert facts["recommended"]["chat"]["1"]["num_speculative_tokens"] == 1
    # half of what was measured there is empty: the other K is served
    assert facts["recommended"]["chat"]["8"]["num_speculative_tokens"] == 3
    [broken] = [r for r in facts["points"] if r["invalid"]]
    assert (broken["arm"], broken["task"], broken["invalid"]) == ("candidate", "chat", "empty")
    assert "P-EAGLE" in facts["dynamic"]["candidate"]["refused"]
    dynamic = facts["dynamic"]["ngram"]
    assert (dynamic["arm"], dynamic["schedule"]) == ("ngram_dynamic", [[1, 1, 3], [2, 8, 0]])
    assert (dynamic["against"], dynamic["wins"]) == (1, True)
    # in units of no speculation: K=1 takes 0.8 and 1.1, the schedule 0.6 and 1.0
    assert dynamic["gain"] == pytest.approx((0.8 + 1.1) / (0.6 + 1.0) - 1, rel=0.02)
    [(figures, step)] = reported
    assert step == 0
    assert figures["speed/candidate/k3/chat/c8/tokens_per_s"] > 0
    assert output.join("pip-freeze.txt").read_bytes().count(b"==") > 50


def test_the_plan_counts_servers_and_points(tiny_target: Path, inputs: dict[str, Artifact]) -> None:
    settings = tiny_settings(tiny_target, speed=SPEED | {"request_rate": 2.0, "num_prompts": 10})
    stage = speed_stage(settings)

    assert stage.plan(inputs) == "10 servers one after another, 60 points"
    inputs["incumbent"].manifest["facts"].update(version=3, num_speculative_tokens=2)
    assert stage.plan(inputs) == "16 servers one after another, 96 points"
    assert stage.forecast(inputs | {"target": described(inputs["target"])}, {}).tokens == 96 * 10 * TOKENS


def described(target: Artifact) -> Artifact:
    shape = {"hidden_size": 64, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    facts = {**target.facts, **shape, "intermediate_size": 128, "tie_word_embeddings": False}
    return Artifact("target", target.location, "f", {"facts": facts, "digest": "d"})


def test_waiting_longer_for_a_server_changes_no_figure_and_a_load_does(tiny_target: Path) -> None:
    one, waits, other = (
        speed_stage(tiny_settings(tiny_target, speed=SPEED | changes)).config
        for changes in ({}, {"start_timeout_s": 5.0}, {"concurrencies": [1]})
    )
    assert one == waits
    assert one != other


def test_a_file_that_is_not_there_is_refused_before_anything_runs(tiny_target: Path) -> None:
    stage = speed_stage(tiny_settings(tiny_target, speed=SPEED | {"prompts": {"mt": "/no/such.jsonl"}}))

    with pytest.raises(ConfigError, match=r"speed\.prompts\.mt: .*such"):
        stage.check()
