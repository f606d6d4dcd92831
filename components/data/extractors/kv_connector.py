"""The KV connector that hands out the hidden states which vLLM's `extract_hidden_states` leaves in its cache.

vLLM loads this file by name into its scheduler and its workers. A prompt's states are written to one safetensors file in the
very step that completes its prefill, so the file is whole when the engine reports the request. vLLM's own example writes
after the request has ended, from another thread, through memory that only CUDA can pin.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)
from vllm.platforms import current_platform

STATES = "hidden_states"
PATH_PARAM = "hidden_states_path"


@dataclass
class Prompt:
    """A request on its way through the prefill."""

    path: str
    num_tokens: int
    block_ids: list[int]
    """Of the cache of hidden states, in the order of its tokens."""


@dataclass
class CompletePrompts(KVConnectorMetadata):
    """What the scheduler tells the workers: the prompts whose last token this step computes."""

    prompts: list[Prompt] = field(default_factory=list)


class PromptStatesConnector(ExampleHiddenStatesConnector):
    """Writes `hidden_states` [n, layers, H] of every prompt of n tokens; the request's output names the file."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts: dict[str, Prompt] = {}

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        return None if current_platform.is_cpu() else super().get_required_kvcache_layout(vllm_config)

    def build_connector_meta(self, scheduler_output: Any) -> CompletePrompts:
        """Follow every request's blocks, and pick those whose prefill ends in this step."""
        computed = self._follow(scheduler_output)
        complete = [
            self._prompts[req_id]
            for req_id, num_scheduled in scheduler_output.num_scheduled_tokens.items()
            if computed[req_id] < self._prompts[req_id].num_tokens <= computed[req_id] + num_scheduled
        ]
        return CompletePrompts(complete)

    def _follow(self, scheduler_output: Any) -> dict[str, int]:
        """Tokens that each request had computed before this step."""
        computed: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            path = str(Path(self._storage_path) / f"{new.req_id}.safetensors")
            blocks = list(new.block_ids[self._cache_kv_group_id])
            self._prompts[new.req_id] = Prompt(path, len(new.prompt_token_ids), blocks)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_blocks, before in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if req_id in cached.resumed_req_ids:  # it had been preempted and starts over, in other blocks
                self._prompts[req_id].block_ids.clear()
            if new_blocks is not None:
                self._prompts[req_id].block_ids += new_blocks[self._cache_kv_group_id]
            computed[req_id] = before
        return computed

    def wait_for_save(self) -> None:
        """Write what this step completed; runs after the states of the step are in the cache."""
        if not self._is_tp_rank_zero or not self.has_connector_metadata():
            return
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, CompletePrompts)
        for prompt in metadata.prompts:
            self._write(prompt)

    def _write(self, prompt: Prompt) -> None:
        device = self._kv_cache.device
        offsets = torch.arange(self._block_size, device=device)
        slots = (torch.tensor(prompt.block_ids, device=device)[:, None] * self._block_size + offsets).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, prompt.num_tokens)
        save_file({STATES: states.cpu().contiguous()}, prompt.path)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is left to save, so the blocks are free at once; the path goes out with the request's output."""
        prompt = self._prompts.pop(request.request_id, None)
        return False, {PATH_PARAM: prompt.path} if prompt else None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None
