"""A whole pipeline around the real incumbent and publish stages: real result files, heads whose quality is written in them.

The other stages write what the real ones write, without engines: an arm's accepted tokens come from the `quality` in
its head's config.json, the champion's from the files that MLflow gave back.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from components.config import Settings
from components.config_loading import load_settings
from components.evaluation.acceptance import RequestRecord
from components.evaluation.arms import Arm, baseline_arms
from components.evaluation.prompts import PROMPTS, EvaluationPrompt, dump_prompts
from components.evaluation.results import Answer, ArmResult, Speed, save_result
from components.evaluation.stages import candidate_heads
from components.evaluation.summary import HeadIdentity, choose, needed_arms, summarise, write_summary
from components.pipeline import Pipeline
from components.publishing.bundle import head_digest
from components.publishing.outcome import ServeAlone
from components.publishing.stages import incumbent_stage, publish_stage
from components.rows import RowAccount
from components.speed.stages import speed_stage
from components.stage import Artifact, Outcome, Output, Stage
from components.storage import Location
from components.tracking import Tracker

TARGET_DIGEST = "d" * 64
FAMILIES = ("explanation", "rewriting")
NUM_PROMPTS = 12
ROUNDS = 20
PLAIN_TOKENS_PER_S = 20.0
ENDPOINT = "http://127.0.0.1:9"
"""Nothing answers there."""
NO_EVENT: Callable[[str], None] = lambda stage: None  # noqa: E731
NO_ENDPOINT: ServeAlone = lambda version: False  # noqa: E731

Inputs = Mapping[str, Artifact]


def rehearse(
    folder: Path,
    server: str,
    *overrides: str,
    quality: float = 0.5,
    on_stage: Callable[[str], None] = NO_EVENT,
    target_digest: str = TARGET_DIGEST,
    serve_alone: ServeAlone = NO_ENDPOINT,
) -> Pipeline:
    """A pipeline ready to run.

    Args:
        folder: Storage.
        server: MLflow's address.
        overrides: `a.b=c` settings.
        quality: Chance of each draft token of the new head; what its weights are made of.
        on_stage: Called with the name of each stage that runs, before it writes.
        target_digest: Of the target.
        serve_alone: The endpoint, as the publication sees it.
    """
    settings = load_settings(None, None, [f"mlflow.tracking_uri={server}", f"storage.uri={folder}", *overrides])
    stages = rehearsed_stages(settings, quality, on_stage, target_digest, serve_alone)
    return Pipeline(stages, settings, Location(str(folder)), Tracker.of(settings))


def rehearsed_stages(
    settings: Settings,
    quality: float,
    on_stage: Callable[[str], None],
    target_digest: str,
    serve_alone: ServeAlone,
) -> Sequence[Stage]:
    def write(name: str, files: Mapping[str, str], facts: Mapping[str, Any], rows: RowAccount | None = None) -> Stage:
        def run(inputs: Inputs, output: Output) -> Outcome:
            on_stage(name)
            for file, text in files.items():
                output.join(file).write_bytes(text.encode())
            return Outcome(facts, rows)

        return Stage(name, run, dict(facts))

    target = {"model": "bundled:rehearsal", "revision": target_digest, "digest": target_digest}
    target |= {"architecture": "LlamaForCausalLM", "path": "/models/rehearsal"}
    return [
        write("target", {"target.json": json.dumps(target)}, target),
        write("prompts", {"prompts.jsonl": "{}\n"}, {}, RowAccount(10, 8, dropped={"empty": 2})),
        write("responses", {"part-00000.parquet": "answers"}, {}, RowAccount(8, 7, 1)),
        write("features", {"part-00000.parquet": "features"}, {}, RowAccount(8, 8)),
        write("vocabulary", {"vocabulary.safetensors": "ids"}, {"size": 8}),
        head_stage(settings, quality, on_stage),
        write(
            "preflight",
            {"preflight.json": "{}"},
            {"compared": 9, "equal": 9, "mismatches_at": [0, 0, 0], "cause": None},
        ),
        incumbent_stage(settings),
        evaluation_stage(settings, on_stage),
        speed_stage(settings),  # left out
        ab_stage(settings, on_stage),
        publish_stage(settings, serve_alone),
    ]


def head_stage(settings: Settings, quality: float, on_stage: Callable[[str], None]) -> Stage:
    def run(inputs: Inputs, output: Output) -> Outcome:
        on_stage("head")
        places = ["head", *(f"candidates/{number}" for number in range(2, settings.evaluate.candidates + 1))]
        for number, place in enumerate(places):
            write_head(output.join(*place.split("/")).path, quality + 0.1 * number)
        rows = [
            {
                "step": step,
                "epoch": step / 4,
                "train/loss": 4.0 / step,
                "validation/accuracy_depth_0": 0.1 * step if step > 1 else float("nan"),
                "validation/walked_al_3": 1 + 0.05 * step,
            }
            for step in range(1, 9)
        ]
        output.join("curves.jsonl").write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())
        return Outcome(
            {"steps": 8, "train_seconds": 3.0, "tokens_per_s": 400.0, "validation": {"validation/loss": 2.0}}
            | ({"candidates": places} if len(places) > 1 else {})
        )

    return Stage("head", run, {"quality": quality, "train": settings.train.model_dump(mode="json")})


def write_head(folder: Path, quality: float) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"quality": quality}))
    save_file({"norm.weight": torch.full((8,), quality)}, folder / "model.safetensors")


def evaluation_stage(settings: Settings, on_stage: Callable[[str], None]) -> Stage:
    def run(inputs: Inputs, output: Output) -> Outcome:
        on_stage("evaluation")
        candidates, champion = candidate_heads(settings, inputs), champion_of(inputs["incumbent"])
        baselines = baseline_arms(settings.evaluate.baselines)
        arms = needed_arms(baselines, candidates[0], champion, *candidates[1:])
        results = {arm.name: measured(arm) for arm, _ in arms}
        candidate = choose(results, candidates, champion)
        for name, result in results.items():
            save_result(result, output.join("arms", f"{name}.json"))
        walks = {str(arm.num_speculative_tokens): {"al": 1.5} for arm, _ in arms}
        facts, differences = summarise(results, {"head": walks, "bigram": walks}, candidate, champion, len(candidates))
        write_summary(output.location, facts, differences)
        prompts = [EvaluationPrompt(f"prompt-{i}", FAMILIES[i % 2], (1, 2, 3 + i)) for i in range(NUM_PROMPTS)]
        output.join(PROMPTS).write_bytes(dump_prompts(prompts))
        return Outcome(facts)

    config = {"evaluate": settings.evaluate.model_dump(mode="json")}
    return Stage("evaluation", run, config, ("head", "preflight", "incumbent"))


def champion_of(incumbent: Artifact) -> HeadIdentity | None:
    facts = incumbent.facts
    if facts["version"] is None:
        return None
    folder = incumbent.join("head").path
    assert head_digest(folder) == facts["head_digest"]
    return HeadIdentity(facts["head_digest"], facts["num_speculative_tokens"], folder)


def measured(arm: Arm) -> ArmResult:
    """Deterministic answers; a head accepts each draft token with its quality, and is faster the more it accepts."""
    quality = json.loads((Path(arm.model) / "config.json").read_text())["quality"] if arm.model else 0.1
    k = arm.num_speculative_tokens or 0
    answers, speeds = [], []
    for number in range(NUM_PROMPTS):
        lengths = accepted_lengths(random.Random(number), quality, k) if k else []
        record = RequestRecord(
            key=f"prompt-{number}",
            family=FAMILIES[number % 2],
            arm=arm.name,
            prompt_tokens=9,
            output_tokens=40,
            finish_reason="stop",
            rounds=len(lengths),
            drafted=k * len(lengths),
            accepted=sum(lengths),
            accepted_at=tuple(sum(length > i for length in lengths) for i in range(k)),
            duration_s=1.0,
        )
        rivals = tuple({7: 0.125} for _ in range(40)) if arm.method == "none" else ()
        ids = (*range(10, 49), 7 if number == 0 and arm.name == "candidate" else 49)
        answers.append(Answer(record, ids, target_steps=30, rivals=rivals))
        gain = 1 + sum(lengths) / max(len(lengths), 1)
        speeds.append(Speed(record.key, 64, 64 / (PLAIN_TOKENS_PER_S * gain), 0.1))
    platform = {"vllm": "0.32.0", "torch": "2.13.0", "device": "cpu", "target": TARGET_DIGEST, "dtype": "bfloat16"}
    return ArmResult(arm, platform, tuple(answers), tuple(speeds), engine_start_s=1.0, answers_s=2.0)


def accepted_lengths(dice: random.Random, quality: float, k: int) -> list[int]:
    lengths = []
    for _ in range(ROUNDS):
        length = 0
        while length < k and dice.random() < quality:
            length += 1
        lengths.append(length)
    return lengths


def ab_stage(settings: Settings, on_stage: Callable[[str], None]) -> Stage:
    def run(inputs: Inputs, output: Output) -> Outcome:
        on_stage("ab")
        arm = {"weight": 0.5, "head": "none", "sessions": 2, "requests": 2, "errors": 0, "output_tokens": 20}
        arms = {
            "none": arm | {"al": None, "acceptance_rate": None},
            "challenger": arm | {"al": 1.4, "acceptance_rate": 0.2},
        }
        facts = {
            "salt": settings.ab.salt,
            "endpoint": ENDPOINT,
            "requests": 4,
            "errors": 0,
            "arms": arms,
            "over_time": {"challenger": [{"elapsed_s": 2.0, "requests": 2, "al": 1.4, "low": None, "high": None}]},
        }
        output.join("ab.json").write_bytes(json.dumps(facts).encode())
        return Outcome(facts)

    return Stage("ab", run, {"salt": settings.ab.salt}, ("head", "incumbent", "evaluation"))
