import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from components.section import ConfigError
from components.target.chat import TemplateError, load_tokenizer, render
from tests.chat_templates import FAMILIES, family_tokenizer
from tests.tiny import BOS, make_tokenizer

USER = {"role": "user", "content": "hello"}
ASSISTANT = {"role": "assistant", "content": "good morning"}


def test_one_bos_and_an_open_turn(tiny_target: Path) -> None:
    tokenizer = load_tokenizer(tiny_target)
    ids = render(tokenizer, [USER, ASSISTANT, USER])
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    closed = render(tokenizer, [USER, ASSISTANT, USER], add_generation_prompt=False)
    assert ids[: len(closed)] == closed


def test_no_second_bos_from_a_tokenizer_that_adds_one() -> None:
    tokenizer = make_tokenizer(300)
    tokenizer.backend_tokenizer.post_processor = _bos_first()
    assert tokenizer("hello").input_ids[0] == BOS
    assert render(tokenizer, [USER]).count(BOS) == 1


def test_target_without_bos(bundled_target: Path) -> None:
    tokenizer = load_tokenizer(bundled_target)
    tokenizer.bos_token = None
    text = tokenizer.apply_chat_template([USER], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(render(tokenizer, [USER])) == text


def test_tools_are_rendered(tiny_target: Path) -> None:
    tokenizer = load_tokenizer(tiny_target)
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
    assert "lookup" in tokenizer.decode(render(tokenizer, [USER], tools=[tool]))
    assert "lookup" not in tokenizer.decode(render(tokenizer, [USER]))


@pytest.mark.parametrize(
    "messages",
    [
        [ASSISTANT, USER],
        [{"role": "narrator", "content": "hello"}],
        [{"role": "user", "content": None}],
        [{"role": "user"}],
        [{"content": "hello"}],
    ],
)
def test_rejected_conversations_are_a_typed_error(tiny_target: Path, messages: list[dict]) -> None:
    with pytest.raises(TemplateError, match="rejects the conversation"):
        render(load_tokenizer(tiny_target), messages)


@pytest.mark.parametrize("switches", [{}, {"enable_thinking": True}, {"enable_thinking": False}])
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_vllms_chat_endpoint(tiny_target: Path, family: str, switches: dict) -> None:
    from vllm.config import ModelConfig
    from vllm.renderers.hf import safe_apply_chat_template

    tokenizer = family_tokenizer(family)
    model_config = ModelConfig(str(tiny_target), dtype="float32")
    open_turn = {"add_generation_prompt": True, "continue_final_message": False}
    text = safe_apply_chat_template(
        model_config, tokenizer, [USER, ASSISTANT, USER], tokenize=False, **open_turn, **switches
    )
    ids = tokenizer(text, add_special_tokens=False).input_ids
    known = switches if family == "qwen" else {}
    assert render(tokenizer, [USER, ASSISTANT, USER], template_kwargs=known) == ids


def test_the_thinking_switch_changes_the_prompt_and_nothing_before_it() -> None:
    tokenizer = family_tokenizer("qwen")
    on, off = (render(tokenizer, [USER], template_kwargs={"enable_thinking": value}) for value in (True, False))
    assert on == render(tokenizer, [USER]) == off[: len(on)]
    assert tokenizer.decode(off[len(on) :]) == "<think>\n\n</think>\n\n"


def test_target_without_a_template_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_target, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"^target\.model: .*no chat template"):
        load_tokenizer(tmp_path / "base")


def _bos_first():
    return TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
