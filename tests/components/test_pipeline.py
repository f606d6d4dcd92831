"""A list of stages: the second run is a no-op, a changed setting reruns what depends on it, wrong selections say so."""

import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from components.config import Settings
from components.config_loading import load_settings
from components.data.parts import CorruptPart
from components.data.progress import WorkersFailed
from components.forecast import Forecast
from components.pipeline import Pipeline, Selection, check_disk
from components.section import ConfigError
from components.stage import Artifact, Outcome, Output, Stage
from components.storage import Location
from components.tracking import Tracker
from components.training.stages import TrainingFailed
from pipelines.cli import guarded
from tests.conftest import project_environment

NOWHERE = "http://127.0.0.1:9"
FROM_RAY = re.compile(r"(\x1b\[\d+m)*\(")
"""Begins the lines that workers of other tests say, `(name pid=1)`: Ray repeats them here whenever they come."""

PIPELINE_FILE = """
from components.forecast import Forecast
from components.stage import Outcome, Stage
from pipelines.cli import guarded, pipeline_app

def run(inputs, output):
    output.join("file").write_bytes(b"1")
    return Outcome()

guarded(pipeline_app("A pipeline.", lambda settings: [
    Stage("one", run, {}, plan=lambda inputs: "one file"),
    Stage("two", run, {}, inputs=("one",), forecast=lambda known, expected: Forecast(bytes=1000)),
]))
"""


def chain(settings: Settings) -> Sequence[Stage]:
    """answers -> head -> report, and answers -> words, each with one setting of its own."""

    def write(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        texts = [artifact.join("file").read_bytes() for artifact in inputs.values()]
        output.join("file").write_bytes(output.fingerprint.encode() + b"".join(texts))
        return Outcome()

    return [
        Stage("answers", write, {"max_new_tokens": settings.data.max_new_tokens}),
        Stage("words", write, {"vocab_size": settings.draft.vocab_size}, ("answers",)),
        Stage("head", write, {"epochs": settings.train.epochs}, ("answers",)),
        Stage("report", write, {"name": settings.publish.name}, ("head",)),
    ]


def make(folder: Path, *overrides: str) -> Pipeline:
    settings = load_settings(None, None, [*overrides, f"mlflow.tracking_uri={NOWHERE}", f"storage.uri={folder}"])
    return Pipeline(chain(settings), settings, Location(str(folder)), Tracker.of(settings))


def run(folder: Path, *overrides: str, selection: Selection = Selection()) -> list[str]:
    pipeline = make(folder, *overrides)
    pipeline.run(selection)
    return pipeline.made


def test_the_second_run_makes_nothing_and_connects_to_nothing(tmp_path: Path) -> None:
    assert run(tmp_path) == ["answers", "words", "head", "report"]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = make(tmp_path)
    again.before_first_run = lambda stages: pytest.fail("connected to Ray for nothing")
    assert set(again.run(Selection())) == {"answers", "words", "head", "report"}
    assert again.made == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_ray_is_prepared_for_what_has_to_run_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path).run(Selection(last="words"))
    again, prepared = make(tmp_path), list[str]()
    again.before_first_run = prepared.extend
    again.run(Selection())
    assert prepared == ["head", "report"]


@pytest.mark.parametrize(
    ("override", "rerun"),
    [
        ("data.max_new_tokens=9", ["answers", "words", "head", "report"]),
        ("train.epochs=9", ["head", "report"]),
        ("draft.vocab_size=9", ["words"]),
        ("publish.name=other", ["report"]),
    ],
)
def test_a_changed_setting_reruns_what_depends_on_it(tmp_path: Path, override: str, rerun: list[str]) -> None:
    run(tmp_path)
    assert run(tmp_path, override) == rerun
    assert run(tmp_path) == []  # and the first outputs are still there


def test_force_reruns_the_stage_and_what_reads_other_content(tmp_path: Path) -> None:
    run(tmp_path)
    assert run(tmp_path, selection=Selection(forced=("head",))) == ["head"]  # it came out equal


def test_until_stops_and_from_demands_what_is_before(tmp_path: Path) -> None:
    assert run(tmp_path, selection=Selection(last="words")) == ["answers", "words"]
    with pytest.raises(ConfigError, match="--from: head was never run"):
        run(tmp_path, selection=Selection(first="report"))
    assert run(tmp_path, selection=Selection(first="head")) == ["head", "report"]


