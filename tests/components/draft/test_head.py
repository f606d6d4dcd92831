"""Shape, start and vocabulary of a head."""

import pytest
import torch
from transformers import LlamaConfig

from components.draft.batch import PackedBatch
from components.draft.chains import supervised_chains
from components.draft.head import DraftHead, HeadConfig, median_feature_rms
from components.draft.passes import prefix_pass
from tests.components.draft.dense import tiny_config, tiny_document


def started_head(config: HeadConfig) -> tuple[DraftHead, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    embed, lm_head = (torch.randn(61, 32, generator=generator) for _ in range(2))
    norm = 1 + torch.rand(32, generator=generator)
    head = DraftHead(config, torch.randperm(61, generator=generator)[:43])
    head.init_from_target(embed, lm_head * 3, norm, torch.tensor([1.0, 5.0, 20.0]))
    return head, torch.stack([embed, lm_head * 3])


def test_config_follows_the_target() -> None:
    target = LlamaConfig(
        hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=20, intermediate_size=128,
        vocab_size=500, rms_norm_eps=1e-6, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 123.0},
    )  # fmt: skip
    config = HeadConfig.from_target(target, aux_layers=(1, 2), num_layers=4, draft_vocab_size=50, mask_token_id=7)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (96, 6, 2, 20)
    assert config.rope_parameters["rope_theta"] == 123.0
    assert config.num_aux_layers == 2
    assert DraftHead(config, torch.arange(50)).layers[0].self_attn.q_proj.weight.shape == (120, 192)


def test_start_copies_the_target_rows() -> None:
    head, (embed, lm_head) = started_head(tiny_config())
    assert torch.equal(head.embed_tokens.weight, embed)
    assert torch.equal(head.lm_head.weight, lm_head[head.target_ids_U])


def test_start_is_of_order_one_whatever_the_features_scale() -> None:
    config = tiny_config()
    head, _ = started_head(config)
    document = tiny_document(config, 40, [(5, 40)], seed=1)
    aux = document.aux_hidden.float().unflatten(-1, (3, -1)) * torch.tensor([1.0, 5.0, 20.0])[:, None]
    batch = PackedBatch.pack(
        [type(document)(document.input_ids, document.loss_mask, aux.flatten(1), document.last_hidden)]
    )
    residual = head.layer_inputs(batch.input_ids_T[1:], batch.aux_hidden_TX[1:])[1]
    masked = head.fc(head.mask_hidden.view(-1))
    assert 0.5 < residual.pow(2).mean().sqrt() < 2
    assert 0.5 < masked.pow(2).mean().sqrt() < 2
    rows = supervised_chains(batch, 1).anchor_A
    logits = head.lm_head(head.norm(prefix_pass(head, batch).hidden_NH[rows]))
    assert 0.5 < logits.std() < 2


def test_median_is_not_moved_by_the_first_token() -> None:
    aux = torch.ones(9, 6) * torch.tensor([2.0, 2, 2, 7, 7, 7])
    aux[0] *= 1000
    assert median_feature_rms(aux, 2).tolist() == [2.0, 7.0]


def test_start_is_the_same_on_every_rank() -> None:
    first, second = (started_head(tiny_config())[0].state_dict() for _ in range(2))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("num_heads", {"num_heads": 5}),
        ("draft_vocab_size", {"draft_vocab_size": 62}),
        ("mask_token_id", {"mask_token_id": 61}),
        ("aux_layers", {"aux_layers": ()}),
    ],
)
def test_config_that_cannot_be_is_refused(name: str, changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=name):
        tiny_config(**changes)


@pytest.mark.parametrize("vocabulary", [None, torch.arange(42), torch.zeros(43), torch.arange(43) + 19])
def test_vocabulary_that_does_not_fit_is_refused(vocabulary: torch.Tensor | None) -> None:
    with pytest.raises(ValueError, match="draft_vocab_U"):
        DraftHead(tiny_config(), vocabulary)


def test_head_narrower_than_its_target_cannot_copy_rows() -> None:
    head = DraftHead(tiny_config(target_hidden_size=64), torch.arange(43))
    with pytest.raises(ValueError, match="hidden_size"):
        head.init_from_target(torch.zeros(61, 32), torch.zeros(61, 32), torch.ones(32), torch.ones(3))
