"""Features of the answers: the hidden states that a head reads and the teacher's, one shard for each part of answers."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from components.config import Settings
from components.data.capturing import CaptureWorker
from components.data.part_map import PartJob, make_parts
from components.data.part_worker import PartTask, PartWorker
from components.data.parts import conclude, part_names
from components.pipeline import check_disk
from components.stage import Outcome
from components.storage import Location
from components.target.aux_layers import bytes_per_token, choose_aux_layers

log = logging.getLogger("aerie")


def record_features(
    settings: Settings,
    responses: Location,
    num_tokens: int,
    target: Mapping[str, Any],
    target_path: str,
    output: Location,
    worker: type[PartWorker] = CaptureWorker,
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

    Raises:
        ConfigError: aux layers that the target does not have, or a disk that is too small.
        OSError: the storage is full.
        WorkersFailed: workers did not start, or did nothing but die.
        TooManyRowsLost: more turns were lost than `data.max_dropped_fraction` allows.
    """
    aux_layers = choose_aux_layers(settings.draft.aux_layers, target["num_layers"])
    token_bytes = bytes_per_token(len(aux_layers), target["hidden_size"])
    log.info(
        "features: layers %s, %d bytes a token, %d tokens, %.1f MB",
        aux_layers, token_bytes, num_tokens, num_tokens * token_bytes / 1e6,
    )  # fmt: skip
    there = sum(output.join(name).size_bytes() for name in part_names(output))
    check_disk(output, num_tokens * token_bytes - there)
    make_parts(
        _job(settings, responses, num_tokens, target_path, aux_layers, output, worker),
        [PartTask(int(re.sub(r"\D", "", name))) for name in part_names(responses)],
    )
    outcome = conclude("features", output, settings.data.max_dropped_fraction)
    shape = {
        "aux_layers": aux_layers,
        "num_aux_layers": len(aux_layers),
        "hidden_size": target["hidden_size"],
        "bytes_per_token": token_bytes,
    }
    return Outcome({**outcome.facts, **shape}, outcome.rows)


def _job(
    settings: Settings,
    responses: Location,
    num_tokens: int,
    target_path: str,
    aux_layers: list[int],
    output: Location,
    worker: type[PartWorker],
) -> PartJob:
    resources = settings.resources.features
    num_threads = max(1, int(resources.num_cpus))
    return PartJob(
        title="features",
        unit="tokens",
        total=num_tokens,
        output=output,
        worker=worker,
        worker_args=(
            responses,
            target_path,
            aux_layers,
            settings.target.dtype,
            settings.data.batch_tokens,
            num_threads,
        ),
        resources=resources,
        env={"OMP_NUM_THREADS": str(num_threads), **resources.env},
        max_attempts=settings.data.max_attempts,
    )
