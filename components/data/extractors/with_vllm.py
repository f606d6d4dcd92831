"""Features from vLLM: its `extract_hidden_states` method, for targets that need tensor parallelism or run only there."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from components.data.extractors.interface import ExtractorSpec
from components.data.extractors.kv_connector import PATH_PARAM, STATES, PromptStatesConnector
from components.data.extractors.scratch import ScratchFolder
from components.target.layers import Captured

MAX_NUM_SEQS = 64


def start_vllm(spec: ExtractorSpec) -> "VllmExtractor":
    """An extractor with an engine of its own, in this process where the environment says so."""
    folder = ScratchFolder("aerie-states-")
    engine = LLMEngine.from_engine_args(EngineArgs(**extraction_kwargs(spec, folder.path)))
    extractor = VllmExtractor(engine)
    weakref.finalize(extractor, folder.remove)
    return extractor


def extraction_kwargs(spec: ExtractorSpec, folder: Path) -> dict[str, Any]:
    """Engine arguments with which vLLM leaves the states of every prompt in `folder`.

    The states of a prefix that came from the prefix cache would be missing, so that is off whatever the settings say.
    """
    batch_tokens = spec.engine_kwargs.get("max_num_batched_tokens", spec.batch_tokens)
    sizes = {"max_num_batched_tokens": batch_tokens, "max_num_seqs": min(MAX_NUM_SEQS, batch_tokens)}
    layers = [*spec.aux_layers, spec.num_layers]
    forced = {
        # One more than the longest document: vLLM has to generate a token, and skips the states where that does not fit.
        "max_model_len": spec.engine_kwargs["max_model_len"] + 1,
        "enable_prefix_caching": False,
        "async_scheduling": False,  # it would compute a position after the last one
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": PromptStatesConnector.__name__,
            "kv_connector_module_path": PromptStatesConnector.__module__,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    }
    return sizes | dict(spec.engine_kwargs) | forced


class VllmExtractor:
    """A vLLM engine that was started with `extraction_kwargs`."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._numbers = count()
        self._sampling = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )

    def extract(self, documents: Sequence[Sequence[int]]) -> Iterator[Captured]:
        """The states of each document; files are read and removed as their turn comes."""
        requests = [f"document-{next(self._numbers)}" for _ in documents]
        for request, ids in zip(requests, documents, strict=True):
            self._engine.add_request(request, {"prompt_token_ids": list(ids)}, self._sampling)
        finished: dict[str, Mapping[str, Any]] = {}
        for request in requests:
            while request not in finished:
                finished |= {output.request_id: output.kv_transfer_params for output in self._engine.step()}
            yield _take(Path(finished.pop(request)[PATH_PARAM]))


def _take(file: Path) -> Captured:
    states_nLH: Tensor = load_file(file)[STATES]
    file.unlink()
    return Captured(states_nLH[:, :-1].flatten(1), states_nLH[:, -1].contiguous())
