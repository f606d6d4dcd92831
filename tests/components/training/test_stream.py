"""The `head` stage on a stream: a document that ends its capture workers costs only itself, and the driver holds no rows."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import components.training.produce as produce
from components.config import Settings
from components.data.capturing import CaptureWorker
from components.data.extractors.interface import Extractor, ExtractorSpec, extractor_spec
from components.data.features import OUTLINED_SPLITS
from components.data.part_worker import PartTask, Piece
from components.data.parts import QUARANTINE, part_name
from components.data.prompt_list import write_prompts
from components.data.prompts import Prompt
from components.data.verdict import SILENT_DEATH
from components.data.vocabulary import build_vocabulary
from components.stage import Artifact, Outcome, Output
from components.storage import Location
from components.target.aux_layers import bytes_per_token
from components.target.layers import Captured
from tests.components.data.answers import END_ID, answered, random_ids, write_responses
from tests.components.evaluation.artifacts import make_artifact
from tests.peak import forget_peak, peak_bytes
from tests.tiny import EOS, make_tiny_llama

NUM_LAYERS, HIDDEN = 48, 64
AUX_LAYERS = list(range(1, NUM_LAYERS))
"""As many as there are: rows are large though the target and the head are small."""
NUM_DOCUMENTS, NUM_TOKENS = 160, 170
DEADLY_DOCUMENT = 77
DEADLY = END_ID
"""Token that only this document holds."""
MB = 1e6


@dataclass(frozen=True)
class DeadlySpec(ExtractorSpec):
    def start(self) -> Extractor:
        return DeadlyExtractor(super().start())


class DeadlyExtractor:
    """Its process ends at every try of the deadly document."""

    def __init__(self, extractor: Extractor) -> None:
        self.extractor = extractor

    def extract(self, documents: Sequence[Sequence[int]]) -> Iterator[Captured]:
        if any(DEADLY in ids for ids in documents):
            os._exit(9)
        return self.extractor.extract(documents)


SETTINGS = Settings.model_validate(
    {
        "target": {"dtype": "float32"},
        "data": {"mode": "stream", "stream": {"documents_in_flight": 8}, "max_attempts": 1},
        "draft": {"aux_layers": AUX_LAYERS, "num_layers": 1, "vocab_size": 300},
        "train": {"epochs": 1, "num_depths": 2, "documents_per_step": 32, "dtype": "float32"},
    }
)


@pytest.fixture(scope="module")
def inputs(ray_cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """Outputs of the stages before `head`: all documents to train on, but two for validation and two held out."""
    folder = tmp_path_factory.mktemp("stream")
    target = make_tiny_llama(folder / "target", hidden=HIDDEN, layers=NUM_LAYERS, kv_heads=1, heads=2)
    generator = torch.Generator().manual_seed(0)
    splits = dict.fromkeys((0, 1), "validation") | dict.fromkeys((2, 3), "held_out")
    rows, prompts = [], [Prompt(f"p{n}", "maths", [], None, "asked.jsonl", n + 1) for n in range(NUM_DOCUMENTS)]
    write_prompts(Location(str(folder / "prompts")), prompts, {prompt.key: "train" for prompt in prompts})
    for number in range(NUM_DOCUMENTS):
        ids = random_ids(NUM_TOKENS, generator)
        if number == DEADLY_DOCUMENT:
            ids[-1] = DEADLY
        rows.append(answered(number, ids, NUM_TOKENS - 8, splits.get(number, "train")))
    responses, features = Location(str(folder / "responses")), Location(str(folder / "features"))
    write_responses(responses, rows)
    facts = {
        "model": str(target),
        "path": str(target),
        "num_layers": NUM_LAYERS,
        "hidden_size": HIDDEN,
        "eos_token_ids": [EOS],
    }
    extractor = extractor_spec(SETTINGS, facts, str(target))
    worker = CaptureWorker(features, lambda done: None, responses, extractor, OUTLINED_SPLITS["stream"])
    worker.make([Piece(PartTask(0), features.join(part_name(0)))])
    build_vocabulary(responses, 300, 512, [EOS], Location(str(folder / "vocabulary")))
    described = {"aux_layers": AUX_LAYERS, "streamed_documents": NUM_DOCUMENTS - len(splits)}
    return {
        "target": make_artifact("target", folder, facts),
        "prompts": make_artifact("prompts", folder / "prompts", {}),
        "features": make_artifact("features", folder / "features", described),
        "vocabulary": make_artifact("vocabulary", folder / "vocabulary", {}),
    }


def test_a_deadly_document_costs_itself_and_the_driver_holds_no_rows(
    inputs: dict[str, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deadly_spec(*arguments) -> ExtractorSpec:
        return DeadlySpec(**vars(extractor_spec(*arguments)))

    monkeypatch.setattr(produce, "extractor_spec", deadly_spec)
    output = Output("head", Location(str(tmp_path / "head")), "", lambda figures, step: None)
    forget_peak()
    before = peak_bytes()
    outcome: Outcome = produce.train_head(SETTINGS, inputs, output)
    grown = peak_bytes() - before

    assert outcome.rows is not None
    assert outcome.rows.table() == "in 156, kept 155, truncated 0, failed[worker_died] 1"
    (lost,) = [json.loads(line) for line in output.join(QUARANTINE).read_bytes().splitlines()]
    place = {"source": "asked.jsonl", "line": DEADLY_DOCUMENT + 1}
    assert lost == {"key": f"p{DEADLY_DOCUMENT}:0", **place, **SILENT_DEATH._asdict()}
    assert outcome.facts["steps"] == 5
    streamed = NUM_DOCUMENTS * NUM_TOKENS * bytes_per_token(len(AUX_LAYERS), HIDDEN)
    assert streamed > 160 * MB
    assert grown < streamed / 2, f"by {grown / MB:.0f} of {streamed / MB:.0f} MB"  # modules are loaded, too
