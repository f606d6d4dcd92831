"""Words, n-grams and the index of near texts."""

import random

import numpy as np
import pytest

from components.data.similarity import SHINGLE_WORDS, NearIndex, grams, jaccard, words


def test_words_are_compared_without_case_punctuation_and_form():
    assert words("Don't  STOP—the café!") == ["don", "t", "stop", "the", "café"]
    assert words("ＡＢＣ cafe\u0301") == ["abc", "café"]


def test_a_script_without_spaces_has_a_word_a_character():
    assert words("東京の天気 today") == ["東", "京", "の", "天", "気", "today"]


def test_grams_are_runs_of_words_in_their_order():
    assert len(grams(["a", "b", "c", "d", "e"], 3)) == 3
    assert len(grams(["a", "b", "a", "b", "a"], 2)) == 2
    assert jaccard(grams(["a", "b", "c"], 3), grams(["c", "b", "a"], 3)) == 0
    assert len(grams(["a", "b"], 13)) == 1
    assert len(grams([], 3)) == 0


def test_jaccard_of_sets():
    a, b = grams(["one", "two", "three", "four"], 1), grams(["three", "four", "five"], 1)
    assert jaccard(a, b) == pytest.approx(2 / 5)
    assert jaccard(a, a) == 1
    assert jaccard(grams([], 1), grams([], 1)) == 0


@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.95])
def test_the_index_finds_what_is_near_and_nothing_else(similarity):
    """400 pairs around the threshold: each found one is near, and of the near ones at most one in fifty is missed."""
    rng, near, found = np.random.default_rng(0), 0, 0
    for share in rng.uniform(similarity - 0.1, 1, 400):
        drawn = rng.integers(0, 1 << 63, 200, dtype=np.uint64)
        changed = drawn.copy()
        num_changed = round(200 * (1 - share) / (1 + share))
        changed[:num_changed] = rng.integers(0, 1 << 63, num_changed, dtype=np.uint64)
        index = NearIndex(similarity)
        index.add("drawn", np.unique(drawn))
        hit = index.find(np.unique(changed))
        true = jaccard(np.unique(drawn), np.unique(changed))
        assert hit is None or (hit == ("drawn", true) and true >= similarity)
        near += true >= similarity
        found += hit is not None
    assert near > 100
    assert found >= 0.98 * near


def test_texts_without_words_are_near_nothing():
    index = NearIndex(0.8)
    index.add("a", grams(words("?!"), SHINGLE_WORDS))
    assert index.find(grams(words("..."), SHINGLE_WORDS)) is None


def test_hashes_are_the_same_in_every_run():
    assert grams(["the", "same", "everywhere"], 3).tolist() == [14497467305343470014]


def test_different_texts_have_different_hashes():
    rng = random.Random(0)
    texts = {tuple(rng.choices("abcdefgh", k=5)) for _ in range(3000)}
    assert len({grams(list(text), 5)[0] for text in texts}) == len(texts)
