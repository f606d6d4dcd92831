"""The `head` stage: train, then export in the layout that vLLM serves."""

from collections.abc import Mapping
from typing import Any

from components.config import Settings
from components.data.stages import extractor_engine
from components.forecast import Forecast, head_parameters
from components.stage import Artifact, Outcome, Output, Stage
from components.target.aux_layers import bytes_per_token, choose_aux_layers
from components.target.stages import target_facts
from components.training.host_memory import KEPT_BYTES, most_document_bytes

NOT_IDENTITY = {"rows_per_part", "activation_checkpointing", "shard", "checkpoint_every_steps"}
"""Settings of `train` that change how the work is cut, never the head."""


NUM_CHECKPOINTS = 3
TRAINING_SHARE = (
    0.07  # of a matrix product's speed; on two cores most time goes to attention, the loss and the optimiser
)
START_S = 40.0


class TrainingFailed(Exception):
    """Training ended without a head."""


def head_stage(settings: Settings) -> Stage:
    """Trains the P-EAGLE head with Ray Train and writes `head/` and `curves.jsonl`."""

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.training.produce import train_head  # torch and transformers only once they are needed

        return train_head(settings, inputs, output)

    return Stage(
        name="head",
        run=run,
        config={
            "train": settings.train.model_dump(mode="json", exclude=NOT_IDENTITY),
            "num_layers": settings.draft.num_layers,
            "mask_token_id": settings.draft.mask_token_id,
            **_candidates(settings),
            **_capture_identity(settings),
        },
        # the prompts: to say where a document that is lost while it is streamed was asked
        inputs=("target", *(() if settings.data.mode == "store" else ("prompts",)), "features", "vocabulary"),
        plan=lambda artifacts: _plan(settings, artifacts),
        forecast=lambda known, expected: _forecast(settings, known, expected),
        tokens_done=lambda manifest: manifest["facts"]["tokens_per_s"] * manifest["facts"]["train_seconds"],
    )


def _candidates(settings: Settings) -> dict[str, int]:
    """Only where there are several: which checkpoints are exported."""
    evaluate = settings.evaluate
    if evaluate.candidates == 1:
        return {}
    return {"candidates": evaluate.candidates, "num_speculative_tokens": evaluate.num_speculative_tokens}


def _capture_identity(settings: Settings) -> dict[str, Any]:
    """Streamed features are in no input's digest, so what they depend on besides the texts is named here."""
    if settings.data.mode == "store":
        return {}
    return {
        "extractor": settings.data.extractor,
        "aux_layers": settings.draft.aux_layers,
        "dtype": settings.target.dtype,
        **extractor_engine(settings),
    }


def _plan(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    train = settings.train
    shape = f"{settings.draft.num_layers} layers, {train.epochs} epochs, K {train.num_depths}, r {train.chain_rate}"
    facts = artifacts["features"].facts if "features" in artifacts else None
    if facts:
        shape += f", {facts['supervised_tokens'] * train.epochs:,} answer tokens in all"
    shape += f"; {_plan_memory(settings, artifacts)}"
    return shape if settings.data.mode == "store" else f"{shape}; {_plan_stream(settings, facts)}"


def _plan_memory(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    if "features" in artifacts:
        token_bytes = artifacts["features"].facts["bytes_per_token"]
    else:
        target = target_facts(settings, artifacts)
        num_aux_layers = len(choose_aux_layers(settings.draft.aux_layers, target["num_layers"]))
        token_bytes = bytes_per_token(num_aux_layers, target["hidden_size"])
    longest_bytes = settings.target.max_model_len * token_bytes
    most_bytes = most_document_bytes(settings.train, settings.resources.train.replicas, longest_bytes)
    most_bytes += KEPT_BYTES if settings.data.mode == "store" else 0
    return f"at most {most_bytes / 1e9:.1f} GB of documents in a worker's memory"


def _forecast(settings: Settings, known: Mapping[str, Artifact], expected: Mapping[str, Forecast]) -> Forecast:
    """Tokens are those of answers, over all epochs; bytes are the head, two checkpoints and one in the making."""
    train, draft, resources = settings.train, settings.draft, settings.resources.train
    target = target_facts(settings, known)
    if "features" in known:
        tokens = known["features"].facts["supervised_tokens"] * train.epochs
    else:
        tokens = (expected["responses"].tokens or 0) * train.epochs if "responses" in expected else 0
    num_aux_layers = len(choose_aux_layers(draft.aux_layers, target["num_layers"]))
    trained = head_parameters(target, draft.num_layers, draft.vocab_size, num_aux_layers)
    embeddings = target["vocab_size"] * target["hidden_size"]
    rows_per_token = sum(max(train.chain_rate**depth, train.chain_floor) for depth in range(train.num_depths))
    return Forecast(
        tokens=tokens,
        bytes=2 * (trained + embeddings) + NUM_CHECKPOINTS * (12 * trained + 4 * embeddings),
        operations=6.0 * trained * rows_per_token * tokens,
        share=TRAINING_SHARE,
        num_gpus=resources.num_gpus * resources.replicas,
        start_s=START_S,
    )


def _plan_stream(settings: Settings, facts: Mapping[str, Any] | None) -> str:
    """What capture beside training takes: memory for documents in flight, and the target's passes in later epochs."""
    stream, resources = settings.data.stream, settings.resources
    in_flight = stream.documents_in_flight * resources.train.replicas
    line = f"{resources.features.replicas} capture workers beside training, {in_flight} documents in flight"
    cache_bytes = stream.cache_gb * 1e9 * resources.features.replicas
    if facts is None:
        kept = f"all but {cache_bytes / 1e9:g} GB" if cache_bytes else "all"
        return f"{line}, every further epoch captures {kept} again"
    tokens, token_bytes = facts["streamed_tokens"], facts["bytes_per_token"]
    again = max(0, tokens - int(cache_bytes / token_bytes))
    flight_gb = in_flight * settings.target.max_model_len * token_bytes / 1e9
    return f"{line} (at most {flight_gb:.2f} GB), {tokens:,} tokens captured, {again:,} again in every further epoch"
