"""How alike two texts are: sets of hashed word n-grams, their Jaccard similarity, and an index that finds near ones.

Words are compared without case, punctuation and the form of their characters (Unicode NFKC); scripts written without spaces
count a character as a word. The index is MinHash with banding (Broder 1997; Leskovec, Rajaraman and Ullman, Mining of Massive
Datasets, chapter 3): it proposes candidates, and their similarity is then computed exactly.
"""

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Hashable
from functools import lru_cache

import numpy as np

UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
SHINGLE_WORDS = 3
NUM_HASHES = 128
LEAST_RECALL = 0.99
"""Share of the pairs exactly at the threshold that the index finds; of more similar pairs it finds more."""

Grams = np.ndarray
"""Sorted distinct hashes of n-grams, uint64."""


def words(text: str) -> list[str]:
    """The words of a text as they are compared."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def grams(tokens: list[str], length: int) -> Grams:
    """The hashes of all runs of `length` words; of fewer words, the hash of all of them."""
    if not tokens:
        return np.empty(0, np.uint64)
    length = min(length, len(tokens))
    hashes = np.array([_word_hash(token) for token in tokens], np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(hashes, length)
    # Another odd factor for each place: the order of words counts. Sums wrap around at 2^64.
    return np.unique((runs * _odd_numbers(length, seed=length)).sum(axis=1, dtype=np.uint64))


def jaccard(a: Grams, b: Grams) -> float:
    """|a and b| / |a or b|; 0 where both are empty."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    union = len(a) + len(b) - common
    return common / union if union else 0.0


class NearIndex:
    """Finds what it was given, by similarity.

    Args:
        similarity: Jaccard similarity from which two sets are near.
    """

    def __init__(self, similarity: float) -> None:
        self._similarity = similarity
        self._rows_per_band = _rows_per_band(similarity)
        self._bands: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        self._entries: list[tuple[Hashable, Grams]] = []

    def add(self, name: Hashable, shingles: Grams) -> None:
        """Remember a set; an empty one is near nothing."""
        for band in self._keys(shingles):
            self._bands[band].append(len(self._entries))
        self._entries.append((name, shingles))

    def find(self, shingles: Grams) -> tuple[Hashable, float] | None:
        """The first one near this set with its similarity, or None."""
        candidates = {entry for band in self._keys(shingles) for entry in self._bands.get(band, ())}
        for entry in sorted(candidates):
            name, other = self._entries[entry]
            if (found := jaccard(shingles, other)) >= self._similarity:
                return name, found
        return None

    def _keys(self, shingles: Grams) -> list[tuple[int, bytes]]:
        if not len(shingles):
            return []
        mixed = (
            shingles[None, :] * _odd_numbers(NUM_HASHES, seed=0)[:, None] + _odd_numbers(NUM_HASHES, seed=1)[:, None]
        )
        smallest = mixed.min(axis=1)
        starts = range(0, NUM_HASHES - self._rows_per_band + 1, self._rows_per_band)
        return [(start, smallest[start : start + self._rows_per_band].tobytes()) for start in starts]


def _rows_per_band(similarity: float) -> int:
    """The most rows a band may have: more rows, fewer candidates, but pairs at the threshold are missed sooner."""
    for rows in range(16, 1, -1):
        missed = (1 - similarity**rows) ** (NUM_HASHES // rows)
        if 1 - missed >= LEAST_RECALL:
            return rows
    return 1


@lru_cache(maxsize=1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())


@lru_cache(maxsize=64)
def _odd_numbers(count: int, seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(0, 1 << 64, count, dtype=np.uint64)
    return drawn | np.uint64(1)