def test_the_plan_names_what_would_run_and_writes_nothing(tmp_path: Path) -> None:
    run(tmp_path, selection=Selection(last="words"))
    before = sorted(tmp_path.rglob("*"))
    assert [(stage.name, stage.state) for stage in make(tmp_path).plan(Selection()).stages] == [
        ("answers", "done"),
        ("words", "done"),
        ("head", "run"),
        ("report", "run"),
    ]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "error",
    [
        CorruptPart(Location("s3://bucket/part-00000.parquet"), 3, "its checksum is not its own"),
        WorkersFailed("features: its worker does not start; the last one said:\nno such model"),
        TrainingFailed("training ended without a checkpoint"),
        ConfigError("storage.uri", "it is away", "wait"),
    ],
)
@pytest.mark.parametrize("in_a_task", [False, True])
def test_what_ends_a_run_is_said_without_a_traceback(
    error: Exception, in_a_task: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise (
            RayTaskError("f", "Traceback (most recent call last): ...", error).as_instanceof_cause()
            if in_a_task
            else error
        )

    with pytest.raises(SystemExit) as end:
        guarded(main)
    assert end.value.code == (2 if isinstance(error, ConfigError) else 1)
    said = [line for line in capsys.readouterr().err.splitlines() if not FROM_RAY.match(line)]
    assert "\n".join(said) == f"error: {error}"


def test_a_disk_that_is_too_small_is_refused_up_front(tmp_path: Path) -> None:
    check_disk(Location(str(tmp_path / "new")), 1)
    with pytest.raises(ConfigError, match=r"storage\.uri: .* GB free"):
        check_disk(Location(str(tmp_path / "new")), 1 << 60)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--from", "three"], "error: --from: there is no stage 'three'. Fix: use one of one, two"),
        (["--until", "three"], "error: --until: there is no stage 'three'. Fix: use one of one, two"),
        (["--force", "three"], "error: --force: there is no stage 'three'. Fix: use one of one, two"),
        (["--from", "two", "--until", "one"], "error: --from: two comes after --until one. Fix: swap the two"),
        (
            ["--from", "two"],
            "error: --from: one was never run with these settings. Fix: start at --from one or earlier",
        ),
        (["--set", "train.epoch=1"], "error: train.epoch: unknown setting. Fix: did you mean epochs?"),
        (["--config", "nothing.yaml"], "error: --config: cannot read nothing.yaml (No such file or directory)"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    tmp_path: Path,
    arguments: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["pipeline.py", *options(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(pipeline_file(tmp_path))
    assert ended.value.code == 2
    assert line in capsys.readouterr().err


def test_the_command_itself_exits_with_2_and_without_a_traceback(tmp_path: Path) -> None:
    result = command_line(tmp_path, "--set", "train.epoch=1")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "error: train.epoch: unknown setting. Fix: did you mean epochs?"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["--plan"], []])
def test_what_the_disk_cannot_hold_is_refused_before_anything_runs(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(pipeline_file(tmp_path))
    file.write_text(file.read_text().replace("bytes=1000", "bytes=1 << 60"))
    monkeypatch.setattr(sys, "argv", ["pipeline.py", *options(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file))
    assert ended.value.code == 2
    assert re.search(r"error: storage.uri: .*B free, the run writes about 1152921\.5 TB", capsys.readouterr().err)
    assert not (tmp_path / "storage").exists()


def test_an_overfull_run_may_be_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def one(settings: Settings) -> Sequence[Stage]:
        return [replace(chain(settings)[0], forecast=lambda known, expected: Forecast(bytes=1 << 60))]

    pipeline = make(tmp_path, "storage.refuse_overfull=false")
    pipeline.stages = one(pipeline.settings)
    assert pipeline.run(Selection()).keys() == {"answers"}
    assert "going on, as storage.refuse_overfull is false" in caplog.text


def test_plan_on_the_command_line(tmp_path: Path) -> None:
    result = command_line(tmp_path, "--plan")
    assert result.returncode == 0, result.stderr
    assert "one: one file" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if line.startswith("│")) <= 80
    assert "disk: about 1.0 kB to write" in result.stdout
    assert not (tmp_path / "storage").exists()


def command_line(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, pipeline_file(folder), *options(folder), *arguments],
        capture_output=True,
        text=True,
        env=project_environment() | {"COLUMNS": "200"},
    )


def pipeline_file(folder: Path) -> str:
    (folder / "pipeline.py").write_text(PIPELINE_FILE)
    return str(folder / "pipeline.py")


def options(folder: Path) -> list[str]:
    (folder / "empty.yaml").write_text("")
    return ["--config", str(folder / "empty.yaml"), "--set", f"storage.uri={folder}/storage"]


def test_settings_that_a_later_stage_refuses_are_said_before_anything_runs(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ConfigError("publish.name", "it is refused", "name another")

    pipeline = make(tmp_path)
    pipeline.stages = [*pipeline.stages[:-1], replace(pipeline.stages[-1], check=refuse)]
    for attempt in (pipeline.run, pipeline.plan):
        with pytest.raises(ConfigError, match=r"publish\.name: it is refused"):
            attempt(Selection())
    assert pipeline.made == []
    pipeline.run(Selection(last="head"))
    assert pipeline.made == ["answers", "words", "head"]
