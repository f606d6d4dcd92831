"""What the data stages are expected to take; every figure that is not known yet is an upper bound or says so in its name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from components.config import Settings
from components.data.asked import Asked
from components.data.prompts import Prompt, scan_prompts
from components.forecast import Forecast, target_parameters
from components.stage import Artifact
from components.target.aux_layers import ID_AND_MASK_BYTES, bytes_per_token, choose_aux_layers
from components.target.engine import has_gpu, target_threads
from components.target.stages import target_facts

BYTES_PER_LINE = 200  # of it that are not the conversation
BYTES_PER_RESPONSE_TOKEN = 6  # two lists of int32, keys and the footer
PARQUET_OVERHEAD = 1.01
DECODING_SHARE, CAPTURE_SHARE = 0.15, 0.3
CPU_START_S, GPU_START_S = 40.0, 90.0
TRANSFORMERS_START_S = 15.0  # on CPUs: no engine

Known = Mapping[str, Artifact]
Expected = Mapping[str, Forecast]


@dataclass(frozen=True)
class PromptsForecast(Forecast):
    asked: Asked = field(default_factory=Asked)


def forecast_prompts(settings: Settings, known: Known, expected: Expected) -> Forecast:
    """Rows are the turns to answer; reads the sources row by row, and leaves out what is no conversation and what is over a cap."""
    asked = Asked()
    for source in settings.data.prompts:
        rows = (row for row in scan_prompts([source]) if isinstance(row, Prompt))
        asked += Asked.of(rows).capped(source.max_prompts)
    asked = asked.capped(settings.data.max_prompts)
    num_bytes = asked.text_bytes + asked.prompts * BYTES_PER_LINE
    return PromptsForecast(rows=asked.turns, tokens=asked.tokens, bytes=num_bytes, asked=asked)


def forecast_responses(settings: Settings, known: Known, expected: Expected) -> Forecast:
    """Every turn is asked with the turns before it, and with their answers."""
    asked, longest = _asked(known, expected), settings.data.max_new_tokens
    answer_tokens, prompt_tokens = asked.turns * longest, asked.repeated_tokens + asked.earlier_answers * longest
    # the cache of an engine spares most of what is asked again: it counts on the disk, not in time
    operations = 2 * target_parameters(target_facts(settings, known)) * (answer_tokens + asked.tokens)
    return Forecast(
        rows=asked.turns,
        tokens=answer_tokens,
        bytes=BYTES_PER_RESPONSE_TOKEN * (answer_tokens + prompt_tokens),
        operations=operations,
        share=DECODING_SHARE,
        **_where(settings, "responses"),
    )


def forecast_features(settings: Settings, known: Known, expected: Expected) -> Forecast:
    """Exact in tokens and bytes once the responses are there; before that, answers of full length are assumed.

    Where the template strips or rewrites earlier answers, a conversation is recorded once for each of its turns.
    """
    target = target_facts(settings, known)
    if "responses" in known:
        account = known["responses"].manifest["rows"]
        rows, tokens = account["kept"] + account["truncated"], known["responses"].facts["document_tokens"]
    else:
        asked, longest = _asked(known, expected), settings.data.max_new_tokens
        once = asked.tokens + asked.turns * longest
        each = asked.repeated_tokens + (asked.turns + asked.earlier_answers) * longest
        rows, tokens = asked.turns, once if target.get("turns_continue", True) else each
    aux_layers = choose_aux_layers(settings.draft.aux_layers, target["num_layers"])
    token_bytes, kept = bytes_per_token(len(aux_layers), target["hidden_size"]), _kept_share(settings, known)
    return Forecast(
        rows=rows,
        tokens=tokens,
        bytes=int(tokens * (kept * token_bytes + (1 - kept) * ID_AND_MASK_BYTES) * PARQUET_OVERHEAD),
        operations=2 * target_parameters(target) * tokens * kept,
        share=CAPTURE_SHARE,
        **_where(settings, "features") | ({"start_s": TRANSFORMERS_START_S} if _captures_on_cpus(settings) else {}),
    )


def forecast_vocabulary(settings: Settings, known: Known, expected: Expected) -> Forecast:
    return Forecast(bytes=8 * settings.draft.vocab_size)


def _asked(known: Known, expected: Expected) -> Asked:
    """From the list of prompts, or from what it is expected to be."""
    if "prompts" in known:
        return Asked(**known["prompts"].facts["asked"])
    forecast = expected["prompts"]
    assert isinstance(forecast, PromptsForecast)
    return forecast.asked


def _kept_share(settings: Settings, known: Known) -> float:
    """Share of the tokens whose states are written."""
    if settings.data.mode == "store":
        return 1.0
    if "prompts" not in known:  # held-out families come on top; the stage looks again, at the answers, before it writes
        return settings.data.validation_fraction
    splits = known["prompts"].facts["splits"]
    return 1 - splits.get("train", 0) / max(1, sum(splits.values()))


def _captures_on_cpus(settings: Settings) -> bool:
    return settings.data.extractor == "transformers" and not has_gpu(settings.resources.features)


def _where(settings: Settings, stage: str) -> dict[str, Any]:
    resources = getattr(settings.resources, stage)
    return {
        "num_gpus": resources.num_gpus * resources.replicas,
        "target_threads": target_threads(resources),
        "start_s": GPU_START_S if has_gpu(resources) else CPU_START_S,
    }
