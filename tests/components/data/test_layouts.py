"""Data sets as `datasets` knows them: folders that it saved, folders laid out like its repositories, ids of the Hub."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from components.config import PromptSource
from components.data.sources import source_identity
from components.section import ConfigError
from components.storage import Location
from tests.components.data.prompt_rows import read, write_rows
from tests.components.target.hub import COMMIT, GATED, HubHandler, serve_hub

CARD = """---
configs:
- config_name: talk
  data_files:
  - {split: train, path: talk/part-*}
  - {split: test, path: talk/last.jsonl}
- config_name: code
  data_files: code/all.jsonl
---
Rows for tests.
"""


def rows(*texts: str) -> list[dict]:
    return [{"messages": [{"role": "user", "content": text}], "score": None} for text in texts]


def texts(prompts) -> list[str]:
    return sorted(prompt.messages[0]["content"] for prompt in prompts)


def error_of(*paths, **keys) -> str:
    with pytest.raises(ConfigError) as error:
        read(*paths, **keys)
    assert error.value.path == "data.prompts"
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved data set of two splits, and one without splits."""
    folder = tmp_path_factory.mktemp("saved")
    one, two = datasets.Dataset.from_list(rows("one", "two")), datasets.Dataset.from_list(rows("three"))
    datasets.DatasetDict(train=one, extra=two).save_to_disk(folder / "both")
    two.save_to_disk(folder / "plain")
    one.filter(lambda row: row["messages"][0]["content"] == "two").save_to_disk(folder / "chosen")
    return folder


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a repository of the Hub; one of its rows has a tool as text, one as a list, and one is broken."""
    folder = tmp_path_factory.mktemp("repositories") / "lab" / "chats"
    for name in ("talk", "code"):
        (folder / name).mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    tool = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    with_tools = [{**rows(f"tools {i}")[0], "tools": form} for i, form in enumerate(([tool], json.dumps([tool])))]
    write_rows(folder / "talk" / "part-0.jsonl", [*rows("first"), *with_tools])
    with (folder / "talk" / "part-0.jsonl").open("a") as file:
        file.write("{broken\n")
    write_rows(folder / "talk" / "part-1.jsonl", rows("second"))
    write_rows(folder / "talk" / "last.jsonl", rows("last"))
    write_rows(folder / "code" / "all.jsonl", rows("sort a list"))
    return folder


def test_a_saved_folder_is_read_by_split(saved):
    assert texts(read(saved / "both")[0]) == ["one", "two"]
    assert texts(read(saved / "both", split="extra")[0]) == texts(read(saved / "plain")[0]) == ["three"]
    assert texts(read(saved / "chosen")[0]) == ["two"]
    (prompt,) = read(saved / "plain")[0]
    assert (prompt.family, prompt.line) == ("plain", 1)


def test_a_split_that_is_not_there_names_those_that_are(saved, laid_out):
    assert "has no split test. Fix: set split to one of extra, train" in error_of(saved / "both", split="test")
    assert "was saved as one split" in error_of(saved / "plain", split="train")
    assert "set split to one of train, test" in error_of(laid_out, name="talk", split="exam")


def test_the_card_says_which_files_make_up_a_split(laid_out):
    prompts, bad = read(laid_out, name="talk", split="train")
    assert texts(prompts) == ["first", "second", "tools 0", "tools 1"]
    assert {p.family for p in prompts} == {"chats"}
    assert [(row.reason, row.line) for row in bad] == [("bad_json", 4)]
    assert bad[0].source.endswith("talk/part-0.jsonl")
    assert texts(read(laid_out, name="talk", split="test")[0]) == ["last"]
    assert texts(read(laid_out, name="code")[0]) == ["sort a list"]


def test_tools_may_be_a_list_in_one_row_and_text_in_the_next(laid_out):
    tools = [p.tools for p in read(laid_out, name="talk", split="train")[0] if p.tools]
    assert len(tools) == 2
    assert tools[0] == tools[1]


def test_an_unknown_configuration_is_an_error(laid_out):
    assert "cannot read" in error_of(laid_out, name="poems")
    assert "cannot read" in error_of(laid_out, split="train")  # two configurations and none named


def test_other_kinds_of_files_are_left_to_the_library(tmp_path):
    (tmp_path / "train.csv").write_text('prompt,task\n"Name a river, please",geo\nName a lake,geo\n')
    prompts, _ = read(tmp_path, split="train")
    assert texts(prompts) == ["Name a lake", "Name a river, please"]
    assert {p.family for p in prompts} == {"geo"}


def test_the_family_of_a_source_wins(laid_out):
    assert {p.family for p in read(laid_out, name="code", family="exam")[0]} == {"exam"}


def test_identity_is_of_the_content_and_of_what_is_taken_from_it(saved, laid_out):
    def of(**keys):
        return source_identity(PromptSource(**keys))

    talk = {"path": str(laid_out), "name": "talk"}
    assert of(**talk, split="train") != of(**talk, split="test")
    assert of(path=str(saved / "both"), split="extra") != of(path=str(saved / "both"))
    before = of(**talk, split="test")
    write_rows(laid_out / "talk" / "last.jsonl", rows("last", "of all"))
    assert of(**talk, split="test") != before
    write_rows(laid_out / "talk" / "last.jsonl", rows("last"))
    assert of(**talk, split="test") == before


def test_a_folder_whose_name_is_the_family_is_another_under_another_name(saved, laid_out, tmp_path):
    def of(folder, **keys):
        return source_identity(PromptSource(path=str(folder), **keys))

    for folder, keys in ((saved / "plain", {}), (laid_out, {"name": "talk", "split": "train"})):
        other = tmp_path / f"not-{folder.name}"
        other.symlink_to(folder)
        assert {p.family for p in read(other, **keys)[0]} == {other.name}
        assert of(other, **keys) != of(folder, **keys)
        assert of(other, **keys, family="exam") == of(folder, **keys, family="exam")


# the Hub's address and cache are read when huggingface_hub is imported: so a process of its own
READ_ALL = """
import json, sys
from components.config import PromptSource
from components.section import ConfigError
from components.data.prompts import read_prompts
from components.data.sources import source_identity

