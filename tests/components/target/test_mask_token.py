from pathlib import Path

import pytest
from transformers import AutoConfig

from components.section import ConfigError
from components.target.chat import load_tokenizer
from components.target.mask_token import choose_mask_token
from tests.tiny import BOS, EOS, PAD, make_tiny_llama


def load(path: Path):
    return load_tokenizer(path), AutoConfig.from_pretrained(path)


def test_bundled_target_gets_its_last_control_token(bundled_target: Path) -> None:
    tokenizer, config = load(bundled_target)
    assert choose_mask_token(tokenizer, config) == 16
    assert tokenizer.convert_ids_to_tokens(16) == "<empty_output>"


def test_first_unused_row_comes_before_control_tokens(tmp_path: Path) -> None:
    tokenizer, config = load(make_tiny_llama(tmp_path, vocab=384, unused_rows=10))
    assert choose_mask_token(tokenizer, config) == 374
    assert choose_mask_token(tokenizer, config, used_ids={374, 375}) == 376


def test_control_tokens_of_template_and_corpus_are_passed_over(tiny_target: Path) -> None:
    tokenizer, config = load(tiny_target)
    assert choose_mask_token(tokenizer, config) == 7
    assert choose_mask_token(tokenizer, config, used_ids={7, 6}) == 5
    with pytest.raises(ConfigError, match=r"^draft\.mask_token_id: .*neither"):
        choose_mask_token(tokenizer, config, used_ids={4, 5, 6, 7})


@pytest.mark.parametrize("token_id", [PAD, BOS, EOS, -1, 512, 100])
def test_explicit_choice_is_checked(tiny_target: Path, token_id: int) -> None:
    tokenizer, config = load(tiny_target)
    with pytest.raises(ConfigError, match=rf"^draft\.mask_token_id: {token_id} "):
        choose_mask_token(tokenizer, config, used_ids={100, 101}, explicit=token_id)
    assert choose_mask_token(tokenizer, config, used_ids={100, 101}, explicit=200) == 200


def test_every_end_token_of_a_list_is_reserved(tiny_target: Path) -> None:
    tokenizer, config = load(tiny_target)
    config.eos_token_id = [EOS, 7]
    assert choose_mask_token(tokenizer, config) == 6
    assert choose_mask_token(tokenizer, config, end_token_ids=[EOS, 6]) == 5
    with pytest.raises(ConfigError, match=r"^draft\.mask_token_id: 6 is the target's pad, bos, eos"):
        choose_mask_token(tokenizer, config, explicit=6, end_token_ids=[6])
