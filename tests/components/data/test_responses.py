"""Answers by real vLLM engines under a real Ray, on S3: multi-turn, resumed, and with engines that die on the way."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.outputs import CompletionOutput, RequestOutput

from components.config import Settings
from components.data.answering import AnswerWorker
from components.data.answers import read_answers
from components.data.documents import merge_turns
from components.data.part_worker import PartTask, Piece
from components.data.parts import QUARANTINE, PartAccount, part_names, read_account, read_columns
from components.data.prompt_list import PROMPTS, prompt_ranges, write_prompts
from components.data.prompts import Prompt
from components.data.responses import answer_prompts, response_engine_kwargs
from components.rows import TooManyRowsLost
from components.stage import Outcome
from components.storage import Location
from components.target.chat import load_tokenizer, render
from tests.conftest import new_bucket
from tests.engines import CPU_ENGINE_ENV
from tests.tiny import EOS, SWITCH, add_switch, make_tiny_llama

MAX_NEW_TOKENS = 16
DIES_AT = 7
GIVEN_IDS = [40, 41, 42]
"""No template makes these: no beginning-of-sequence token and no turn."""
DEADLY = "k99:1"
NUM_PROMPTS = 20


class DyingWorker(AnswerWorker):
    """Its process ends at the seventh answer, the first time that one gets so far, and always at a deadly one."""

    def _on_answer(self, dialogue, output):
        self.answers = getattr(self, "answers", 0) + 1
        if self.answers == DIES_AT and self.output.join("_died").create(b""):
            os._exit(9)
        if dialogue.key == DEADLY:
            os._exit(9)
        super()._on_answer(dialogue, output)


@pytest.fixture(scope="module")
def ending_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target that ends some of its answers and not others."""
    path = make_tiny_llama(tmp_path_factory.mktemp("ending") / "target")
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    weights["lm_head.weight"][EOS] = torch.randn(64, generator=generator) * 2 / 8
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    add_switch(path)
    return path


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def make_prompts() -> list[Prompt]:
    """20 good ones (every fourth of two turns), one too long at its second turn, one that the template rejects, one of ids,
    one whose second turn is deadly."""
    prompts = []
    for i in range(NUM_PROMPTS):
        turns = [user(f"What is {i} plus {i}?"), user("And twice that?")]
        prompts.append(Prompt(f"k{i:02d}", "maths", turns[: 1 + (i % 4 == 0)], None, "a.jsonl", i + 1))
    long = [user("Short."), user("long " * 400), user("Never asked.")]
    rejected = [user("Hello?"), {"role": "critic", "content": "No."}]
    prompts.append(Prompt("k90", "maths", long, None, "a.jsonl", 91))
    prompts.append(Prompt("k91", "maths", rejected, None, "a.jsonl", 92))
    prompts.append(Prompt("k92", "maths", [], None, "a.jsonl", 93, ids=GIVEN_IDS))
    prompts.append(Prompt("k99", "maths", [user("Anything else?"), user("Now die.")], None, "a.jsonl", 100))
    return prompts


