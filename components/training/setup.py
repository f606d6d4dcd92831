"""From finished outputs to a trainer: the head at its starting point, its teacher and this rank's documents."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load
from transformers import AutoConfig

from components.config import TrainConfig
from components.data.shards import document_index, read_input_ids
from components.draft.batch import Document
from components.draft.head import DraftHead, HeadConfig, feature_rms
from components.draft.losses import Teacher
from components.storage import Location
from components.target.layers import teacher_weights
from components.training.order import Entry
from components.training.shard import shard_head
from components.training.sources import DocumentSource, StoredDocuments
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
    feature_rms: tuple[float, ...]
    """Of each aux layer, from `feature_scale`."""


def split_entries(location: Location, split: str) -> list[Entry]:
    """The documents of one split, numbered in the order of their shards and rows."""
    rows = [row for row in document_index(location) if row.split == split]
    return [Entry(row.shard, row.row, number) for number, row in enumerate(rows)]


def draft_vocabulary(uri: str) -> torch.Tensor:
    """[U] target ids that the head may draft, in draft id order."""
    return load(Location(uri).read_bytes())["draft_token_ids"]


def feature_scale(features: Location, source: DocumentSource, num_aux_layers: int) -> tuple[float, ...]:
    """Typical root mean square of each aux layer's states, over the first training documents; asked once for all workers.

    Raises:
        ValueError: there is no usable training document.
    """
    first = source.documents(split_entries(features, "train")[:DOCUMENTS_FOR_SCALE])
    rms = [feature_rms(document.aux_hidden, num_aux_layers) for document in first if document is not None]
    if not rms:
        raise ValueError("features: no training document; lower data.validation_fraction or add prompts")
    return tuple(torch.cat(rms).median(dim=0).values.tolist())


def build_head(spec: HeadSpec, seed: int) -> tuple[DraftHead, Teacher]:
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
    rms_A = torch.tensor(spec.feature_rms)
    head.init_from_target(weights.embed_VH.float(), weights.lm_head_VH.float(), weights.norm_H.float(), rms_A, seed)
    return head, Teacher(weights.norm_H.float(), weights.eps, weights.lm_head_VH[draft_vocab_U])


def build_trainer(
    spec: HeadSpec,
    config: TrainConfig,
    source: DocumentSource,
    rank: int,
    world_size: int,
    device: torch.device,
    checkpoint: Path | None = None,
) -> Trainer:
    """A trainer at step 0, or where a checkpoint's folder says, with the same head on every rank."""
    location = Location(spec.features_uri)
    entries = split_entries(location, "train")
    head, teacher = build_head(spec, config.seed)
    mask_id = torch.tensor([spec.mask_token_id])  # always trained: no text uses it, so its row means nothing yet
    head.embed_tokens.train_rows(torch.cat([read_input_ids(location), mask_id]) if config.train_embeddings else mask_id)
    head.embed_tokens.sparse = config.embedding_updates == "sparse"
    head.lm_head.requires_grad_(config.train_lm_head)
    if checkpoint is not None:
        load_weights(checkpoint, head)
    head.to(device)
    if config.shard and world_size > 1:
        shard_head(head, world_size)
    trainer = Trainer(head, _on_device(teacher, device), entries, source.documents, config, rank, world_size, device)
    if checkpoint is not None:
        trainer.progress = load_progress(checkpoint, trainer.optimizer)
    return trainer


def own_documents(spec: HeadSpec, split: str, trainer: Trainer) -> Iterator[Document]:
    """This rank's share of another split's documents, one in memory at a time; may be empty."""
    source = StoredDocuments(Location(spec.features_uri), kept_bytes=0)
    return source.documents(split_entries(source.location, split)[trainer.rank :: trainer.world_size])


def _on_device(teacher: Teacher, device: torch.device) -> Teacher:
    return replace(teacher, norm_T=teacher.norm_T.to(device), lm_head_UT=teacher.lm_head_UT.to(device))
