"""The `head` stage: train, then export in the layout that vLLM serves."""

from collections.abc import Mapping

from components.config import Settings
from components.stage import Artifact, Outcome, Output, Stage

NOT_IDENTITY = {"rows_per_part", "activation_checkpointing", "shard", "checkpoint_every_steps"}
"""Settings of `train` that change how the work is cut, never the head."""


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
        },
        inputs=("target", "features", "vocabulary"),
        plan=lambda artifacts: _plan(settings, artifacts),
    )


def _plan(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    train = settings.train
    shape = f"{settings.draft.num_layers} layers, {train.epochs} epochs, K {train.num_depths}, r {train.chain_rate}"
    if "features" not in artifacts:
        return shape
    tokens = artifacts["features"].facts["supervised_tokens"] * train.epochs
    return f"{shape}, {tokens:,} answer tokens in all"
