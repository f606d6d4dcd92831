"""What the data stages are expected to take; every figure that is not known yet is an upper bound or says so in its name."""

from collections.abc import Mapping

from components.config import Settings
from components.data.prompt_list import PROMPTS
from components.data.prompts import Prompt, read_prompts
from components.forecast import Forecast, target_parameters
from components.stage import Artifact
from components.target.aux_layers import ID_AND_MASK_BYTES, bytes_per_token, choose_aux_layers
from components.target.engine import has_gpu
from components.target.stages import target_facts

BYTES_PER_PROMPT_TOKEN = 4  # of a line of prompts.jsonl, whose keys and quotes stand for what the chat template adds
BYTES_PER_LINE = 200  # of it that are not the conversation
BYTES_PER_RESPONSE_TOKEN = 6  # two lists of int32, keys and the footer
PARQUET_OVERHEAD = 1.01
DECODING_SHARE, CAPTURE_SHARE = 0.15, 0.3
CPU_START_S, GPU_START_S = 40.0, 90.0

Known = Mapping[str, Artifact]
Expected = Mapping[str, Forecast]


def forecast_prompts(settings: Settings, known: Known, expected: Expected) -> Forecast:
    """Rows are the turns to answer; reads the sources, and leaves out what is no conversation and what is over the cap of all."""
    prompts, _ = read_prompts(settings.data.prompts)
    share = min(1.0, (settings.data.max_prompts or len(prompts)) / len(prompts))
    turns = sum(len(prompt.turns()) for prompt in prompts)
    num_bytes = round(share * sum(map(_line_bytes, prompts)))
    return Forecast(rows=round(share * turns), tokens=num_bytes // BYTES_PER_PROMPT_TOKEN, bytes=num_bytes)


def forecast_responses(settings: Settings, known: Known, expected: Expected) -> Forecast:
    turns, prompt_tokens = _prompts(known, expected)
    answer_tokens = turns * settings.data.max_new_tokens
    operations = 2 * target_parameters(target_facts(settings, known)) * (answer_tokens + prompt_tokens)
    return Forecast(
        rows=turns,
        tokens=answer_tokens,
        bytes=BYTES_PER_RESPONSE_TOKEN * (answer_tokens + prompt_tokens),
        operations=operations,
        share=DECODING_SHARE,
        **_where(settings, "responses"),
    )


def forecast_features(settings: Settings, known: Known, expected: Expected) -> Forecast:
    """Exact in tokens and bytes once the responses are there; before that, answers of full length are assumed."""
    target = target_facts(settings, known)
    if "responses" in known:
        account = known["responses"].manifest["rows"]
        rows, tokens = account["kept"] + account["truncated"], known["responses"].facts["document_tokens"]
    else:
        rows, prompt_tokens = _prompts(known, expected)
        tokens = rows * settings.data.max_new_tokens + prompt_tokens
    aux_layers = choose_aux_layers(settings.draft.aux_layers, target["num_layers"])
    token_bytes, kept = bytes_per_token(len(aux_layers), target["hidden_size"]), _kept_share(settings, known)
    return Forecast(
        rows=rows,
        tokens=tokens,
        bytes=int(tokens * (kept * token_bytes + (1 - kept) * ID_AND_MASK_BYTES) * PARQUET_OVERHEAD),
        operations=2 * target_parameters(target) * tokens * kept,
        share=CAPTURE_SHARE,
        **_where(settings, "features"),
    )


def forecast_vocabulary(settings: Settings, known: Known, expected: Expected) -> Forecast:
    return Forecast(bytes=8 * settings.draft.vocab_size)


def _line_bytes(prompt: Prompt) -> int:
    conversation = len(str(prompt.messages)) + len(str(prompt.tools or ""))
    return BYTES_PER_LINE + conversation + BYTES_PER_PROMPT_TOKEN * len(prompt.ids or ())


def _prompts(known: Known, expected: Expected) -> tuple[int, int]:
    """(turns, tokens of prompts), from the list of prompts or from what it is expected to be."""
    if "prompts" in known:
        size_bytes = known["prompts"].manifest["files"][PROMPTS]["bytes"]
        return known["prompts"].facts["turns"], size_bytes // BYTES_PER_PROMPT_TOKEN
    return expected["prompts"].rows or 0, expected["prompts"].tokens or 0


def _kept_share(settings: Settings, known: Known) -> float:
    """Share of the tokens whose states are written."""
    if settings.data.mode == "store":
        return 1.0
    if "prompts" not in known:  # held-out families come on top; the stage looks again, at the answers, before it writes
        return settings.data.validation_fraction
    splits = known["prompts"].facts["splits"]
    return 1 - splits.get("train", 0) / max(1, sum(splits.values()))


def _where(settings: Settings, stage: str) -> dict[str, float]:
    resources = getattr(settings.resources, stage)
    return {
        "num_gpus": resources.num_gpus * resources.replicas,
        "start_s": GPU_START_S if has_gpu(resources) else CPU_START_S,
    }
