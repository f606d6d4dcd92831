"""A KV connector for vLLM's `extract_hidden_states` that works without CUDA: one safetensors file a request.

vLLM's own example copies through pinned memory and CUDA events; this one writes before it reports a request done, so
a file that exists after `generate` is whole.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    PendingSave,
    extract_from_kv_cache,
)


class SynchronousHiddenStatesConnector(ExampleHiddenStatesConnector):
    """Writes `token_ids` [n] and `hidden_states` [n, layers, H] of every finished request."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ExampleHiddenStatesConnectorMetadata)
        for pending in metadata.pending_saves:
            self._write(pending)
        return {pending.req_id for pending in metadata.pending_saves} or None, None

    def _write(self, pending: PendingSave) -> None:
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(pending.block_ids)[:, None] * self._block_size + offsets).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        path = Path(pending.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids}, path)
