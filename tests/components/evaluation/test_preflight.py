"""Head equals server: vLLM's draft ids are ours, and a head that the server would read otherwise is caught.

One engine records; everything else is compared with that record. float32, logits of order 1, a permuted draft vocabulary smaller than
the target's, two aux layers, three requests at once, prompts read in chunks, and rounds after partly refused ones.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from components.draft.checkpoint import load_head, save_head
from components.draft.head import DraftHead
from components.evaluation.preflight import (
    PreflightError,
    PreflightReport,
    RecordedText,
    check_report,
    compare_drafts,
)
from components.evaluation.stages import preflight_stage
from components.evaluation.tasks import RECORDED, recorded_text
from components.stage import run_stage
from components.storage import Location
from components.target.layers import load_target
from tests.cluster import RayHead
from tests.components.evaluation.artifacts import (
    make_artifact,
    random_prompts,
    target_artifact,
    tiny_settings,
    write_responses,
)
from tests.components.evaluation.heads import continue_greedily, make_head, train_head

K = 4
VOCAB, DRAFT_VOCAB = 512, 300
PROMPT_LENGTHS = (5, 70, 33)
CHUNK_TOKENS = 32  # less what a batch of three keeps free for drafts


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> PreTrainedModel:
    return load_target(tiny_target, torch.float32)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(PROMPT_LENGTHS, VOCAB)


@pytest.fixture(scope="module")
def head_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, target: PreTrainedModel, prompts: list[list[int]]
) -> Path:
    """A head that knows the answers about half: some rounds are accepted wholly, some partly, some not at all."""
    vocabulary = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB]
    head = make_head(tiny_target, vocabulary, aux_layers=(1, 3))
    texts = [(continue_greedily(target, prompt, 32), len(prompt)) for prompt in prompts]
    train_head(head, target, tiny_target, texts, num_depths=K, num_steps=12)
    return save_head(head, tmp_path_factory.mktemp("head") / "head")


@pytest.fixture(scope="module")
def preflight(
    ray_cluster: RayHead,
    tmp_path_factory: pytest.TempPathFactory,
    tiny_target: Path,
    prompts: list[list[int]],
    head_folder: Path,
) -> tuple[PreflightReport, list[RecordedText]]:
    """The stage, run once: its report and what vLLM proposed."""
    folder = tmp_path_factory.mktemp("preflight")
    rows = [
        {"key": f"p-{i}", "family": "f", "split": "held_out", "prompt_ids": prompt, "output_ids": [9]}
        for i, prompt in enumerate(prompts)
    ]
    settings = tiny_settings(
        tiny_target,
        evaluate={"num_speculative_tokens": K},
        resources={"evaluate": {"engine": {"max_num_batched_tokens": CHUNK_TOKENS}}},
    )
    inputs = {
        "target": target_artifact(tiny_target, VOCAB),
        "responses": write_responses(folder / "responses", rows),
        "head": make_artifact("head", head_folder.parent, {}),
    }
    artifact, _ = run_stage(preflight_stage(settings), inputs, Location(str(folder)), lease_ttl_s=60)
    texts = [recorded_text(row) for row in json.loads(artifact.join(RECORDED).read_bytes())]
    return artifact.facts, texts


def test_vllm_drafts_exactly_what_we_draft(preflight: tuple[dict, list[RecordedText]]) -> None:
    facts, _ = preflight

    assert facts["equal"] == facts["compared"] > 100
    assert facts["near_ties"] == 0
    assert facts["first_mismatch"] is None


def test_the_record_holds_what_is_hard(
    preflight: tuple[dict, list[RecordedText]], prompts: list[list[int]], target: PreTrainedModel
) -> None:
    _, texts = preflight
    accepted = [
        later.anchor - earlier.anchor - 1
        for text in texts
        for earlier, later in zip(text.proposals, text.proposals[1:], strict=False)
        if earlier.anchor + 1 >= text.num_prompt_tokens
    ]

    assert 0 in accepted
    assert any(0 < count < K for count in accepted)
    assert any(p.anchor + 1 < text.num_prompt_tokens for text in texts for p in text.proposals), "no chunked prefill"
    for text, prompt in zip(sorted(texts, key=lambda t: t.key), prompts, strict=True):
        assert list(text.token_ids) == continue_greedily(target, prompt, len(text.token_ids) - len(prompt))


def swap_aux_halves(head: DraftHead) -> None:
    """As if the server concatenated the aux layers in another order."""
    first, second = head.fc.weight.detach().chunk(2, dim=1)
    head.fc.weight.data = torch.cat([second, first], dim=1)


def lose_final_norm(head: DraftHead) -> None:
    torch.nn.init.uniform_(head.norm.weight, 0.1, 3.0, generator=torch.Generator().manual_seed(0))


def move_mask_hidden(head: DraftHead) -> None:
    head.mask_hidden.data.mul_(-1)


def use_another_theta(head: DraftHead) -> None:
    head.rotary.inv_freq.mul_(0.6)


def shift_vocabulary(head: DraftHead) -> None:
    assert head.d2t is not None
    head.d2t.copy_((head.target_ids_U + 1) % VOCAB - torch.arange(DRAFT_VOCAB))


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (swap_aux_halves, "aux layers"),
        (lose_final_norm, "a norm"),
        (move_mask_hidden, "mask_hidden"),
        (use_another_theta, "theta"),
        (shift_vocabulary, "vocabulary map"),
    ],
)
def test_a_server_that_reads_the_head_otherwise_is_caught(
    preflight: tuple[dict, list[RecordedText]],
    target: PreTrainedModel,
    head_folder: Path,
    fault: Callable[[DraftHead], None],
    cause: str,
) -> None:
    head = load_head(head_folder)
    fault(head)

    report = compare_drafts(preflight[1], target, head)

    assert report.first_mismatch is not None
    assert report.cause is not None
    assert cause in report.cause
    with pytest.raises(PreflightError, match=f"anchor={report.first_mismatch.anchor}"):
        check_report(report)


def test_a_server_without_the_vocabulary_map_is_caught(
    preflight: tuple[dict, list[RecordedText]], target: PreTrainedModel, head_folder: Path
) -> None:
    head = load_head(head_folder)
    unmapped = [
        replace(
            text,
            proposals=tuple(
                p._replace(drafts=tuple(head.draft_ids(torch.tensor(p.drafts)).tolist())) for p in text.proposals
            ),
        )
        for text in preflight[1]
    ]

    report = compare_drafts(unmapped, target, head)

    assert report.cause is not None
    assert "d2t missing" in report.cause


def test_a_near_tie_is_counted_but_no_mismatch(
    preflight: tuple[dict, list[RecordedText]], target: PreTrainedModel, head_folder: Path
) -> None:
    """Two draft tokens with the same row of the lm_head have the same logit: either may be drafted."""
    head = load_head(head_folder)
    text = preflight[1][0]
    twin = head.draft_ids(torch.tensor(text.usable_proposals()[0].drafts[0])).item()
    other = (twin + 1) % DRAFT_VOCAB
    head.lm_head.weight.data[other] = head.lm_head.weight[twin] * (1 + 1e-6)

    report = compare_drafts([text], target, head)

    assert report.near_ties > 0
    assert report.first_mismatch is None or report.first_mismatch.gap is not None


def test_nothing_to_compare_is_an_error(target: PreTrainedModel, head_folder: Path) -> None:
    report = compare_drafts([RecordedText("p", 1, (8, 9), ())], target, load_head(head_folder))

    with pytest.raises(PreflightError, match="no proposal"):
        check_report(report)