class Run:
    """Answers the prompts into one folder, as often as asked."""

    def __init__(self, folder: str, target: Path) -> None:
        self.target = target
        self.prompts, self.output = Location(folder).join("prompts"), Location(folder).join("responses")
        self.settings = Settings.model_validate(
            {
                "target": {"dtype": "float32", "max_model_len": 256, "chat_template_kwargs": SWITCH},
                "data": {
                    "max_new_tokens": MAX_NEW_TOKENS,
                    "rows_per_shard": 6,
                    "max_dropped_fraction": 0.2,
                    "max_attempts": 1,
                },
            }
        )
        listed = make_prompts()
        self.num_turns = sum(len(prompt.turns()) for prompt in listed)
        write_prompts(self.prompts, listed, {prompt.key: "train" for prompt in listed})

    def answer(self, worker: type[AnswerWorker] = AnswerWorker, **data) -> Outcome:
        config = self.settings.data.model_copy(update=data)
        settings = self.settings.model_copy(update={"data": config})
        return answer_prompts(settings, self.prompts, self.num_turns, str(self.target), self.output, worker)

    def rows(self) -> list[dict]:
        names = part_names(self.output)
        return [row for name in names for row in read_columns(self.output.join(name), None).to_pylist()]

    def sums(self) -> dict[str, str]:
        return {name: self.output.join(name).sha256() for name in part_names(self.output)}

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Of the finished parts."""
        written = self.output.stamps()
        return {name: written[name] for name in part_names(self.output)}


@pytest.fixture(scope="module")
def finished(ray_cluster, ending_target, s3_server) -> Iterator[tuple[Run, Outcome]]:
    """A run whose engine died at the seventh answer, and again at every try of one turn."""
    with new_bucket(s3_server) as bucket:
        run = Run(bucket, ending_target)
        outcome = run.answer(DyingWorker)
        assert run.output.join("_died").exists()
        yield run, outcome


def test_every_turn_is_answered_once_though_engines_died(finished):
    """All but the deadly turn; the turn before it is kept."""
    run, outcome = finished
    expected = [f"{p.key}:{t}" for p in make_prompts()[:NUM_PROMPTS] for t in range(len(p.turns()))]
    assert [row["key"] for row in run.rows()] == [*expected, "k90:0", "k92:0", "k99:0"]
    assert outcome.rows.rows_in == run.num_turns
    assert outcome.rows.failed == {"worker_died": 1}
    assert len(part_names(run.output)) == 4


def test_lost_rows_are_counted_and_quarantined(finished):
    run, outcome = finished
    assert outcome.rows.dropped == {"too_long": 2, "template_rejects": 1}
    lines = [json.loads(line) for line in run.output.join(QUARANTINE).read_bytes().splitlines()]
    lines.sort(key=lambda line: line["key"])  # they come as they are found
    assert [(line["key"], line["reason"], line["line"]) for line in lines] == [
        ("k90:1", "too_long", 91),
        ("k90:2", "too_long", 91),
        ("k91:0", "template_rejects", 92),
        (DEADLY, "worker_died", 100),
    ]
    assert "unknown role critic" in lines[2]["detail"]


def test_answers_cut_by_their_length_are_counted(finished):
    run, outcome = finished
    reasons = Counter(row["finish_reason"] for row in run.rows())
    assert min(reasons["stop"], reasons["length"]) >= 3
    assert (outcome.rows.kept, outcome.rows.truncated) == (reasons["stop"], reasons["length"])
    for row in run.rows():
        was_cut = row["finish_reason"] == "length"
        assert (row["output_ids"][-1] == EOS) != was_cut
        assert len(row["output_ids"]) == MAX_NEW_TOKENS if was_cut else len(row["output_ids"]) <= MAX_NEW_TOKENS
    assert outcome.facts["output_tokens"] == sum(len(row["output_ids"]) for row in run.rows())


@pytest.fixture(scope="module")
def here(ending_target, tmp_path_factory) -> Iterator[Callable[..., list[tuple[list[dict], PartAccount]]]]:
    """Answers in this process, of one engine: `here(prompts a part, **data)` gives the rows and the account of each part."""
    run = Run(str(tmp_path_factory.mktemp("here")), ending_target)
    kwargs, engines, files = response_engine_kwargs(run.settings, str(ending_target)), [], count()

    def answer(size: int, **data) -> list[tuple[list[dict], PartAccount]]:
        config = run.settings.data.model_copy(update=data)
        worker = AnswerWorker(run.output, lambda done: None, run.prompts, str(ending_target), kwargs, config)
        worker.__dict__["_engine"] = engines[0] if engines else worker._engine
        engines[:] = [worker._engine]
        parts = []
        for cut in prompt_ranges(run.prompts.join(PROMPTS), size):
            part = run.output.join(f"part-{next(files):05d}.parquet")
            worker.make([Piece(PartTask(0, cut.start, cut.num_bytes), part)])
            parts.append((read_answers(part), read_account(part)))
        return parts

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CPU_ENGINE_ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)
        yield answer


def test_answers_cut_by_their_length_can_be_dropped(here):
    """With the turns after them, whose prompts would hold half an answer."""
    [(rows, account)] = here(100, truncation="drop")
    assert {row["output_ids"][-1] for row in rows} == {EOS}
    assert len(rows) == account.kept >= 3
    assert account.truncated == 0
    assert account.dropped["cut_off"] >= 3
    assert account.rows().rows_in == sum(len(prompt.turns()) for prompt in make_prompts())
    kept = {row["key"] for row in rows}
    assert not [key for key in kept if key.endswith(":1") and key.replace(":1", ":0") not in kept]


def test_what_is_drawn_depends_on_the_turn_and_not_on_what_is_answered_beside_it(here):
    greedy, drawn = here(100), here(100, temperature=1.0, top_p=0.95, top_k=30)
    in_small_parts = here(3, temperature=1.0, top_p=0.95, top_k=30)
    assert len(in_small_parts) == 8
    assert [row for rows, _ in in_small_parts for row in rows] == drawn[0][0]
    first = {row["key"]: row["output_ids"] for row in greedy[0][0] if row["turn"] == 0}
    others = {row["key"]: row["output_ids"] for row in drawn[0][0] if row["turn"] == 0}
    assert sum(first[key] != others[key] for key in first.keys() & others.keys()) > len(first) / 2
    reseeded = here(100, temperature=1.0, top_p=0.95, top_k=30, seed=1)
    assert reseeded[0][0] != drawn[0][0]


@pytest.mark.parametrize(("finish_reason", "token_ids"), [("abort", [40, 41]), ("error", []), ("stop", [])])
def test_an_answer_that_is_none_fails_its_turn_and_those_after_it(ending_target, tmp_path, finish_reason, token_ids):
    """vLLM's own outputs, which its engine makes of aborted requests only, handed to the worker without an engine."""
    run = Run(str(tmp_path), ending_target)
    kwargs = response_engine_kwargs(run.settings, str(ending_target))
    write_prompts(run.prompts, make_prompts()[:2], {"k00": "train", "k01": "train"})
    worker = AnswerWorker(run.output, lambda done: None, run.prompts, str(ending_target), kwargs, run.settings.data)
    (whole,) = prompt_ranges(run.prompts.join(PROMPTS), 100)
    file = run.output.join("part-00000.parquet")
    part = worker._part(Piece(PartTask(0, whole.start, whole.num_bytes), file))
    for dialogue in part.dialogues:
        completion = CompletionOutput(0, "", token_ids, None, None, finish_reason=finish_reason)
        worker._on_answer(dialogue, RequestOutput(dialogue.key, None, [7], None, [completion], finished=True))
    account = read_account(file)
    assert account.failed == {"no_answer": 3}
    assert [lost["key"] for lost in account.quarantine] == ["k00:0", "k00:1", "k01:0"]
    assert {lost["detail"] for lost in account.quarantine} == {f"finish reason {finish_reason}"}
    assert read_answers(file) == []


