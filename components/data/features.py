"""Features of the answers: the hidden states that a head reads and the teacher's, one shard for each part of answers."""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from components.config import Settings
from components.data.capturing import CaptureWorker
from components.data.extractors.interface import extractor_spec
from components.data.part_map import PartJob, make_parts
from components.data.part_worker import PartTask, PartWorker
from components.data.parts import conclude, part_names, read_columns
from components.pipeline import check_disk, check_scratch
from components.stage import Outcome
from components.storage import Location
from components.target.aux_layers import ID_AND_MASK_BYTES, bytes_per_token

log = logging.getLogger("aerie")

OUTLINED_SPLITS: Mapping[str, tuple[str, ...]] = {"store": (), "stream": ("train",)}
"""Of each mode: the splits whose features training captures itself. The others are read again and again, and few: they are kept."""
NOTHING_STREAMED = {"streamed_documents": 0, "streamed_tokens": 0}


def record_features(
    settings: Settings,
    responses: Location,
    num_tokens: int,
    target: Mapping[str, Any],
    target_path: str,
    output: Location,
    worker: type[PartWorker] = CaptureWorker,
    prompts: Location | None = None,
) -> Outcome:
    """Record the features of every answer; shards that are there already stay as they are.

    Args:
        settings: The run's.
        responses: Output folder of the responses stage.
        num_tokens: Tokens of its documents.
        target: Facts of the target stage.
        target_path: The target's Hugging Face folder.
        output: Where the shards go.
        worker: Class of the workers.
        prompts: Output folder of the prompts stage, for the places of lost rows.

    Raises:
        ConfigError: aux layers that the target does not have, or a disk, on S3 the one of scratch files, that is too small.
        OSError: the storage is full.
        WorkersFailed: workers did not start, or did nothing but die.
        TooManyRowsLost: more turns were lost than `data.max_dropped_fraction` allows.
    """
    extractor = extractor_spec(settings, target, target_path)
    aux_layers = list(extractor.aux_layers)
    token_bytes = bytes_per_token(len(aux_layers), target["hidden_size"])
    outlined_splits = OUTLINED_SPLITS[settings.data.mode]
    kept_tokens = int(num_tokens * (1 - split_share(responses, outlined_splits)))
    num_bytes = kept_tokens * token_bytes + (num_tokens - kept_tokens) * ID_AND_MASK_BYTES
    log.info(
        "features: %s, layers %s, %d bytes a token, %d tokens, those of %d written, %.1f MB",
        extractor.name, aux_layers, token_bytes, num_tokens, kept_tokens, num_bytes / 1e6,
    )  # fmt: skip
    names = part_names(responses)
    check_disk(output, num_bytes - sum(output.join(name).size_bytes() for name in part_names(output)))
    check_scratch(output, num_bytes // max(1, len(names)))
    job = PartJob(
        title="features",
        unit="tokens",
        total=num_tokens,
        output=output,
        worker=worker,
        worker_args=(responses, extractor, outlined_splits),
        resources=settings.resources.features,
        env=extractor.env,
        max_attempts=settings.data.max_attempts,
        stall_timeout_s=settings.data.stall_timeout_s,
    )
    make_parts(job, [PartTask(int(re.sub(r"\D", "", name))) for name in names])
    outcome = conclude("features", output, settings.data.max_dropped_fraction, prompts)
    shape = {
        "aux_layers": aux_layers,
        "num_aux_layers": len(aux_layers),
        "hidden_size": target["hidden_size"],
        "bytes_per_token": token_bytes,
    }
    return Outcome({**NOTHING_STREAMED, **outcome.facts, **shape}, outcome.rows)


def split_share(responses: Location, splits: Sequence[str]) -> float:
    """Share of the answers that belong to these splits."""
    counts: Counter[str] = Counter()
    for name in part_names(responses) if splits else []:
        counts.update(read_columns(responses.join(name), ["split"]).column("split").to_pylist())
    return sum(counts[split] for split in splits) / max(1, counts.total())
