"""Does vLLM draft with this head what we draft with it? Token ids against token ids, on the same text, before anything is measured.

vLLM answers a few prompts with the head and every proposal is recorded. The target's features of the very same texts are then captured
and drafted from with our own code. A head whose server reads another layer, norm, position or vocabulary map trains well and accepts
nothing; here it is stopped with the place and the likely cause.

Legend: A anchors, K drafts a round, U draft vocabulary, n tokens of a text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from components.draft.batch import Document, PackedBatch
from components.draft.chains import ChainRows, Chains
from components.draft.drafting import greedy_drafts
from components.draft.head import DraftHead
from components.draft.passes import chain_pass, prefix_pass
from components.evaluation.arm_engine import start_engine
from components.evaluation.arms import Arm
from components.evaluation.measure import generate, sampling
from components.evaluation.prompts import EvaluationPrompt
from components.evaluation.recorder import RecordedDraft
from components.target.layers import capture

RECORDER = "components.evaluation.recorder.DraftRecorder"
CONCURRENCY = 3
"""A batch of more than one: a server that mixes up requests must be seen."""

NEAR_TIES = {"bfloat16": 0.5, "float16": 0.0625, "float32": 1e-3}
"""Logit gap of ours below which another token of vLLM's is rounding, by dtype.

Features of two implementations differ by 0.4 to 0.8% in bfloat16 and pass through a whole head: a few steps of the logits' grid.
"""
MAX_MISMATCH_SHARE = 0.02
"""Largest share of drafted tokens that may differ by more than rounding. A wrong layer, position or map changes most of them."""


class PreflightError(Exception):
    """vLLM and our own code draft different tokens from the same head."""


@dataclass(frozen=True)
class RecordedText:
    """A prompt with its answer and what vLLM proposed on the way."""

    key: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    proposals: tuple[RecordedDraft, ...]

    def usable_proposals(self) -> list[RecordedDraft]:
        """Without those past the recorded text (a round that ran over the answer's end)."""
        return [p for p in self.proposals if p.anchor + 1 < len(self.token_ids)]

    def drafter_ids(self) -> list[int]:
        """The text as vLLM's drafter read it.

        Where vLLM reads a prompt in chunks, the drafter does not know the token after a chunk's last one and takes the prompt's last
        token instead (vllm/v1/spec_decode/llm_base_proposer.py, `prepare_next_token_ids_padded`). That row stays in its cache.
        """
        ids = list(self.token_ids)
        for proposal in self.usable_proposals():
            if proposal.anchor + 1 < self.num_prompt_tokens:
                ids[proposal.anchor + 1] = proposal.next_token
        return ids


@dataclass(frozen=True)
class Mismatch:
    key: str
    anchor: int
    depth: int
    """0: the first differing token of the round is its first one."""
    ours: tuple[int, ...]
    vllms: tuple[int, ...]
    gap: float | None
    """How much lower our logit of vLLM's token is; None when the head cannot draft it at all."""


@dataclass(frozen=True)
class PreflightReport:
    """Counts are of drafted tokens: each depth of each round."""

    compared: int
    equal: int
    near_ties: int
    compared_at: tuple[int, ...]
    mismatches_at: tuple[int, ...]
    """Differences beyond rounding, by depth."""
    first_mismatch: Mismatch | None
    cause: str | None
    """The likely one, when there are too many mismatches."""

    @property
    def mismatch_share(self) -> float | None:
        return sum(self.mismatches_at) / self.compared if self.compared else None


def record_texts(
    arm: Arm, prompts: Sequence[EvaluationPrompt], engine_kwargs: Mapping[str, Any], max_new_tokens: int
) -> list[RecordedText]:
    """Answer the prompts greedily in a vLLM engine in this process and keep every proposal of its drafter."""
    engine = start_engine(arm, engine_kwargs, max_num_seqs=CONCURRENCY, worker_extension_cls=RECORDER)
    engine.collective_rpc("record_drafts")
    runs = generate(engine, prompts, sampling(max_new_tokens), CONCURRENCY, "preflight")
    recorded = [RecordedDraft(*row) for row in engine.collective_rpc("take_recorded_drafts")[0]]
    return [
        RecordedText(
            run.prompt.key,
            len(run.prompt.prompt_ids),
            (*run.prompt.prompt_ids, *run.token_ids),
            tuple(draft for draft in recorded if draft.request_id.rpartition("-")[0] == run.prompt.key),
        )
        for run in runs
    ]


def compare_drafts(texts: Sequence[RecordedText], target: PreTrainedModel, head: DraftHead) -> PreflightReport:
    """Draft at vLLM's anchors from captured features and compare, depth by depth.

    Args:
        texts: From `record_texts`.
        target: In the dtype that vLLM served with.
        head: In the same dtype, on the target's device.
    """
    dtype = str(head.fc.weight.dtype).removeprefix("torch.")
    tally = _Tally(NEAR_TIES[dtype])
    for text in texts:
        document = capture_document(target, text.token_ids, head.config.aux_layers)
        document = replace(document, input_ids=document.input_ids.new_tensor(text.drafter_ids()))
        proposals = text.usable_proposals()
        if proposals:
            drafts_NK = greedy_drafts(head, [document], len(proposals[0].drafts), every_row=True)[0]
            _compare_text(text.key, document, proposals, drafts_NK, head, tally)
    return tally.report(head)


def check_report(report: PreflightReport) -> None:
    """Raises PreflightError when nothing was compared or too much differs."""
    if report.mismatch_share is None:
        raise PreflightError("vLLM made no proposal that could be compared: the answers ended at once")
    if report.mismatch_share > MAX_MISMATCH_SHARE:
        raise PreflightError(
            f"vLLM and our own code draft different tokens: {report.mismatch_share:.1%} of {report.compared} "
            f"(at most {MAX_MISMATCH_SHARE:.0%} may). First: {report.first_mismatch}. Likely cause: {report.cause}"
        )


def capture_document(target: PreTrainedModel, token_ids: Sequence[int], aux_layers: Sequence[int]) -> Document:
    """A text with its features; nothing of it is supervised and the last hidden state is left out."""
    input_ids = torch.tensor(token_ids, device=target.device)
    aux_hidden = capture(target, input_ids[None], aux_layers).aux_hidden
    mask = torch.zeros(len(token_ids), dtype=torch.bool, device=target.device)
    return Document(input_ids, mask, aux_hidden, aux_hidden[:, :0])


class _Tally:
    def __init__(self, near_tie: float) -> None:
        self.near_tie = near_tie
        self.equal = self.near_ties = 0
        self.compared_at: list[int] = []
        self.mismatches: list[Mismatch] = []

    def add_round(self, equal: Sequence[bool], gaps: Sequence[float | None], round_: Mismatch) -> None:
        """Count a round; `round_` is the mismatch it would be at depth 0."""
        self.compared_at = self.compared_at or [0] * len(equal)
        for depth, (same, gap) in enumerate(zip(equal, gaps, strict=True)):
            self.compared_at[depth] += 1
            if same:
                self.equal += 1
            elif gap is not None and gap <= self.near_tie:
                self.near_ties += 1
            else:
                self.mismatches.append(Mismatch(round_.key, round_.anchor, depth, round_.ours, round_.vllms, gap))

    def report(self, head: DraftHead) -> PreflightReport:
        wrong_at = tuple(sum(m.depth == depth for m in self.mismatches) for depth in range(len(self.compared_at)))
        return PreflightReport(
            compared=sum(self.compared_at),
            equal=self.equal,
            near_ties=self.near_ties,
            compared_at=tuple(self.compared_at),
            mismatches_at=wrong_at,
            first_mismatch=self.mismatches[0] if self.mismatches else None,
            cause=_likely_cause(self.mismatches, self.compared_at, head) if self.mismatches else None,
        )


def _compare_text(
    key: str,
    document: Document,
    proposals: Sequence[RecordedDraft],
    drafts_NK: Tensor,
    head: DraftHead,
    tally: _Tally,
) -> None:
    anchor_A = torch.tensor([p.anchor for p in proposals], device=drafts_NK.device)
    ours_AK = drafts_NK[anchor_A]
    vllms_AK = torch.tensor([p.drafts for p in proposals], device=drafts_NK.device)
    equal_AK = ours_AK == vllms_AK
    gaps_AK = _gaps(head, document, anchor_A, ours_AK, vllms_AK) if not equal_AK.all() else torch.zeros(ours_AK.shape)
    for anchor, ours, vllms, equal, gaps in zip(
        anchor_A.tolist(), ours_AK.tolist(), vllms_AK.tolist(), equal_AK.tolist(), gaps_AK.tolist(), strict=True
    ):
        finite = [gap if gap != float("inf") else None for gap in gaps]
        tally.add_round(equal, finite, Mismatch(key, anchor, 0, tuple(ours), tuple(vllms), None))


@torch.inference_mode()
def _gaps(head: DraftHead, document: Document, anchor_A: Tensor, ours_AK: Tensor, vllms_AK: Tensor) -> Tensor:
    """[A, K] our logit of our draft less our logit of vLLM's; infinite where the head cannot draft vLLM's."""
    num_drafts = ours_AK.shape[1]
    batch = PackedBatch.pack([document], head.fc.weight.device)
    prefix = prefix_pass(head, batch)
    chains = Chains(anchor_A, torch.full_like(anchor_A, num_drafts - 1))
    chain_RH = chain_pass(head, ChainRows.of(chains, batch).to(batch.device), prefix)
    first_AH = prefix.hidden_NH[anchor_A]
    hidden_AKH = torch.cat([first_AH[:, None], chain_RH.view(len(anchor_A), num_drafts - 1, first_AH.shape[1])], dim=1)
    logits_AKU = head.norm(hidden_AKH).float() @ head.lm_head.weight.float().T
    theirs_AK = head.draft_ids(vllms_AK)
    ours_logit = logits_AKU.gather(2, head.draft_ids(ours_AK)[..., None])[..., 0]
    theirs_logit = logits_AKU.gather(2, theirs_AK.clamp(min=0)[..., None])[..., 0]
    return torch.where(theirs_AK < 0, float("inf"), ours_logit - theirs_logit)


def _likely_cause(mismatches: Sequence[Mismatch], compared_at: Sequence[int], head: DraftHead) -> str:
    """The first of a few known faults that the mismatches look like."""
    ours = torch.tensor([m.ours[m.depth] for m in mismatches], device=head.fc.weight.device)
    vllms = torch.tensor([m.vllms[m.depth] for m in mismatches], device=head.fc.weight.device)
    if (head.draft_ids(ours) == vllms).float().mean() > 0.5:
        return "the draft vocabulary map: vLLM returns draft ids as they are (d2t missing, or of another head)"
    if (head.draft_ids(vllms) < 0).any():
        return "the draft vocabulary map: vLLM drafts tokens that the head cannot draft (d2t of another head)"
    if sum(m.depth == 0 for m in mismatches) <= MAX_MISMATCH_SHARE * compared_at[0]:
        return "the mask token or mask_hidden: only tokens after a round's first one differ"
    return (
        "what already the first token depends on: the aux layers or their order, a norm, positions or rotary settings "
        "(theta, scaling), or weights of another head"
    )
