"""The data stages: prompts, the target's answers, their features, and the draft vocabulary.

What only a running stage needs (Ray Data, vLLM, transformers: seconds to import) is imported when it runs.
"""

import json
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from components.config import PromptSource, Settings
from components.data import forecasts
from components.data.parts import QUARANTINE
from components.data.preparation import measured_with, write_prepared
from components.data.prompt_list import PLACES
from components.data.sources import blamed_on, source_identity
from components.engine_arguments import matters
from components.rows import RowAccount
from components.stage import Artifact, Outcome, Output, Stage
from components.target.aux_layers import bytes_per_token, choose_aux_layers
from components.target.engine import engine_identity
from components.target.stages import target_facts, target_path

log = logging.getLogger("aerie")


def prompts_stage(settings: Settings) -> Stage:
    """Reads the prompts, chooses those to use, drops what the target's chat template cannot show."""
    data = settings.data

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.beside import run_beside_driver

        target = inputs["target"]
        vocab_size = target.facts["vocab_size"]
        rows, facts = run_beside_driver(write_prepared, settings, str(target_path(target)), vocab_size, output.location)
        log.info("prompts: %s", rows.table())
        if facts["cut"]:
            cut = ", ".join(f"{reason} {count}" for reason, count in facts["cut"].items())
            log.info("prompts: rows used in part: %s; %s names them", cut, output.join(PLACES).uri)
        if rows.lost:
            log.info("prompts: %s names the rows that are not used", output.join(QUARANTINE).uri)
        _report(output, rows)
        return Outcome(facts, rows)

    return Stage(
        name="prompts",
        run=run,
        config={
            "max_prompts": data.max_prompts,
            "deduplicate": data.deduplicate,
            "contamination": data.contamination,
            "near_similarity": data.near_similarity,
            "held_out_families": sorted(data.held_out_families),
            "validation_fraction": data.validation_fraction,
            "seed": data.seed,
        },
        inputs=("target",),
        version=4,
        extra=lambda: {
            "sources": _identities(data.prompts, "data.prompts"),
            "benchmarks": [
                identity
                for setting, sources in measured_with(settings).items()
                for identity in _identities(sources, setting)
            ],
        },
        plan=lambda artifacts: f"prompts of {len(data.prompts)} sources",
        forecast=partial(forecasts.forecast_prompts, settings),
    )


def responses_stage(settings: Settings) -> Stage:
    """Lets the target answer every user turn, through vLLM under Ray Data."""
    data = settings.data

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.data.responses import answer_prompts, check_length

        target, prompts = inputs["target"], inputs["prompts"]
        check_length(settings, target.facts["max_position_embeddings"])
        outcome = answer_prompts(
            settings, prompts.location, prompts.facts["asked"]["turns"], str(target_path(target)), output.location
        )
        _report(output, outcome.rows)
        return outcome

    return Stage(
        name="responses",
        run=run,
        config={
            "max_new_tokens": data.max_new_tokens,
            "truncation": data.truncation,
            **data.sampling,
            "seed": data.seed,
            **engine_identity(settings, settings.resources.responses),
        },
        inputs=("target", "prompts"),
        version=2,
        plan=lambda artifacts: _plan_responses(settings, artifacts),
        forecast=partial(forecasts.forecast_responses, settings),
        tokens_done=lambda manifest: manifest["facts"]["output_tokens"],
    )


def features_stage(settings: Settings) -> Stage:
    """Records the hidden states of every answer, through transformers or vLLM under Ray Data."""

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.data.features import record_features

        target, responses = inputs["target"], inputs["responses"]
        outcome = record_features(
            settings,
            responses.location,
            responses.facts["document_tokens"],
            target.facts,
            str(target_path(target)),
            output.location,
            prompts=inputs["prompts"].location,
        )
        _report(output, outcome.rows)
        return outcome

    return Stage(
        name="features",
        run=run,
        config={
            "extractor": settings.data.extractor,
            "mode": settings.data.mode,
            "aux_layers": settings.draft.aux_layers,
            "dtype": settings.target.dtype,
            **extractor_engine(settings),
        },
        inputs=("target", "prompts", "responses"),
        version=2,
        plan=lambda artifacts: _plan_features(settings, artifacts),
        forecast=partial(forecasts.forecast_features, settings),
        tokens_done=lambda manifest: manifest["facts"]["tokens"],
    )


def vocabulary_stage(settings: Settings) -> Stage:
    """Chooses the tokens that the head may draft."""

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.data.vocabulary import build_vocabulary

        target = inputs["target"].facts
        return build_vocabulary(
            inputs["responses"].location,
            settings.draft.vocab_size,
            target["vocab_size"],
            target["eos_token_ids"],
            output.location,
        )

    return Stage(
        name="vocabulary",
        run=run,
        config={"vocab_size": settings.draft.vocab_size},
        version=2,
        inputs=("target", "responses"),
        plan=lambda artifacts: f"{settings.draft.vocab_size} ids, a few seconds",
        forecast=partial(forecasts.forecast_vocabulary, settings),
    )


def _identities(sources: list[PromptSource], setting: str) -> list[dict[str, Any]]:
    with blamed_on(setting):
        return sorted(map(source_identity, sources), key=lambda identity: json.dumps(identity, sort_keys=True))


def _report(output: Output, rows: RowAccount | None) -> None:
    if rows is not None:
        figures = {"rows_in": rows.rows_in, "kept": rows.kept, "truncated": rows.truncated, "lost": rows.lost}
        output.report({f"data/{output.stage}/{name}": float(value) for name, value in figures.items()}, 0)


def _plan_responses(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    resources = settings.resources.responses
    return f"{resources.replicas} vLLM engines, answers of at most {settings.data.max_new_tokens} tokens"


def extractor_engine(settings: Settings) -> dict[str, Any]:
    """Only where an engine records the states, and is told something that they depend on."""
    added = matters(settings.resources.features.engine) if settings.data.extractor == "vllm" else {}
    return {"engine": added} if added else {}


def _plan_features(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    target = target_facts(settings, artifacts)
    aux_layers = choose_aux_layers(settings.draft.aux_layers, target["num_layers"])
    token_bytes = bytes_per_token(len(aux_layers), target["hidden_size"])
    line = f"layers {aux_layers} and the last one, {token_bytes} bytes a token"
    return line if settings.data.mode == "store" else f"{line} that is not trained on; training captures the others"
