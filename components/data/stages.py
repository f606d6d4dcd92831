"""The data stages: prompts, the target's answers, their features, and the draft vocabulary.

What only a running stage needs (Ray Data, vLLM, transformers: seconds to import) is imported when it runs.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.config import Settings
from components.data.formats import data_files
from components.data.parts import write_quarantine
from components.data.prompt_list import PROMPTS, write_prompts
from components.data.prompts import BUILTIN, BUILTIN_FOLDER, BadRow, Prompt, read_prompts, split_prompts
from components.data.template import renderable
from components.stage import Artifact, Outcome, Output, RowAccount, Stage, check_rows
from components.target.aux_layers import bytes_per_token, choose_aux_layers
from components.target.stages import target_path

log = logging.getLogger("aerie")


def prompts_stage(settings: Settings) -> Stage:
    """Reads the prompts, drops what the target's chat template cannot show, and deals them to the splits."""
    data = settings.data

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.target.chat import load_tokenizer

        prompts, bad = read_prompts(data.prompts, data.max_prompts, data.seed)
        prompts, unshown = renderable(
            prompts, load_tokenizer(target_path(inputs["target"])), settings.target.chat_template_kwargs
        )
        splits = split_prompts(prompts, data.held_out_families, data.validation_fraction)
        write_prompts(output.join(PROMPTS), prompts, splits)
        write_quarantine(output.location, map(asdict, [*bad, *unshown]))
        rows = _prompt_account(prompts, [*bad, *unshown])
        log.info("prompts: %s", rows.table())
        _report(output, rows)
        check_rows(rows, data.max_dropped_fraction, "prompts")
        return Outcome(_prompt_facts(prompts, splits), rows)

    return Stage(
        name="prompts",
        run=run,
        config={
            "max_prompts": data.max_prompts,
            "held_out_families": sorted(data.held_out_families),
            "validation_fraction": data.validation_fraction,
            "seed": data.seed,
        },
        inputs=("target",),
        extra=lambda: {"files": file_digests(data.prompts)},
        plan=lambda artifacts: f"{len(file_digests(data.prompts))} files of prompts",
    )


def responses_stage(settings: Settings) -> Stage:
    """Lets the target answer every user turn, through vLLM under Ray Data."""
    data = settings.data

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        from components.data.responses import answer_prompts, check_length

        target, prompts = inputs["target"], inputs["prompts"]
        check_length(settings, target.facts["max_position_embeddings"])
        outcome = answer_prompts(
            settings, prompts.location, prompts.facts["turns"], str(target_path(target)), output.location
        )
        _report(output, outcome.rows)
        return outcome

    return Stage(
        name="responses",
        run=run,
        config={
            "max_new_tokens": data.max_new_tokens,
            "truncation": data.truncation,
            "temperature": data.temperature,
            "top_p": data.top_p,
            "seed": data.seed,
            "dtype": settings.target.dtype,
            "max_model_len": settings.target.max_model_len,
        },
        inputs=("target", "prompts"),
        plan=lambda artifacts: _plan_responses(settings, artifacts),
    )


def features_stage(settings: Settings) -> Stage:
    """Records the hidden states of every answer, through transformers under Ray Data."""

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
        )
        _report(output, outcome.rows)
        return outcome

    return Stage(
        name="features",
        run=run,
        config={"extractor": "transformers", "aux_layers": settings.draft.aux_layers, "dtype": settings.target.dtype},
        inputs=("target", "responses"),
        plan=lambda artifacts: _plan_features(settings, artifacts),
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
    )


def file_digests(source: str | list[str]) -> list[list[str]]:
    """[name, sha256] of every file of prompts; a name matters (it can be a family), a folder does not."""
    files: list[Path] = []
    for name in [source] if isinstance(source, str) else source:
        files += data_files(str(BUILTIN_FOLDER) if name == BUILTIN else name)
    return sorted([file.name, _sha256(file)] for file in files)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _prompt_account(prompts: list[Prompt], bad: list[BadRow]) -> RowAccount:
    cut = sum(prompt.cut is not None for prompt in prompts)
    dropped = Counter(row.reason for row in bad)
    return RowAccount(len(prompts) + len(bad), len(prompts) - cut, cut, dict(dropped))


def _prompt_facts(prompts: list[Prompt], splits: Mapping[str, str]) -> dict[str, Any]:
    return {
        "turns": sum(len(prompt.turns()) for prompt in prompts),
        "splits": dict(sorted(Counter(splits.values()).items())),
        "families": dict(sorted(Counter(prompt.family for prompt in prompts).items())),
    }


def _report(output: Output, rows: RowAccount | None) -> None:
    if rows is not None:
        figures = {"rows_in": rows.rows_in, "kept": rows.kept, "truncated": rows.truncated, "lost": rows.lost}
        output.report({f"data/{output.stage}/{name}": float(value) for name, value in figures.items()}, 0)


def _plan_responses(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    replicas = f"{settings.resources.responses.replicas} vLLM engines"
    if "prompts" not in artifacts:
        return f"every user turn, at most {settings.data.max_new_tokens} tokens each, {replicas}"
    turns = artifacts["prompts"].facts["turns"]
    return f"{turns} answers, at most {turns * settings.data.max_new_tokens} tokens, {replicas}"


def _plan_features(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    if "target" not in artifacts:
        return "hidden states of every answer"
    target = artifacts["target"].facts
    token_bytes = bytes_per_token(
        len(choose_aux_layers(settings.draft.aux_layers, target["num_layers"])), target["hidden_size"]
    )
    if "responses" not in artifacts:
        return f"{token_bytes} bytes a token"
    tokens = artifacts["responses"].facts["document_tokens"]
    return f"{tokens} tokens of {token_bytes} bytes, {tokens * token_bytes / 1e6:.1f} MB"
