"""The data stages as stages: what they depend on, how they account for rows, what they plan."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from components.config import Settings
from components.config_loading import load_settings
from components.data.answers import write_answers
from components.data.parts import QUARANTINE, PartAccount, conclude, part_name
from components.data.preparation import prepare_prompts
from components.data.prompt_list import PROMPTS, fixed_cut, prompt_ranges, read_range, write_prompts
from components.data.stages import features_stage, prompts_stage, responses_stage, vocabulary_stage
from components.rows import TooManyRowsLost
from components.section import ConfigError
from components.stage import Artifact, run_stage
from components.storage import Location
from components.target.chat import load_tokenizer
from components.target.stages import target_stage
from tests.components.data.prompt_rows import prompt, read
from tests.peak import forget_peak, peak_bytes

ROWS = [
    {"messages": [{"role": "user", "content": "Which river is the longest?"}], "family": "explanation"},
    {"messages": [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}], "family": "chat"},
    {"messages": [{"role": "critic", "content": "Hm."}, {"role": "user", "content": "Hm?"}]},
    {"prompt": "Add 2 and 3."},
]


def settings_for(prompts: Path | str, target: Path, *overrides: str) -> Settings:
    return load_settings(
        None, None, [f"target.model={target}", "target.dtype=float32", f"data.prompts={prompts}", *overrides]
    )


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_prompts(settings: Settings, storage: Location) -> tuple[Artifact, bool]:
    target, _ = run_stage(target_stage(settings), {}, storage, 60)
    return run_stage(prompts_stage(settings), {"target": target}, storage, 60)


def test_prompts_are_listed_and_bad_rows_are_accounted_for(tiny_target, tmp_path):
    file = write_rows(tmp_path / "asked.jsonl", ROWS)
    artifact, _ = run_prompts(
        settings_for(file, tiny_target, "data.max_dropped_fraction=0.5"), Location(f"{tmp_path}/s")
    )
    assert artifact.manifest["rows"] == {
        "rows_in": 4, "kept": 3, "truncated": 0, "dropped": {"unknown_role": 1}, "failed": {},
    }  # fmt: skip
    (lost,) = [json.loads(line) for line in artifact.join(QUARANTINE).read_bytes().splitlines()]
    assert (lost["source"], lost["line"], lost["reason"]) == (str(file), 3, "unknown_role")
    assert artifact.facts["asked"]["turns"] == 4
    assert artifact.facts["families"] == {"asked": 1, "chat": 1, "explanation": 1}
    assert artifact.facts["splits"]["held_out"] == 1
    listed = [json.loads(line) for line in artifact.join(PROMPTS).read_bytes().splitlines()]
    assert [row["key"] for row in listed] == sorted(row["key"] for row in listed)
    assert {row["family"]: row["split"] for row in listed}["explanation"] == "held_out"


def test_too_many_bad_rows_end_the_run(tiny_target, tmp_path):
    file = write_rows(tmp_path / "asked.jsonl", ROWS)
    storage = Location(f"{tmp_path}/s")
    with pytest.raises(TooManyRowsLost, match=r"dropped\[unknown_role\] 1"):
        run_prompts(settings_for(file, tiny_target, "data.max_dropped_fraction=0.2"), storage)
    assert [name for name in storage.join("prompts").files() if name.endswith(QUARANTINE)]


def test_an_empty_file_of_prompts_is_a_setting_to_mend(tiny_target, tmp_path):
    file = write_rows(tmp_path / "empty.jsonl", [])
    with pytest.raises(ConfigError, match=r"data\.prompts"):
        run_prompts(settings_for(file, tiny_target), Location(f"{tmp_path}/s"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt_ids": [9, 99_999]}, r"no prompt is left \(in 3, .*ids_out_of_vocabulary\] 3\)\. Fix: .*quarantine"),
        ({"prompt": "Why?", "family": "explanation"}, r"none of the 3 prompts is to be trained on \(held_out 3\)"),
    ],
)
def test_prompts_that_leave_nothing_to_train_on_are_a_setting_to_mend(tiny_target, tmp_path, row, message):
    """No row of a shape that nobody knows: each is lost, or put aside, for a good reason of its own."""
    file = write_rows(tmp_path / "asked.jsonl", [row] * 3)
    settings = settings_for(file, tiny_target, "data.max_dropped_fraction=1", "data.deduplicate=off")
    with pytest.raises(ConfigError, match=rf"data\.prompts: {message}"):
        run_prompts(settings, Location(f"{tmp_path}/s"))


def test_prompts_depend_on_content_and_not_on_the_folder(tiny_target, tmp_path):
    storage = Location(f"{tmp_path}/s")
    lax = "data.max_dropped_fraction=0.5"
    files = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        files.append(write_rows(tmp_path / folder / "asked.jsonl", ROWS))
    first, made = run_prompts(settings_for(files[0], tiny_target, lax), storage)
    assert made
    again, made = run_prompts(settings_for(files[1], tiny_target, lax), storage)
    assert not made
    write_rows(files[1], ROWS[:2])
    other, made = run_prompts(settings_for(files[1], tiny_target, lax), storage)
    assert made
    assert again.fingerprint == first.fingerprint != other.fingerprint


def test_every_row_of_every_kind_is_accounted_for(tiny_target, tmp_path):
    """Equal, alike, contaminated, over the cap, cut, of ids, and bad: all rows of two sources in one table."""
    exam = {
        "messages": [{"role": "user", "content": "Which river is the longest one of all?"}],
        "family": "explanation",
    }
    talk = [
        exam,
        {"prompt": "which river is the LONGEST one of all"},
        *({"prompt": f"Add {i} and {i + 1}."} for i in (1, 1, 2, 3, 4)),
        {"messages": [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Hello there."}]},
        {"messages": [{"role": "critic", "content": "Hm."}]},
    ]
    ids = [{"prompt_ids": [9, 10, 11]}, {"prompt_ids": [9, 10, 11]}, {"prompt_ids": [9, 99_999]}, {"prompt_ids": []}]
    files = [write_rows(tmp_path / "talk.jsonl", talk), write_rows(tmp_path / "ids.jsonl", ids)]
    settings = settings_for(
        f"[{{path: {files[0]}, max_prompts: 4}}, {files[1]}]", tiny_target, "data.max_dropped_fraction=0.5"
    )
    artifact, _ = run_prompts(settings, Location(f"{tmp_path}/s"))
    account = artifact.manifest["rows"]
    lost = [json.loads(line)["reason"] for line in artifact.join(QUARANTINE).read_bytes().splitlines()]
    listed = [json.loads(line) for line in artifact.join(PROMPTS).read_bytes().splitlines()]
    assert account["dropped"] == {
        "duplicate": 2, "contaminated": 1, "over_cap": 2, "unknown_role": 1, "ids_out_of_vocabulary": 1, "bad_ids": 1,
    }  # fmt: skip
    assert account["rows_in"] == len(talk) + len(ids) == len(listed) + sum(account["dropped"].values())
    assert account["kept"] + account["truncated"] == len(listed)
    assert sorted(lost) == sorted(
        reason for reason, n in account["dropped"].items() if reason != "over_cap" for _ in range(n)
    )
    assert [row["ids"] for row in listed if "ids" in row] == [[9, 10, 11]]
    assert list(artifact.facts["sources"].values()) == [{"usable": 8, "used": 4}, {"usable": 3, "used": 1}]


def test_a_cap_is_filled_with_prompts_that_the_template_shows(tiny_target, tmp_path):
    tokenizer = load_tokenizer(tiny_target)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'Add' in m['content'] %}{{ raise_exception('no sums') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    rows = [{"prompt": f"Add {i} and {i + 1}."} for i in range(18)] + [{"prompt": "Why?"}, {"prompt": "How so?"}]
    file = write_rows(tmp_path / "asked.jsonl", rows)
    settings = settings_for(file, tiny_target, "data.max_prompts=2")
    account = prepare_prompts(settings.data, tokenizer, 512).rows
    assert (account.kept, account.dropped) == (2, {"template_rejects": 18})


def test_rows_left_out_by_choice_do_not_fail_the_job(tiny_target, tmp_path):
    file = write_rows(tmp_path / "asked.jsonl", [{"prompt": "Again?"}] * 9 + [{"prompt": "Once?"}, {"prompt": 3}])
    storage = Location(f"{tmp_path}/s")
    artifact, _ = run_prompts(settings_for(file, tiny_target, "data.max_dropped_fraction=0.4"), storage)
    assert artifact.manifest["rows"]["dropped"] == {"duplicate": 8, "content_not_text": 1}
    with pytest.raises(TooManyRowsLost, match=r"33\.3% of the rows.*in 3, kept 2.*dropped\[content_not_text\] 1"):
        run_prompts(settings_for(file, tiny_target, "data.max_dropped_fraction=0.3", "data.seed=1"), storage)


def test_benchmarks_are_read_checked_and_part_of_the_identity(tiny_target, tmp_path):
    file = write_rows(tmp_path / "asked.jsonl", [{"prompt": "Name a river in Peru."}, {"prompt": "Name a lake."}])
    bench = write_rows(tmp_path / "bench.jsonl", [{"prompt": "name a river in peru"}, {"prompt": 3}])
    storage, settings = Location(f"{tmp_path}/s"), settings_for(file, tiny_target, f"data.benchmarks={bench}")
    artifact, _ = run_prompts(settings, storage)
    assert artifact.manifest["rows"]["dropped"] == {"contaminated": 1}
    write_rows(bench, [{"prompt": "Name a sea."}])
    other, made = run_prompts(settings, storage)
    assert made
    assert (artifact.facts["contaminated"], other.facts["contaminated"]) == (1, 0)
    with pytest.raises(ConfigError, match=r"^data\.benchmarks: .*missing.jsonl does not exist"):
        run_prompts(settings_for(file, tiny_target, "data.benchmarks=missing.jsonl"), storage)


def test_what_the_evaluation_answers_is_not_trained_on(tiny_target, tmp_path):
    questions = ["How many legs have six hens?", "How deep is the sea near Peru?", "Name a lake."]
    file = write_rows(tmp_path / "asked.jsonl", [{"prompt": question} for question in questions])
    bench = write_rows(tmp_path / "gsm8k.jsonl", [{"question": questions[0].upper(), "answer": "#### 12"}])
    timed = write_rows(tmp_path / "timed.jsonl", [{"prompt": questions[1].lower()}])
    for named, line in ((f"evaluate.benchmarks.sums.path={bench}", 1), (f"speed.prompts.talk={timed}", 2)):
        artifact, _ = run_prompts(settings_for(file, tiny_target, named), Location(f"{tmp_path}/s"))
        assert artifact.manifest["rows"]["dropped"] == {"contaminated": 1}
        (row,) = map(json.loads, artifact.join(QUARANTINE).read_bytes().splitlines())
        assert row["line"] == line
    for setting in ("evaluate.benchmarks.sums.path", "speed.prompts.talk"):
        with pytest.raises(ConfigError, match=rf"^{setting}: .*missing.jsonl does not exist"):
            run_prompts(settings_for(file, tiny_target, f"{setting}=missing.jsonl"), Location(f"{tmp_path}/s"))


def test_the_driver_holds_no_prompts(ray_cluster, tiny_target, tmp_path):
    """More than 130 MB of them, half in lines and half in a JSON array, which are read, listed and planned for."""
    paragraph = " ".join(f"word{number}" for number in range(6000))
    rows = [{"prompt": f"{number} {paragraph}"} for number in range(2600)]
    files = [write_rows(tmp_path / "asked.jsonl", rows[:1300]), tmp_path / "more.json"]
    files[1].write_text(json.dumps(rows[1300:]))
    del rows
    settings = settings_for(f"[{files[0]}, {files[1]}]", tiny_target, "data.contamination=off")
    target, _ = run_stage(target_stage(settings), {}, Location(f"{tmp_path}/s"), 60)
    stage = prompts_stage(settings)
    forget_peak()
    before = peak_bytes()
    expected = stage.forecast({"target": target}, {})
    artifact, _ = run_stage(stage, {"target": target}, Location(f"{tmp_path}/s"), 60)
    grown = peak_bytes() - before
    assert artifact.manifest["rows"]["kept"] == 2600
    assert expected.bytes > 130e6
    assert grown < 30e6


def test_the_message_for_a_bad_setting_comes_from_the_other_process(ray_cluster, tiny_target, tmp_path):
    with pytest.raises(ConfigError, match=r"^data\.prompts: no usable row in .*unknown_shape 1.*mend the rows"):
        run_prompts(settings_for(write_rows(tmp_path / "x.jsonl", [{"a": 1}]), tiny_target), Location(f"{tmp_path}/s"))


@pytest.mark.parametrize(
    "override",
    [
        "deduplicate=near", "deduplicate=off", "contamination=warn", "near_similarity=0.9", "max_prompts=3",
        "validation_fraction=0.2", "held_out_families=[]", "seed=3",
    ],
)  # fmt: skip
def test_what_changes_the_choice_changes_the_identity(override):
    assert prompts_stage(load_settings(None, None, [f"data.{override}"])).config != prompts_stage(Settings()).config


@pytest.mark.parametrize("keys", ["weight: 2", "max_prompts: 1", "family: exam"])
def test_what_is_taken_of_a_source_is_part_of_the_identity(tmp_path, keys):
    file = write_rows(tmp_path / "asked.jsonl", [{"prompt": "Hi"}])
    plain = load_settings(None, None, [f"data.prompts={file}", "data.max_prompts=5"])
    keyed = load_settings(None, None, [f"data.prompts={{path: {file}, {keys}}}", "data.max_prompts=5"])
    assert prompts_stage(plain).extra() != prompts_stage(keyed).extra()


@pytest.mark.parametrize("name", ["responses", "features"])
def test_engine_arguments_are_part_of_the_identity_where_they_change_what_comes_out(name):
    make = {"responses": responses_stage, "features": features_stage}[name]
    plain, place = ["data.extractor=vllm"], f"resources.{name}.engine"
    config = make(load_settings(None, None, plain)).config
    assert make(load_settings(None, None, [*plain, f"{place}={{tensor_parallel_size: 2}}"])).config == config
    assert make(load_settings(None, None, [*plain, f"{place}={{kv_cache_dtype: fp8}}"])).config != config


@pytest.mark.parametrize("stage", [prompts_stage, responses_stage, features_stage, vocabulary_stage])
def test_how_work_is_cut_changes_no_identity(stage):
    plain = Settings()
    cut = load_settings(
        None, None, ["data.rows_per_shard=3", "data.batch_tokens=9", "resources.responses.replicas=2"]
    )  # fmt: skip
    assert stage(plain).config == stage(cut).config


def test_what_changes_an_answer_changes_the_identity():
    plain = responses_stage(Settings()).config
    for override in ("data.max_new_tokens=9", "data.temperature=0.5", "data.seed=1", "target.dtype=float32"):
        assert responses_stage(load_settings(None, None, [override])).config != plain


def test_plans_tolerate_missing_inputs():
    for stage in (prompts_stage, responses_stage, features_stage, vocabulary_stage):
        assert stage(Settings()).plan({})


def test_ranges_cover_the_list_in_order(tiny_target, tmp_path):
    artifact, _ = run_prompts(settings_for("builtin", tiny_target), Location(f"{tmp_path}/s"))
    file = artifact.join(PROMPTS)
    expected, _ = read("builtin")
    for prompts_per_part in (64, 1000, 1):
        ranges = prompt_ranges(file, prompts_per_part)
        assert len(ranges) == -(-len(expected) // prompts_per_part)
        found = [listed.prompt for part in ranges for listed in read_range(file, part)]
        assert found == [replace(prompt, source="", line=0) for prompt in expected]


def test_a_moved_or_a_bad_line_changes_no_content(tiny_target, tmp_path):
    """So no prompt is answered again."""
    storage, lax = Location(f"{tmp_path}/s"), "data.max_dropped_fraction=0.9"
    found = []
    for name, rows in (("a", ROWS), ("b", ROWS[::-1]), ("c", [{"text": "no prompt"}, *ROWS])):
        (tmp_path / name).mkdir()
        artifact, made = run_prompts(
            settings_for(write_rows(tmp_path / name / "asked.jsonl", rows), tiny_target, lax), storage
        )
        assert made
        found.append(artifact)
    assert len({artifact.digest for artifact in found}) == 1
    assert len({artifact.join(QUARANTINE).read_bytes() for artifact in found}) == 3
    assert all(QUARANTINE in artifact.manifest["files"] for artifact in found)
    other, _ = run_prompts(
        settings_for(write_rows(tmp_path / "asked.jsonl", ROWS[:2]), tiny_target, lax), Location(f"{tmp_path}/t")
    )
    assert other.digest != found[0].digest


def test_a_row_that_a_later_stage_loses_is_named_by_its_file_and_line(tmp_path):
    prompts, output = Location(f"{tmp_path}/prompts"), Location(f"{tmp_path}/features")
    listed = [prompt("one", line=7), prompt("two", line=9)]
    write_prompts(prompts, listed, {of.key: "train" for of in listed})
    account = PartAccount()
    account.fail("not_finite", {"key": f"{listed[1].key}:2"}, "NaN")
    write_answers(output.join(part_name(0)), [], account)
    conclude("features", output, 1.0, prompts)
    assert json.loads(output.join(QUARANTINE).read_bytes()) == {
        "key": f"{listed[1].key}:2", "source": "a.jsonl", "line": 9, "reason": "not_finite", "detail": "NaN",
    }  # fmt: skip


def test_the_first_cut_stays(tmp_path):
    folder = Location(str(tmp_path))
    assert fixed_cut(folder, 64) == 64
    assert fixed_cut(folder, 3) == 64
