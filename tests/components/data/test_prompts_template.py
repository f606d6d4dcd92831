"""A chat template that rejects or garbles a row costs that row only, with a reason."""

from dataclasses import replace

import pytest

from components.data.conversation import conversation
from components.data.prompts import Prompt, row_key
from components.data.reasons import Reason
from components.data.template import renderable
from tests.chat_templates import FAMILIES, family_tokenizer
from tests.components.data.prompt_rows import user
from tests.tiny import make_tokenizer

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn, please') }}{% endif %}" + PLAIN
SILENT_ABOUT_SYSTEM = PLAIN.replace("messages %}", "messages if m.role != 'system' %}")
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN.replace(
    "{{ m.content", "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ m.content"
)
QUOTING = PLAIN.replace("{{ m.content | trim }}", "{{ m.content | tojson }}")

CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]}
TALK = [{"role": "user", "content": "Time?"}, CALL, {"role": "tool", "content": "noon"}]


def prompt(messages: list[dict], tools: list | None = None) -> Prompt:
    asked = conversation({"messages": messages, "tools": tools})
    return Prompt(row_key(asked.messages, asked.tools), "f", asked.messages, asked.tools, "a.jsonl", 7)


SYSTEM = prompt([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}])
TWO_TURNS = prompt([{"role": "user", "content": ' One "line"\nand another '}, {"role": "user", "content": "Bye"}])
TOOLS = prompt(TALK, [{"name": "now"}])
CALL_ONLY = prompt(TALK)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(512)


@pytest.mark.parametrize(
    ("template", "rejected", "reason"),
    [
        (NO_SYSTEM, SYSTEM, "template_rejects"),
        (SILENT_ABOUT_SYSTEM, SYSTEM, "template_hides_text"),
        (PLAIN, TOOLS, "template_hides_tools"),
        (PLAIN, CALL_ONLY, "template_hides_tools"),
        ("{{ messages[0].no_such.key }}", SYSTEM, "template_rejects"),
    ],
)
def test_only_the_rejected_row_is_lost(tokenizer, template, rejected, reason):
    tokenizer.chat_template = template
    others = [] if "no_such" in template else [TWO_TURNS]
    good, bad = renderable([rejected, *others], tokenizer)
    assert good == others
    assert [(row.source, row.line, row.reason) for row in bad] == [("a.jsonl", 7, reason)]


@pytest.mark.parametrize("template", [WITH_TOOLS])
def test_template_with_tools_takes_all(tokenizer, template):
    tokenizer.chat_template = template
    prompts = [SYSTEM, TWO_TURNS, TOOLS, CALL_ONLY]
    assert renderable(prompts, tokenizer) == (prompts, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_without_system_turns_loses_rows_that_have_one_and_no_other(family):
    lost = [SYSTEM] if family == "gemma" else []
    good, bad = renderable([SYSTEM, TWO_TURNS], family_tokenizer(family))
    assert good == [row for row in (SYSTEM, TWO_TURNS) if row not in lost]
    assert [(row.reason, row.detail) for row in bad] == [("template_rejects", "there is no system role")] * len(lost)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_says_whether_a_later_system_turn_can_be_told(family):
    later = prompt(
        [*user("Hi"), {"role": "assistant", "content": "Hello."}, {"role": "system", "content": "Rhyme."}, *user("Bye")]
    )
    tokenizer = family_tokenizer(family)
    good, bad = renderable([later], tokenizer)
    assert bool(good) != bool(bad)
    assert not bad or bad[0].reason in ("template_rejects", "template_hides_text")
    if good:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Oh."}, *later.turns()[1]]
        assert "Rhyme." in tokenizer.apply_chat_template(messages, tokenize=False)


def test_later_system_turns_survive_in_some_family_and_not_in_all():
    later = prompt([*user("Hi"), {"role": "system", "content": "Rhyme."}, *user("Bye")])
    kept = [family for family in FAMILIES if renderable([later], family_tokenizer(family))[0]]
    assert "llama" in kept
    assert "gemma" not in kept


def test_the_runs_switches_reach_the_template(tokenizer):
    tokenizer.chat_template = "{% if shy %}{{ raise_exception('too shy') }}{% endif %}" + PLAIN
    assert renderable([SYSTEM], tokenizer) == ([SYSTEM], [])
    good, bad = renderable([SYSTEM], tokenizer, {"shy": True})
    assert (good, [(row.reason, row.detail) for row in bad]) == ([], [("template_rejects", "too shy")])


def test_template_that_quotes_text_still_shows_it(tokenizer):
    tokenizer.chat_template = QUOTING
    assert renderable([SYSTEM, TWO_TURNS], tokenizer) == ([SYSTEM, TWO_TURNS], [])


def test_template_that_takes_turns_strictly_sees_answers_between_them(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('user and assistant must take turns') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    leading = prompt([{"role": "assistant", "content": "Welcome."}, {"role": "user", "content": "Hi"}])
    assert renderable([TWO_TURNS, leading], tokenizer) == ([TWO_TURNS, leading], [])


THINKING = {**CALL, "reasoning": "Better look at the clock."}
REASONED = [TALK[0], THINKING, TALK[2]]
SHOWS_REASONING = WITH_TOOLS.replace("<{{ m.role }}>", "<{{ m.role }}>{{ m.NAME or '' }}")
# as Qwen3's: what was thought before the last question is forgotten
FORGETS_REASONING = (
    "{% set ns = namespace(last=0) %}{% for m in messages if m.role == 'user' %}{% set ns.last = ns.last + 1 %}{% endfor %}"
    + (
        SHOWS_REASONING.replace(
            "{% for m in messages %}",
            "{% set seen = namespace(n=0) %}{% for m in messages %}"
            "{% if m.role == 'user' %}{% set seen.n = seen.n + 1 %}{% endif %}",
        ).replace("m.NAME or ''", "m.NAME if m.NAME and seen.n == ns.last else ''")
    )
)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("template", [SHOWS_REASONING, FORGETS_REASONING])
def test_reasoning_before_a_call_is_kept_under_the_name_that_the_template_reads(tokenizer, template, name):
    tokenizer.chat_template = template.replace("NAME", name)
    asked = prompt([*REASONED, {"role": "assistant", "content": "Noon."}, {"role": "user", "content": "Thanks"}])
    ((shown,), bad) = renderable([asked], tokenizer)
    assert bad == []
    assert shown.cut is None
    assert {
        key: shown.messages[1][key] for key in shown.messages[1] if key not in ("role", "content", "tool_calls")
    } == {name: "Better look at the clock."}


def test_reasoning_that_the_template_cannot_show_is_left_out_and_said(tokenizer):
    tokenizer.chat_template = WITH_TOOLS
    asked = prompt(REASONED)
    assert "reasoning_content" in asked.messages[1]
    ((shown,), bad) = renderable([asked], tokenizer)
    assert bad == []
    assert shown == replace(asked, messages=CALL_ONLY.messages, cut=Reason.TEMPLATE_HIDES_REASONING)


def test_reasoning_of_a_recorded_answer_goes_with_the_answer():
    asked = prompt([TALK[0], {"role": "assistant", "content": "Noon.", "reasoning": "Hm."}])
    assert asked.messages == [TALK[0]]
