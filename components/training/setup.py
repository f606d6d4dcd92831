"""From finished outputs to a trainer: the head at its starting point, its teacher and this rank's documents."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load
from transformers import AutoConfig

from components.config import TrainConfig
from components.data.shards import StoredDocument, document_index, read_input_ids, read_shard
from components.draft.batch import Document
from components.draft.head import DraftHead, HeadConfig, median_feature_rms
from components.draft.losses import Teacher
from components.storage import Location
from components.target.layers import teacher_weights
from components.training.order import SHARDS_SHUFFLED_TOGETHER, Entry
from components.training.shard import shard_head
from components.training.state import load_progress, load_weights
from components.training.trainer import Trainer

DOCUMENTS_FOR_SCALE = 64  # features of this many documents set the scale of fc and mask_hidden


@dataclass(frozen=True)
class HeadSpec:
    """What a head is made from; plain values, so that every worker builds the same one."""

    features_uri: str
    vocabulary_uri: str
    """The `vocabulary.safetensors` file."""
    target_path: str
    aux_layers: tuple[int, ...]
    num_layers: int
    mask_token_id: int


@dataclass
class DocumentReader:
    """Documents by shard and row, with the last few shards kept in memory."""

    location: Location
    max_shards: int = SHARDS_SHUFFLED_TOGETHER + 1
    _shards: OrderedDict[str, list[StoredDocument]] = field(default_factory=OrderedDict, init=False)

    def __call__(self, entry: Entry) -> Document:
        if entry.shard not in self._shards:
            self._shards[entry.shard] = read_shard(self.location, entry.shard)
            if len(self._shards) > self.max_shards:
                self._shards.popitem(last=False)
        self._shards.move_to_end(entry.shard)
        return self._shards[entry.shard][entry.row]


def split_entries(location: Location, split: str) -> list[Entry]:
    """The documents of one split, numbered in the order of their shards and rows."""
    rows = [row for row in document_index(location) if row.split == split]
    return [Entry(row.shard, row.row, number) for number, row in enumerate(rows)]


def draft_vocabulary(uri: str) -> torch.Tensor:
    """[U] target ids that the head may draft, in draft id order."""
    return load(Location(uri).read_bytes())["draft_token_ids"]


def build_head(spec: HeadSpec, documents: Sequence[Document], seed: int) -> tuple[DraftHead, Teacher]:
    """A head that starts from its target's weights, and the target's output layer as its teacher."""
    draft_vocab_U = draft_vocabulary(spec.vocabulary_uri)
    weights = teacher_weights(Path(spec.target_path))
    config = HeadConfig.from_target(
        AutoConfig.from_pretrained(spec.target_path),
        aux_layers=spec.aux_layers,
        num_layers=spec.num_layers,
        draft_vocab_size=len(draft_vocab_U),
        mask_token_id=spec.mask_token_id,
    )
    head = DraftHead(config, draft_vocab_U if len(draft_vocab_U) < config.vocab_size else None)
    rms_A = median_feature_rms(torch.cat([d.aux_hidden for d in documents]), config.num_aux_layers)
    head.init_from_target(weights.embed_VH.float(), weights.lm_head_VH.float(), weights.norm_H.float(), rms_A, seed)
    return head, Teacher(weights.norm_H.float(), weights.eps, weights.lm_head_VH[draft_vocab_U])


def build_trainer(
    spec: HeadSpec,
    config: TrainConfig,
    rank: int,
    world_size: int,
    device: torch.device,
    checkpoint: Path | None = None,
) -> Trainer:
    """A trainer at step 0, or where a checkpoint's folder says, with the same head on every rank."""
    location = Location(spec.features_uri)
    entries = split_entries(location, "train")
    if not entries:
        raise ValueError("features: no training document; lower data.validation_fraction or add prompts")
    reader = DocumentReader(location)
    head, teacher = build_head(spec, [reader(entry) for entry in entries[:DOCUMENTS_FOR_SCALE]], config.seed)
    mask_id = torch.tensor([spec.mask_token_id])  # always trained: no text uses it, so its row means nothing yet
    head.embed_tokens.train_rows(torch.cat([read_input_ids(location), mask_id]) if config.train_embeddings else mask_id)
    if checkpoint is not None:
        load_weights(checkpoint, head)
    head.to(device)
    if config.shard and world_size > 1:
        shard_head(head, world_size)
    trainer = Trainer(head, _on_device(teacher, device), entries, reader, config, rank, world_size, device)
    if checkpoint is not None:
        trainer.progress = load_progress(checkpoint, trainer.optimizer)
    return trainer


def own_documents(spec: HeadSpec, split: str, trainer: Trainer) -> list[Document]:
    """This rank's share of another split's documents; may be empty."""
    reader = DocumentReader(Location(spec.features_uri), max_shards=1)
    return [reader(entry) for entry in split_entries(reader.location, split)[trainer.rank :: trainer.world_size]]


def _on_device(teacher: Teacher, device: torch.device) -> Teacher:
    return replace(teacher, norm_T=teacher.norm_T.to(device), lm_head_UT=teacher.lm_head_UT.to(device))