answers = []
for keys in json.load(sys.stdin):
    source = PromptSource(**keys)
    try:
        prompts, _ = read_prompts([source])
        answers.append([source_identity(source), sorted([p.messages[0]["content"], p.source, p.family] for p in prompts)])
    except ConfigError as error:
        answers.append(str(error))
json.dump(answers, sys.stdout)
"""


def read_all(cases: list[dict], endpoint: str, cache: Path, **more: str) -> list:
    """Identity and rows of each source, or the error as text."""
    environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "OMP_NUM_THREADS": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    process = subprocess.run(
        [sys.executable, "-c", READ_ALL],
        input=json.dumps(cases),
        env=environment | more,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def hub(laid_out: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and cache of a hub with the laid out data set."""
    with serve_hub(laid_out.parents[1]) as address:
        yield address, tmp_path_factory.mktemp("cache")


CASES: list[dict] = [
    {"dataset": "lab/chats", "files": "code/*"},
    {"dataset": "lab/chats", "name": "talk"},
    {"dataset": "lab/chats", "name": "talk", "split": "test", "revision": COMMIT},
    {"dataset": "lab/chats", "revision": "v9"},
    {"dataset": "lab/nothing"},
    {"dataset": GATED},
    {"dataset": "not an id"},
    {"dataset": "lab/chats", "files": "poems/*"},
]


@pytest.fixture(scope="module")
def answers(hub: tuple[str, Path]) -> list:
    return read_all(CASES, *hub)


def test_ids_are_read_at_the_commit_of_their_revision(answers):
    code, talk, test = answers[:3]
    assert code[1] == [["sort a list", f"lab/chats@{COMMIT[:8]}/code/all.jsonl", "chats"]]
    assert [text for text, _, _ in talk[1]] == ["first", "second", "tools 0", "tools 1"]
    assert [text for text, _, _ in test[1]] == ["last"]
    assert {answer[0]["commit"] for answer in answers[:3]} == {COMMIT}
    assert "revision" not in test[0]


