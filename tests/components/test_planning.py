"""What a plan expects: measured on earlier outputs where there are some, else from a sample; what is there is not written again."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from components.config_loading import load_settings
from components.data.stages import features_stage, prompts_stage, responses_stage
from components.forecast import (
    GPU_OPERATIONS_PER_S,
    Duration,
    Forecast,
    Stopwatch,
    gpu_operations_per_s,
    matrix_operations_per_s,
)
from components.pipeline import Pipeline, Selection
from components.planning import Plan, PlannedStage, check_room, in_time, in_units, last_run, make_plan
from components.section import ConfigError
from components.stage import MANIFEST, Artifact, Outcome, Output, Stage, run_stage
from components.storage import Location
from components.target.resolve import target_shape
from components.target.sample import target_operations_per_s
from components.target.stages import target_stage
from components.tracking import Tracker
from components.training.stages import head_stage

TTL_S = 60.0


@pytest.fixture(params=["folder", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return Location(str(tmp_path / "s") if request.param == "folder" else f"{request.getfixturevalue('s3_bucket')}/s")


@pytest.fixture
def folder(tmp_path: Path) -> Location:
    return Location(str(tmp_path / "s"))


def stage(name: str, forecast: Forecast = Forecast(), inputs: tuple[str, ...] = (), **config: object) -> Stage:
    def run(given: Mapping[str, Artifact], output: Output) -> Outcome:
        output.join("file").write_bytes(b"x" * 1000)
        return Outcome({"tokens": 100})

    return Stage(
        name,
        run,
        config,
        inputs,
        forecast=lambda known, expected: forecast,
        tokens_done=lambda manifest: manifest["facts"]["tokens"],
    )


def test_what_an_earlier_run_left_is_not_counted_again(storage: Location):
    slow = stage("slow", Forecast(bytes=5000))
    storage.join("slow", slow.fingerprint({}), "part-0").write_bytes(b"x" * 2000)
    plan = make_plan([slow, stage("next", Forecast(bytes=300))], {}, storage)
    assert [(s.state, s.bytes_to_write) for s in plan.stages] == [("resume", 3000), ("run", 300)]
    assert (plan.free_bytes is None) == (not storage.is_local)
    run_stage(slow, {}, storage, TTL_S)
    again = make_plan([slow], {}, storage)
    assert again.stages[0].state == "done"
    assert again.stages[0].forecast.bytes == 3000
    assert again.bytes_to_write == 0
    assert make_plan([slow], {}, storage, forced=("slow",)).stages[0].state == "run"


def test_time_is_that_of_the_newest_finished_output_of_this_target(storage: Location):
    target, other = (run_stage(stage("target", model=m), {}, storage, TTL_S)[0] for m in ("a", "b"))
    assert target.digest == other.digest  # equal content: one target under two names
    answers = stage("answers", inputs=("target",), seed=0)
    made, _ = run_stage(answers, {"target": target}, storage, TTL_S)
    changed = stage("answers", inputs=("target",), seed=1)
    assert last_run(changed, {"target": other}, storage) == (made.manifest["duration_s"], 100)
    foreign = Artifact("target", target.location, "f", MappingProxyType({"digest": "another"}))
    assert last_run(changed, {"target": foreign}, storage) is None
    assert last_run(changed, {}, storage) is None


def test_an_output_made_when_the_stage_read_less_says_nothing_of_the_time(folder: Location):
    target, _ = run_stage(stage("target"), {}, folder, TTL_S)
    run_stage(stage("speed", left_out=True), {}, folder, TTL_S)
    known = {"target": target}
    asked = stage("speed", inputs=("target",), left_out=False)
    assert last_run(asked, known, folder) is None
    run_stage(asked, known, folder, TTL_S)
    assert last_run(asked, known, folder) is not None


def test_a_run_that_only_went_on_says_nothing_of_the_time(folder: Location):
    slow = stage("slow")
    folder.join("slow", slow.fingerprint({}), "part-0").write_bytes(b"x")
    made, _ = run_stage(slow, {}, folder, TTL_S)
    assert made.manifest["resumed"] is True
    assert last_run(slow, {}, folder) is None
    fresh, _ = run_stage(stage("slow", seed=1), {}, folder, TTL_S)
    assert fresh.manifest["resumed"] is False
    assert last_run(slow, {}, folder) is not None


def test_an_older_output_with_a_damaged_manifest_is_named_and_passed_over(folder: Location, caplog):
    run_stage(stage("slow"), {}, folder, TTL_S)
    older, _ = run_stage(stage("slow", seed=1), {}, folder, TTL_S)
    older.join(MANIFEST).write_bytes(b'{"files": {')
    new = stage("slow", seed=2)
    (planned,) = make_plan([new], {}, folder, stopwatch=Stopwatch("float32")).stages
    assert planned.duration is not None
    assert planned.duration.basis == "last run"
    said = [line.partition(": it is no JSON") for line in caplog.messages]
    assert [place for place, fault, _ in said if fault] == [older.join(MANIFEST).uri]


def test_an_unfinished_output_has_no_time(folder: Location):
    made, _ = run_stage(stage("slow"), {}, folder, TTL_S)
    made.location.join(MANIFEST).delete()
    assert last_run(stage("slow"), {}, folder) is None


def test_durations_say_where_they_come_from():
    stopwatch = Stopwatch("float32", _measure=lambda dtype, seconds: 1e9)
    work = Forecast(tokens=300, operations=6e9, share=0.5, start_s=10.0)
    assert str(stopwatch.duration(work, (20.0, 100))) == "Duration(seconds=60.0, basis='last run')"
    assert str(stopwatch.duration(work, None)) == "Duration(seconds=22.0, basis='sample')"
    target = Stopwatch("float32", _measure=lambda dtype, seconds: 1e9, measure_target=lambda threads: threads * 3.2e8)
    one, none = replace(work, target_threads=1), replace(work, target_threads=0)
    assert target.duration(one, None) == Duration(pytest.approx(22.0), "target")
    assert target.duration(none, None) == stopwatch.duration(one, None) == Duration(22.0, "sample")
    many = replace(work, target_threads=10 * os.cpu_count())  # those of other nodes are as fast as this one's
    assert target.duration(many, None).seconds == pytest.approx(10 + 12 / (10 * os.cpu_count()))
    absent = Stopwatch("float32", _measure=lambda dtype, seconds: 1e9, measure_target=lambda threads: None)
    assert absent.duration(one, None).basis == "sample"
    gpus = Forecast(operations=GPU_OPERATIONS_PER_S, share=0.5, num_gpus=2, start_s=10.0)
    measured = Stopwatch("bfloat16", _measure_gpu=lambda dtype, seconds: GPU_OPERATIONS_PER_S / 4)
    assert measured.duration(gpus, None) == Duration(14.0, "sample")
    elsewhere = Stopwatch("bfloat16", _measure_gpu=lambda dtype, seconds: None)
    assert elsewhere.duration(gpus, None) == Duration(11.0, "guess")
    assert stopwatch.duration(Forecast(), None) is None
    assert stopwatch.duration(Forecast(), (20.0, None)).seconds == 20.0


def test_the_sample_measures_this_machine():
    assert 1e8 < matrix_operations_per_s("float32", 0.05) < 1e15
    speed = gpu_operations_per_s("bfloat16", 0.05)
    assert (speed is not None) == torch.cuda.is_available()
    assert speed is None or 1e10 < speed < 1e16


def test_a_target_that_is_there_is_measured_itself(tiny_target: Path, folder: Location, monkeypatch):
    settings = load_settings(
        None,
        None,
        [f"target.model={tiny_target}", "target.dtype=float32", "data.max_prompts=5", f"storage.uri={folder.uri}"],
    )
    stages = [make(settings) for make in (target_stage, prompts_stage, responses_stage, features_stage, head_stage)]
    pipeline = Pipeline(stages, settings, folder, Tracker.of(settings))
    bases = lambda: [stage.duration and stage.duration.basis for stage in pipeline.plan(Selection()).stages[2:]]  # noqa: E731
    assert bases() == ["sample", "sample", "sample"]
    made, _ = run_stage(stages[0], {}, folder, TTL_S)
    assert bases() == ["target", "target", "sample"]
    assert 1e6 < target_operations_per_s(made, "float32", 0.1, 1) < 1e13
    monkeypatch.setattr("components.target.sample.LARGEST_BYTES", 1)
    assert target_operations_per_s(made, "float32", 0.1, 1) is None
    assert bases() == ["sample", "sample", "sample"]


def test_units_and_times_are_short():
    assert [in_units(n, "B") for n in (None, 0, 999, 68013, 1.5e9)] == ["–", "0 B", "999 B", "68.0 kB", "1.5 GB"]
    assert [in_time(s) for s in (40, 300, 7200)] == ["40 s", "5 min", "2.0 h"]


def test_more_than_the_disk_has_is_refused(folder: Location):
    planned = PlannedStage("features", "run", Forecast(bytes=740_000_000_000), "", bytes_there=0)
    Plan([planned], folder, 741_000_000_000).check_disk()
    Plan([planned], folder, None).check_disk()
    with pytest.raises(ConfigError, match=r"has 739\.0 GB free, the run writes about 740\.0 GB.*--gc"):
        Plan([planned], folder, 739_000_000_000).check_disk()
    check_room(folder, 0, 0)


def test_the_data_stages_expect_what_they_then_write(tiny_target: Path, folder: Location):
    settings = load_settings(
        None,
        None,
        [f"target.model={tiny_target}", "target.dtype=float32", "data.max_prompts=50", "draft.vocab_size=300"],
    )
    stages = [make(settings) for make in (target_stage, prompts_stage, responses_stage, features_stage, head_stage)]
    target, prompts, responses, features, head = make_plan(stages, {}, folder).stages
    assert target.forecast.bytes == 0  # a user's folder stays where it is
    assert prompts.forecast.rows == responses.forecast.rows == features.forecast.rows
    assert responses.forecast.tokens == responses.forecast.rows * settings.data.max_new_tokens
    assert features.forecast.bytes == pytest.approx(features.forecast.tokens * (4 * 64 * 2 + 5), rel=0.02)
    assert head.forecast.tokens == settings.train.epochs * responses.forecast.tokens
    assert "517 bytes a token" in features.detail

    made, _ = run_stage(stages[0], {}, folder, TTL_S)
    listed, _ = run_stage(stages[1], {"target": made}, folder, TTL_S)
    assert listed.facts["asked"]["turns"] == pytest.approx(
        prompts.forecast.rows, rel=0.2
    )  # which ones are drawn is not known yet
    again = make_plan(stages, {}, folder).stages
    assert [s.state for s in again] == ["done", "done", "run", "run", "run"]
    assert again[2].forecast.rows == listed.facts["asked"]["turns"]
    assert listed.manifest["bytes"] == pytest.approx(prompts.forecast.bytes, rel=0.2)
    assert again[3].forecast.tokens == pytest.approx(features.forecast.tokens, rel=0.2)


def test_a_bundled_targets_shape_is_that_of_its_conversion(bundled_target: Path):
    assert target_shape("bundled:smollm2-135m-instruct", None) == target_shape(str(bundled_target), None)
