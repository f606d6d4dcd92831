"""The benchmark of capture measures both sides over the same tokens and writes what it prints."""

import json

import pytest

from components.data.benchmark import main, packing


def test_packing_says_how_full_batches_are_and_what_attention_is_wasted():
    figures = packing([[[9] * 6, [9] * 2], [[9] * 8]], 10)
    assert figures["fill"] == 16 / 20
    assert figures["attention_within_documents"] == pytest.approx((36 + 4 + 64) / (64 + 64))
    assert (figures["documents"], figures["batches"], figures["tokens"]) == (3, 2, 16)


def test_both_sides_are_measured(tiny_target, tmp_path, capsys):
    result = tmp_path / "result.json"
    main(
        str(tiny_target), dtype="float32", documents=6, min_tokens=16, max_tokens=40, batch_tokens=64, rounds=3,
        threads=1, with_ray=False, rows_per_part=64, result=result,
    )  # fmt: skip
    figures = json.loads(result.read_text())
    capture = figures["capture"]
    assert capture["documents"] == 6
    assert 6 * 16 <= capture["tokens"] <= 6 * 40
    assert len(capture["ratios"]) == 3
    assert min(capture["ratios"]) <= capture["ratio"] <= max(capture["ratios"])
    parts = capture["ms_per_1000_tokens"]
    assert parts["bare forward pass"] == pytest.approx(1e6 / capture["bare_tokens_per_s"])
    assert parts["the worker, all in all"] == pytest.approx(1e6 / capture["worker_tokens_per_s"])
    assert min(parts["checksums"], parts["writing"]) > 0
    assert "tokens/s, worker" in capsys.readouterr().out
    assert figures["ray_data"] is None