def test_a_pattern_downloads_nothing_else(hub):
    endpoint, cache = hub
    HubHandler.requests.clear()
    read_all(CASES[:1], endpoint, cache / "another")
    assert sorted(path.rpartition(COMMIT)[2] for path in set(HubHandler.requests) if "/resolve/" in path) == [
        "/README.md",
        "/code/all.jsonl",
    ]


def test_ids_that_cannot_be_used_say_what_to_do(answers):
    revision, nothing, gated, no_id, no_file = answers[3:]
    assert revision.startswith("data.prompts: lab/chats has no revision 'v9'. Fix: name one of its branches")
    assert nothing.startswith("data.prompts: lab/nothing is neither a folder nor a Hugging Face dataset")
    assert gated.startswith(
        f"data.prompts: {GATED} is gated. Fix: accept its licence at https://huggingface.co/datasets/"
    )
    assert no_id.startswith("data.prompts: not an id is no data set id")
    assert no_file.startswith("data.prompts: lab/chats has no data file poems/*")


def test_what_was_fetched_is_read_again_without_a_network(answers, hub):
    _, cache = hub
    offline = read_all([*CASES[:3], CASES[4]], "http://127.0.0.1:9", cache, HF_HUB_OFFLINE="1")
    assert offline[:3] == answers[:3]
    assert offline[3].startswith(
        "data.prompts: lab/nothing is not in the local cache and Hugging Face cannot be reached"
    )
    assert offline[3].endswith("Fix: check the network, or name local files with `path`")


def test_prompts_on_s3_are_read_like_a_folder_or_a_file(s3_bucket: str, tmp_path: Path) -> None:
    folder = tmp_path / "asked"
    folder.mkdir()
    for name, text in (("maths", "one"), ("chat", "two")):
        Location(f"{s3_bucket}/asked/{name}.jsonl").write_bytes(
            Path(write_rows(folder / f"{name}.jsonl", rows(text))).read_bytes()
        )
    (prompts, bad), (local, _) = read(f"{s3_bucket}/asked"), read(folder)
    assert [(p.key, p.family) for p in prompts] == [(p.key, p.family) for p in local]
    assert not bad
    assert sorted(p.source for p in prompts) == [f"{s3_bucket}/asked/chat.jsonl", f"{s3_bucket}/asked/maths.jsonl"]
    (one,), _ = read(f"{s3_bucket}/asked/chat.jsonl")
    assert (one.source, one.family, texts([one])) == (f"{s3_bucket}/asked/chat.jsonl", "chat", ["two"])
    here, there = (source_identity(PromptSource(path=str(path))) for path in (folder, f"{s3_bucket}/asked"))
    assert here == there
    assert f"{s3_bucket}/nothing does not exist" in error_of(f"{s3_bucket}/nothing")


def test_an_object_that_is_replaced_is_read_again(s3_bucket: str) -> None:
    """Whoever looked before, in this process or in another: what is listed belongs to the identity at the end, or is discarded."""
    there = Location(f"{s3_bucket}/one deep/a#1.jsonl")
    for text in ("one", "another"):
        there.write_bytes(json.dumps({"prompt": text}).encode())
        for path in (there.uri, f"{s3_bucket}/one deep"):
            assert texts(read(path)[0]) == [text]
    identities = []
    for text in ("one", "another", "one"):
        there.write_bytes(json.dumps({"prompt": text}).encode())
        identities.append(source_identity(PromptSource(path=there.uri)))
    assert identities[0] == identities[2] != identities[1]


def test_a_full_disk_here_is_not_s3s_doing(s3_bucket: str) -> None:
    there = Location(f"{s3_bucket}/asked.jsonl")
    there.write_bytes(b"x" * 70_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        error = error_of(there.uri)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"{there.uri} cannot be copied to {tempfile.gettempdir()}" in error
    assert error.endswith("set TMPDIR to a folder that has room")


def test_an_s3_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert "s3://nowhere/asked cannot be read" in error_of("s3://nowhere/asked")
    assert "s3://no where/asked cannot be read" in error_of("s3://no where/asked")
