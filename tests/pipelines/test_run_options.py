"""What the shared options make of the settings: places that mean the same in every process."""

from pathlib import Path

import pytest

from pipelines.run_options import RunOptions


def test_files_of_prompts_start_in_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    overrides = [
        "data.prompts=[builtin, ours/a.jsonl, {path: ~/b, max_prompts: 2}, s3://bucket/c, {dataset: lab/d}, /e.jsonl]",
        "data.benchmarks=exam.jsonl",
        "evaluate.benchmarks.sums={path: sums.jsonl, max_prompts: 3}",
        "speed.prompts.talk=talk",
    ]
    settings = RunOptions(overrides=overrides).settings()
    assert [source.path or source.dataset for source in settings.data.prompts] == [
        "builtin", f"{tmp_path}/ours/a.jsonl", "/home/somebody/b", "s3://bucket/c", "lab/d", "/e.jsonl",
    ]  # fmt: skip
    assert settings.data.prompts[2].max_prompts == 2
    assert [source.path for source in settings.data.benchmarks] == [f"{tmp_path}/exam.jsonl"]
    assert settings.evaluate.benchmarks["sums"].path == f"{tmp_path}/sums.jsonl"
    assert settings.evaluate.benchmarks["sums"].max_prompts == 3
    assert settings.speed.prompts == {"talk": f"{tmp_path}/talk"}
