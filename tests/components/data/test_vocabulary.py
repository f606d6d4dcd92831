"""The draft vocabulary: the most frequent answer tokens, the end tokens always, filled where data is little."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import ray

from components.cluster_room import Started
from components.data import vocabulary
from components.data.answers import write_answers
from components.data.parts import PartAccount, part_name
from components.data.vocabulary import TokenCounts, build_vocabulary, choose_ids, count_tokens, read_used_ids
from components.storage import Location
from tests.cluster import free_cpus

VOCAB = 20


def counts(answers: dict[int, int], prompts: dict[int, int] | None = None) -> TokenCounts:
    columns = [np.zeros(VOCAB, dtype=np.int64) for _ in TokenCounts._fields]
    for column, given in zip(columns, (answers, prompts or {}), strict=False):
        for token, number in given.items():
            column[token] = number
    return TokenCounts(*columns)


def test_frequent_answers_first_and_the_end_tokens_always():
    ids = choose_ids(counts({7: 5, 9: 3, 11: 3, 13: 1}), 4, eos_token_ids=[2, 19])
    assert ids.tolist() == [2, 7, 9, 19]
    assert ids.dtype == np.int64


def test_filled_with_prompt_tokens_then_with_the_lowest():
    ids = choose_ids(counts({7: 5}, {15: 1, 16: 9, 7: 50}), 6, eos_token_ids=[2])
    assert ids.tolist() == [0, 1, 2, 7, 15, 16]


def test_capped_at_the_target():
    assert choose_ids(counts({7: 5}), 12000, eos_token_ids=[2]).tolist() == list(range(VOCAB))


def test_only_training_rows_choose(tmp_path: Path):
    folder = Location(str(tmp_path))
    splits = [("train", [1, 2], [7, 7]), ("held_out", [3], [8]), ("validation", [4], [9]), ("train", [5], [7, 10])]
    for number, group in enumerate((splits[:2], splits[2:], [])):
        rows = [
            {"key": f"{i}:0", "prompt_key": str(i), "split": split, "prompt_ids": prompt, "output_ids": output}
            for i, (split, prompt, output) in enumerate(group)
        ]
        write_answers(folder.join(part_name(number)), rows, PartAccount())
    found = count_tokens(folder, [part_name(i) for i in range(3)], VOCAB)
    assert np.flatnonzero(found.train_answers).tolist() == [7, 10]
    assert found.train_answers[7] == 3
    assert np.flatnonzero(found.train_prompts).tolist() == [1, 2, 5]
    assert np.flatnonzero(found.held_out_answers).tolist() == [8]
    assert np.flatnonzero(found.others).tolist() == [3, 4, 9]


def test_every_id_of_every_split_is_known_as_used(ray_cluster, tmp_path: Path, monkeypatch):
    """Counted by a few tasks at once, and while arms hold every CPU."""
    monkeypatch.setattr(vocabulary, "PARTS_PER_TASK", 1)
    monkeypatch.setattr(vocabulary, "TASKS_AT_ONCE", 2)
    responses, output = Location(str(tmp_path / "responses")), Location(str(tmp_path / "vocabulary"))
    rows = [
        {"key": f"{i}:0", "prompt_key": str(i), "split": split, "prompt_ids": [3 * i], "output_ids": [3 * i + 1]}
        for i, split in enumerate(("train", "validation", "held_out"))
    ]
    for number, row in enumerate(rows):
        write_answers(responses.join(part_name(number)), [row], PartAccount())
    arms = ray.remote(num_cpus=free_cpus())(Started).remote()
    assert not ray.get(arms.is_set.remote(), timeout=60)
    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(build_vocabulary, responses, 4, VOCAB, [2], output)
        try:
            built.result(timeout=300)
        finally:
            ray.kill(arms)
    assert read_used_ids(output) == {0, 1, 3, 4, 6, 7}
