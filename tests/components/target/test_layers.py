from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.section import ConfigError
from components.target.aux_layers import default_aux_layers, validate_aux_layers
from components.target.layers import capture, load_target, teacher_weights
from tests.tiny import FIRST_ORDINARY_ID, make_tiny_llama

VOCAB = 512
# the same float32 sums in another order (a masked and an unmasked attention kernel)
TOLERANCE = 2e-5


def random_ids(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ORDINARY_ID, VOCAB, (1, length), generator=generator)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (32, [2, 16, 29]),
        (30, [2, 15, 27]),
        (7, [2, 3, 4]),
        (6, [2, 3, 5]),
        (4, [1, 2, 3]),
        (3, [0, 1, 2]),
        (2, [0, 1]),
        (1, [0]),
    ],
)
def test_default_aux_layers(num_layers: int, expected: list[int]) -> None:
    assert default_aux_layers(num_layers) == expected


@pytest.mark.parametrize("num_layers", range(1, 50))
def test_default_aux_layers_are_valid(num_layers: int) -> None:
    layers = default_aux_layers(num_layers)
    assert validate_aux_layers(layers, num_layers) == layers
    assert len(layers) == min(3, num_layers)


@pytest.mark.parametrize("layers", [[], [6], [-1, 2], [2, 2], [3, 2]])
def test_bad_aux_layers_name_the_setting(layers: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"^draft\.aux_layers: .*\[2, 3, 5\]"):
        validate_aux_layers(layers, 6)


@pytest.mark.parametrize("aux_layers", [[0], [2, 3, 5], [0, 1, 3, 4]])
def test_features_equal_the_layers_own_outputs(tiny_target: Path, aux_layers: list[int]) -> None:
    model = load_target(tiny_target, torch.float32)
    ids = random_ids(37, seed=1)
    entering = [model.model.embed_tokens(ids)[0]]
    handles = [
        layer.register_forward_hook(lambda module, args, output: entering.append(output[0]))
        for layer in model.model.layers
    ]
    logits = model(ids, use_cache=False).logits[0]
    for handle in handles:
        handle.remove()
    captured = capture(model, ids, aux_layers)
    assert captured.aux_hidden.equal(torch.cat([entering[i] for i in aux_layers], dim=-1))
    assert captured.last_hidden.equal(entering[6])
    assert model.lm_head(model.model.norm(captured.last_hidden)).equal(logits)
    assert not torch.allclose(model.model.norm(captured.last_hidden), captured.last_hidden, atol=0.1)


def test_packed_documents_equal_each_alone(tiny_target: Path) -> None:
    model = load_target(tiny_target, torch.float32)
    lengths = [1, 19, 1, 1, 40, 7]
    documents = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    packed = capture(model, torch.cat(documents, dim=1), [1, 3, 5], lengths)
    alone = [capture(model, document, [1, 3, 5]) for document in documents]
    for name in ("aux_hidden", "last_hidden"):
        expected = torch.cat([getattr(one, name) for one in alone])
        torch.testing.assert_close(getattr(packed, name), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_unmarked_packing_would_differ(tiny_target: Path) -> None:
    model = load_target(tiny_target, torch.float32)
    ids = torch.cat([random_ids(19, 0), random_ids(23, 1)], dim=1)
    marked, unmarked = capture(model, ids, [3], [19, 23]), capture(model, ids, [3])
    assert not torch.allclose(marked.last_hidden[19:], unmarked.last_hidden[19:], atol=0.1)


@pytest.mark.parametrize("lengths", [[], [10], [4, 9], [12, 0], [13, -1]])
def test_lengths_must_fill_the_ids(tiny_target: Path, lengths: list[int]) -> None:
    model = load_target(tiny_target, torch.float32)
    with pytest.raises(ValueError, match="do not fill"):
        capture(model, random_ids(12, 0), [2], lengths)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_teacher_gives_the_targets_logits(tmp_path: Path, tie: bool, shard_size: str) -> None:
    source = make_tiny_llama(tmp_path / "whole", tie=tie)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    model = load_target(tmp_path / "saved", torch.float32)
    ids = random_ids(20, 3)
    teacher = teacher_weights(tmp_path / "saved")
    hidden = capture(model, ids, [2]).last_hidden
    normed = torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], teacher.norm_H, teacher.eps)
    torch.testing.assert_close(normed @ teacher.lm_head_VH.T, model(ids).logits[0], atol=1e-4, rtol=1e-4)
    assert teacher.embed_VH.equal(model.model.embed_tokens.weight)
    assert teacher.lm_head_VH.equal(teacher.embed_VH) == tie


def test_bf16_target_is_captured_in_bf16(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path, dtype=torch.bfloat16)
    captured = capture(load_target(path, torch.bfloat16), random_ids(9, 0), [1, 2])
    assert captured.aux_hidden.dtype == captured.last_hidden.dtype == torch.bfloat16
    assert captured.aux_hidden.shape == (9, 128)
    assert teacher_weights(path).norm_H.dtype == torch.bfloat16
