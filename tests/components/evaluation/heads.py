"""Tiny draft heads: random ones, and ones trained on a text in a few seconds."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from components.draft.batch import PackedBatch
from components.draft.chains import supervised_chains
from components.draft.head import DraftHead, HeadConfig, median_feature_rms
from components.draft.losses import Teacher
from components.draft.schedule import StepOptions, accumulate_gradients
from components.evaluation.preflight import capture_document
from components.target.layers import load_target, teacher_weights

MASK_TOKEN = 4


def make_head(
    target: Path, vocabulary: Tensor, aux_layers: tuple[int, ...], num_layers: int = 2, seed: int = 0
) -> DraftHead:
    """A random float32 head whose logits are of order 1."""
    torch.manual_seed(seed)
    config = HeadConfig.from_target(
        AutoConfig.from_pretrained(target),
        aux_layers=aux_layers,
        num_layers=num_layers,
        draft_vocab_size=len(vocabulary),
        mask_token_id=MASK_TOKEN,
    )
    head = DraftHead(config, vocabulary)
    for parameter in head.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    torch.nn.init.normal_(head.mask_hidden)
    return head


@torch.inference_mode()
def continue_greedily(target: PreTrainedModel, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The prompt and the target's greedy continuation, end tokens ignored."""
    ids = target.generate(
        torch.tensor([list(prompt_ids)]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    )
    return ids[0].tolist()


def train_head(
    head: DraftHead,
    target: PreTrainedModel,
    target_path: Path,
    texts: Sequence[tuple[Sequence[int], int]],
    num_depths: int,
    num_steps: int,
    learning_rate: float = 3e-3,
) -> float:
    """Fit the head to texts (token ids, length of the prompt), all depths of all anchors a step, until it drafts them right.

    Returns:
        The share of right drafts in the last step.
    """
    documents = [
        replace(capture_document(target, ids, head.config.aux_layers), loss_mask=torch.arange(len(ids)) >= start)
        for ids, start in texts
    ]
    batch = PackedBatch.pack(documents)
    weights = teacher_weights(target_path)
    head.init_from_target(
        weights.embed_VH,
        weights.lm_head_VH,
        weights.norm_H,
        median_feature_rms(batch.aux_hidden_TX, len(head.config.aux_layers)),
    )
    teacher = Teacher(weights.norm_H, weights.eps, weights.lm_head_VH[head.target_ids_U])
    chains = supervised_chains(batch, num_depths)
    options = StepOptions(num_depths=num_depths, rows_per_part=4096, loss="cross_entropy")
    optimizer = torch.optim.Adam(head.parameters(), lr=learning_rate)
    for _ in range(num_steps):
        optimizer.zero_grad()
        sums = accumulate_gradients(head, batch, chains, teacher, options)
        share = float(sums.correct_D.sum() / sums.count)
        if share == 1.0:  # it cannot get better
            break
        for parameter in head.parameters():
            if parameter.grad is not None:
                parameter.grad /= sums.count
        optimizer.step()
    return share


def make_permutation_heads(
    path: Path, cycle: Sequence[int], prompts: Sequence[Sequence[int]], num_tokens: int, num_depths: int
) -> tuple[DraftHead, DraftHead]:
    """Two heads of the permutation target: one that drafts every token right after these prompts, and one that never does.

    The second one has the same weights for a vocabulary in which every token of the cycle is the one after it: what a head trained on
    labels shifted by one learns.
    """
    target = load_target(path, torch.float32)
    spare = [i for i in range(8, target.config.vocab_size) if i not in cycle][:20]
    order = torch.randperm(len(cycle) + 20, generator=torch.Generator().manual_seed(0))
    vocabulary = torch.tensor([*cycle, *spare])[order]
    right = make_head(path, vocabulary, aux_layers=(1, 4))
    texts = [(continue_greedily(target, prompt, num_tokens + num_depths), len(prompt)) for prompt in prompts]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so little work more of them only wait for each other
    assert train_head(right, target, path, texts, num_depths=num_depths, num_steps=80) == 1.0
    torch.set_num_threads(num_threads)
    successor = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    wrong = DraftHead(right.config, torch.tensor([successor.get(i, i) for i in vocabulary.tolist()]))
    wrong.load_state_dict({k: v for k, v in right.state_dict().items() if k not in ("d2t", "t2d")}, strict=False)
    return right, wrong