def test_a_turn_is_asked_with_the_targets_own_answer_before_it(finished):
    run, _ = finished
    tokenizer = load_tokenizer(run.target)
    rows = {row["key"]: row for row in run.rows()}
    prompts = [prompt for prompt in make_prompts()[:NUM_PROMPTS] if len(prompt.turns()) == 2]
    assert len(prompts) == 5
    for prompt in prompts:
        first, second = rows[f"{prompt.key}:0"], rows[f"{prompt.key}:1"]
        assert first["prompt_ids"] == render(tokenizer, prompt.messages[:1], template_kwargs=SWITCH)
        answer = {"role": "assistant", "content": tokenizer.decode(first["output_ids"], skip_special_tokens=True)}
        messages = [prompt.messages[0], answer, prompt.messages[1]]
        assert second["prompt_ids"] == render(tokenizer, messages, template_kwargs=SWITCH)
        assert "Be brief." in tokenizer.decode(second["prompt_ids"])


def test_ids_are_answered_as_they_are(finished):
    run, _ = finished
    (row,) = [row for row in run.rows() if row["prompt_key"] == "k92"]
    assert row["prompt_ids"] == GIVEN_IDS
    assert row["output_ids"]


def test_facts_say_how_long_the_documents_are(finished):
    run, outcome = finished
    documents = list(merge_turns(run.rows()))
    assert outcome.facts["document_tokens"] == sum(len(document.input_ids) for document in documents)
    assert outcome.facts["prompt_tokens"] == sum(len(row["prompt_ids"]) for row in run.rows())


def test_the_same_again_starts_no_engine(finished, monkeypatch):
    run, outcome = finished
    before = run.stamps()
    monkeypatch.setattr("components.data.part_map._run", pytest.fail)
    assert run.answer() == outcome
    assert run.stamps() == before


def test_too_many_lost_rows_fail_with_the_table(finished):
    run, _ = finished
    with pytest.raises(TooManyRowsLost, match=r"dropped\[too_long\] 2"):
        run.answer(max_dropped_fraction=0.05)


def test_a_deleted_part_is_made_again_and_no_other(finished):
    """The cut is that of the first run, whatever `rows_per_shard` says now."""
    run, outcome = finished
    before, rows, sums = run.stamps(), run.rows(), run.sums()
    run.output.join("part-00001.parquet").delete()
    assert run.answer(rows_per_shard=3) == outcome
    after = run.stamps()
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] != before[name]] == ["part-00001.parquet"]
    assert run.sums() == sums
    assert run.rows() == rows
