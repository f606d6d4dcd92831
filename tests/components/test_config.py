"""Settings: YAML, overlay and overrides; a wrong one names its dotted path and the fix."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from components.config import Settings
from components.config_loading import load_settings
from components.section import ConfigError


def test_defaults_stand_alone() -> None:
    assert load_settings(None) == Settings()


def test_later_sources_win_and_leave_the_rest(tmp_path: Path) -> None:
    config, cluster = tmp_path / "run.yaml", tmp_path / "cluster.yaml"
    config.write_text("train: {epochs: 5, num_depths: 6}\nresources: {train: {num_cpus: 2, env: {A: '1'}}}\n")
    cluster.write_text("resources: {train: {num_gpus: 1, env: {B: '2'}}}\ntrain: {epochs: 7}\n")
    settings = load_settings(config, cluster, ["train.epochs=9", "data.held_out_families=[maths, chat]"])
    assert (settings.train.epochs, settings.train.num_depths) == (9, 6)
    assert (settings.resources.train.num_cpus, settings.resources.train.num_gpus) == (2.0, 1.0)
    assert settings.resources.train.env == {"A": "1", "B": "2"}
    assert settings.data.held_out_families == ["maths", "chat"]


def test_empty_files_are_no_settings(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert load_settings(tmp_path / "empty.yaml") == Settings()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epoch=3", r"train\.epoch: unknown setting\. Fix: did you mean epochs\?"),
        ("trian.epochs=3", r"trian: unknown setting\. Fix: did you mean train\?"),
        ("publish.gate.min_efect=1", r"publish\.gate\.min_efect: unknown setting\. Fix: did you mean min_effect\?"),
        ("ab.zzz=1", r"ab\.zzz: unknown setting\. Fix: use one of requests, concurrency"),
        ("train.epochs=many", r"train\.epochs: 'many' is not usable\. Fix: input should be a valid integer"),
        ("train.epochs=0", r"train\.epochs: 0 is not usable\. Fix: input should be greater than or equal to 1"),
        ("train.chain_rate=.nan", r"train\.chain_rate: nan is not usable"),
        ("target.dtype=int8", r"target\.dtype: 'int8' is not usable"),
        ("train=3", r"train: 3 is not usable"),
        (
            "data.max_new_tokens=4096",
            r"settings: data\.max_new_tokens must be below target\.max_model_len\. Fix: lower",
        ),
        ("data.prompts=[]", r"data\.prompts: \[\] is not usable"),
        ("data.prompts=3", r"data\.prompts\.0: 3 is not usable"),
        (
            "data.prompts={path: a, dataset: b}",
            r"data\.prompts\.0: a source is either a path or a dataset\. Fix: name one",
        ),
        ("data.prompts=[a, {path: b, revision: main}]", r"data\.prompts\.1: revision and files go with a dataset"),
        (
            "data.prompts={dataset: a/b, files: x, split: y}",
            r"data\.prompts\.0: files chooses what name and split choose",
        ),
        (
            "data.prompts=[{path: b, wieght: 2}]",
            r"data\.prompts\.0\.wieght: unknown setting\. Fix: did you mean weight\?",
        ),
        ("data.prompts=[{path: b, weight: 0}]", r"data\.prompts\.0\.weight: 0 is not usable"),
        ("data.prompts=[{path: b, weight: 2}]", r"data: weights share out data\.max_prompts, which is not set"),
        ("data.prompts=[a, {path: b, weight: 2}]", r"data: some of data\.prompts have a weight"),
        ("data.benchmarks=[{file: a}]", r"data\.benchmarks\.0\.file: unknown setting\. Fix: (did you mean|use one of)"),
        ("data.contamination=maybe", r"data\.contamination: 'maybe' is not usable"),
        ("evaluate.baselines={}", r"evaluate: evaluate\.baselines\.none must exist"),
        ("evaluate.baselines.x.method=ngram", r"evaluate\.baselines\.x: an ngram arm needs num_speculative_tokens"),
        ("evaluate.baselines.x.methods=ngram", r"evaluate\.baselines\.x\.method"),
        ("train.epochs", r"--set: 'train\.epochs' has no value\. Fix: write --set section\.key=value"),
        ("=3", r"--set: '=3' has no value"),
    ],
)
def test_a_wrong_setting_names_its_path_and_the_fix(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(None, None, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [1, 2", "--config: .* is not YAML"),
        ("- a\n- b\n", "--config: .* holds a list"),
        ("train: {epochs: 3}\ntrain: {loss: kl}\n", r"--config: .* is not YAML \(train appears twice.*line 2"),
        ("train:\n", r"train: None is not usable"),
    ],
)
def test_a_file_that_is_no_mapping_of_settings(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(tmp_path / "run.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--cluster: cannot read .*gone\.yaml \(No such file"):
        load_settings(None, tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match=r"--config: cannot read .*Is a directory"):
        load_settings(tmp_path)


def test_a_value_keeps_its_equals_signs() -> None:
    settings = load_settings(None, None, ["storage.uri=s3://bucket/a=b", "ab.salt=x=y=z"])
    assert (settings.storage.uri, settings.ab.salt) == ("s3://bucket/a=b", "x=y=z")


@pytest.mark.parametrize(
    "written",
    ["builtin", ["a.jsonl", "b"], {"dataset": "lab/chats", "split": "train"}, ["a", {"path": "b", "family": "exam"}]],
)
def test_sources_are_written_as_they_were_given(written: object) -> None:
    settings = Settings.model_validate({"data": {"prompts": written}})
    assert settings.model_dump(mode="json")["data"]["prompts"] == written
    count = len(written) if isinstance(written, list) else 1
    assert len(settings.data.prompts) == count


def test_settings_are_frozen_and_survive_yaml() -> None:
    settings = load_settings(None, None, ["train.epochs=9"])
    with pytest.raises(ValidationError):
        settings.train.epochs = 1  # type: ignore[misc]
    assert Settings.model_validate(yaml.safe_load(yaml.safe_dump(settings.model_dump(mode="json")))) == settings


def test_numeric_sections_refuse_infinity() -> None:
    for path in ("train.learning_rate", "storage.lease_ttl_s", "publish.gate.min_effect", "data.temperature"):
        with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
            load_settings(None, None, [f"{path}=.inf"])
