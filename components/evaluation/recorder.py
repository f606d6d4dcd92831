"""A vLLM worker extension that records what the engine's drafter proposes, round by round."""

from typing import Any, NamedTuple

import torch


class RecordedDraft(NamedTuple):
    """One proposal: given the text up to token anchor + 1, the tokens that should follow."""

    request_id: str
    """vLLM's own: the given id, a dash and eight random characters."""
    anchor: int
    """Index of the last token that the target has read and kept."""
    next_token: int
    """Token anchor + 1, just sampled. While a prompt is still being read in chunks: whatever vLLM puts in its place."""
    drafts: tuple[int, ...]


class DraftRecorder:
    """Mixed into vLLM's worker (`worker_extension_cls`); `collective_rpc` calls its methods by name."""

    model_runner: Any

    def record_drafts(self) -> None:
        """Record every proposal from now on."""
        drafter = self.model_runner.drafter
        propose = drafter.propose
        self.recorded_drafts: list[RecordedDraft] = []

        def recording(**kwargs: Any) -> torch.Tensor:
            metadata = kwargs["common_attn_metadata"]
            last = metadata.query_start_loc[1:] - 1
            if kwargs.get("num_rejected_tokens_gpu") is not None:
                last = last - kwargs["num_rejected_tokens_gpu"]
            anchors = kwargs["target_positions"][last.long()].tolist()
            next_tokens = kwargs["next_token_ids"].tolist()
            drafts = propose(**kwargs)
            request_ids = self.model_runner.input_batch.req_ids
            for row in zip(request_ids, anchors, next_tokens, map(tuple, drafts.tolist()), strict=False):
                self.recorded_drafts.append(RecordedDraft(*row))
            return drafts

        drafter.propose = recording

    def take_recorded_drafts(self) -> list[RecordedDraft]:
        """What was recorded since the last call."""
        taken, self.recorded_drafts[:] = list(self.recorded_drafts), []
        return taken
