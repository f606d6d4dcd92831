"""The tiny targets are what they say: the other tests rest on it."""

from pathlib import Path

import pytest
import torch

from components.target.chat import load_tokenizer, render
from components.target.layers import load_target
from tests.tiny import FIRST_ORDINARY_ID, make_tiny_llama


def test_permutation_target_walks_its_cycle_from_any_prompt(permutation_target: tuple[Path, list[int]]) -> None:
    path, cycle = permutation_target
    model = load_target(path, torch.float32)
    prompt = render(load_tokenizer(path), [{"role": "user", "content": "hello"}])
    num_tokens = 2 * len(cycle) + 1
    output = model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)[0, len(prompt) :]
    start = cycle.index(int(output[0]))
    assert output.tolist() == [cycle[(start + step) % len(cycle)] for step in range(num_tokens)]
    assert min(cycle) >= FIRST_ORDINARY_ID
    assert sorted(cycle) != cycle


def test_permutation_targets_margin_is_exact(permutation_target: tuple[Path, list[int]]) -> None:
    path, cycle = permutation_target
    logits = load_target(path, torch.float32)(torch.tensor([cycle])).logits[0]
    top = logits.topk(2, dim=-1)
    assert top.indices[:, 0].tolist() == cycle[1:] + cycle[:1]
    torch.testing.assert_close(top.values[:, 0] - top.values[:, 1], torch.full((len(cycle),), 12.0), atol=1e-2, rtol=0)


def test_random_target_depends_on_every_layer_and_norm(tiny_target: Path) -> None:
    model = load_target(tiny_target, torch.float32)
    ids = torch.arange(20, 60)[None]
    logits = model(ids).logits
    assert 0.5 < logits.std() < 2
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith(("o_proj.weight", "down_proj.weight")):
            kept = parameter.clone()
            parameter.copy_(torch.ones_like(kept) if parameter.dim() == 1 else torch.zeros_like(kept))
            assert (model(ids).logits - logits).abs().max() > 0.05, name
            parameter.copy_(kept)


@pytest.mark.parametrize(("vocab", "unused_rows"), [(264, 0), (320, 20), (512, 0)])
def test_tokenizer_covers_the_vocabulary_but_for_unused_rows(tmp_path: Path, vocab: int, unused_rows: int) -> None:
    tokenizer = load_tokenizer(make_tiny_llama(tmp_path, vocab=vocab, unused_rows=unused_rows))
    assert len(tokenizer) == vocab - unused_rows
    text = "naïve 12 café\n🙂 the lighthouse"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
