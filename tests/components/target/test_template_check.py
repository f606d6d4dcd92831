"""A chat template is used only where probe conversations show that answers can be told from all other tokens."""

from pathlib import Path

import pytest

from components.section import ConfigError
from components.target.chat import load_tokenizer
from components.target.template_check import FAULTS, check_template
from tests.chat_templates import FAMILIES, end_token_ids, family_tokenizer
from tests.tiny import EOS, make_tokenizer

QWEN_OPENING = "<|im_end|>\n<|im_start|>assistant\n"
NO_THINKING = {"enable_thinking": False}
TURNS = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def check(template: str, eos_token_ids: tuple[int, ...] = (EOS,), **template_kwargs):
    tokenizer = make_tokenizer(300)
    tokenizer.chat_template = template
    return check_template(tokenizer, eos_token_ids, template_kwargs)


@pytest.mark.parametrize(
    ("family", "switches", "opening", "end", "turns_continue", "shows_system"),
    [
        ("llama", {}, "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", True, True),
        ("qwen", {}, QWEN_OPENING, "<|im_end|>", True, True),
        ("qwen", {"enable_thinking": True}, QWEN_OPENING, "<|im_end|>", True, True),
        ("qwen", NO_THINKING, f"{QWEN_OPENING}<think>\n\n</think>\n\n", "<|im_end|>", False, True),
        ("gemma", {}, "<end_of_turn>\n<start_of_turn>model\n", "<end_of_turn>", True, False),
        ("mistral", {}, "[/INST]", "</s>", True, True),
        ("reasoner", {}, "<assistant><think>\n", "<end>", False, True),
    ],
)
def test_what_the_probes_show_of_each_family(family, switches, opening, end, turns_continue, shows_system):
    tokenizer = family_tokenizer(family)
    facts = check_template(tokenizer, end_token_ids(family), switches)
    assert (facts.opening, tokenizer.convert_ids_to_tokens(facts.end_token_id)) == (opening, end)
    assert (facts.turns_continue, facts.shows_system) == (turns_continue, shows_system)


def test_the_bundled_target_passes(bundled_target: Path):
    facts = check_template(load_tokenizer(bundled_target), [2])
    assert (facts.opening, facts.end_token_id, facts.turns_continue) == (QWEN_OPENING, 2, True)


@pytest.mark.parametrize("end_tokens", [[EOS], [9, EOS], [EOS, 9, 11]])
def test_an_end_token_may_stand_anywhere_in_a_list(end_tokens: list[int]):
    assert check(TURNS + OPENING, tuple(end_tokens)).end_token_id == EOS


def test_a_date_is_noticed_and_a_switch_can_pin_it():
    tokenizer, end = family_tokenizer("llama"), end_token_ids("llama")
    assert check_template(tokenizer, end).is_dated
    assert not check_template(tokenizer, end, {"date_string": "26 Jul 2024"}).is_dated


REFUSED = {
    "rejects": "{% for m in messages %}",
    "raises": (TURNS + OPENING).replace("{{ m.role }}", "{{ raise_exception('no such luck') }}"),
    "hides_text": TURNS.replace("in messages", "in messages if m.role == 'user'") + OPENING,
    "no_opening": TURNS,
    "other_opening": TURNS + OPENING.replace("<|im_start|>assistant", "<unused_0>"),
    "opening_varies": TURNS + OPENING.replace("\n{% e", "\n{% if '{' in messages[-1].content %}Sure{% endif %}{% e"),
    "no_end": TURNS.replace("<|im_end|>", "") + OPENING,
    "double_bos": "{{ bos_token }}" + TURNS + OPENING,
    "unsteady": TURNS + "{{ range(99999) | random }}-{{ range(99999) | random }}" + OPENING,
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_template_that_cannot_be_masked_is_refused(fault: str):
    with pytest.raises(ConfigError) as refusal:
        check(REFUSED[fault])
    assert refusal.value.path == "target.model"
    assert refusal.value.problem.startswith(f"the chat template {FAULTS[fault.replace('raises', 'rejects')]}")
    assert "\n" not in str(refusal.value)


def test_a_target_without_an_end_token_is_refused():
    with pytest.raises(ConfigError, match=r"^target\.model: .*names a token that ends an answer"):
        check(TURNS + OPENING, ())


def test_every_fault_is_tested():
    assert {*REFUSED, "no_end_tokens"} == {*FAULTS, "raises"}


@pytest.mark.parametrize("text", ["answers that are hidden", "rewritten answers"])
def test_an_answer_must_show_as_it_is(text: str):
    said = "{{ m.content | upper }}" if text.startswith("re") else "{{ m.content if m.role == 'user' }}"
    with pytest.raises(ConfigError, match="leaves out or rewrites"):
        check(TURNS.replace("{{ m.content }}", said) + OPENING)


def test_the_refusal_names_the_end_token_and_those_of_the_target():
    with pytest.raises(
        ConfigError, match=r"'<unused_1>', id 5, follows it; the end tokens are \[2, 7\].*generation_config\.json"
    ):
        check(TURNS.replace("<|im_end|>", "<unused_1>") + OPENING, (EOS, 7))


def test_a_switch_that_the_template_does_not_read_is_refused():
    with pytest.raises(ConfigError, match=r"^target\.chat_template_kwargs: .*enable_thinkin\b.*reads enable_thinking"):
        check_template(family_tokenizer("qwen"), end_token_ids("qwen"), {"enable_thinkin": False})
    with pytest.raises(ConfigError, match="the template has no switches"):
        check(TURNS + OPENING, tools=True)
    with pytest.raises(ConfigError, match="rejects a plain conversation"):
        check("{% for m in messages %}", enable_thinking=True)


def test_a_tokenizer_without_bos_needs_none():
    assert family_tokenizer("qwen").bos_token_id is None
    template = FAMILIES["qwen"].template
    assert "bos" not in template
    assert check(template).end_token_id == EOS
