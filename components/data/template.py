"""Whether the target's chat template shows a conversation: a row that it rejects or garbles costs that row only."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from components.data.prompts import BadRow, Prompt
from components.data.reasons import Reason, RowError
from components.data.shapes import REASONING_KEYS

Message = dict[str, Any]

STAND_IN_ANSWER = "Fine."
"""Stands for the target's own answers, which do not exist yet."""


def renderable(
    prompts: Iterable[Prompt], tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
) -> tuple[list[Prompt], list[BadRow]]:
    """The prompts whose whole conversation `tokenizer`'s chat template shows, and those that it does not.

    A template may raise an error on a conversation (a system turn, a tool role), or leave a part out without a word: both
    end up here, with a reason each. Reasoning before a tool call is passed on under the name that the template reads;
    where it reads none, the row goes on without it, as one that was cut. Prompts given as ids need no template.

    Args:
        prompts: What the target would be asked.
        tokenizer: The target's.
        template_kwargs: Switches of the template, from `target.chat_template_kwargs`.
    """
    template = _Template(tokenizer, template_kwargs)
    good: list[Prompt] = []
    bad: list[BadRow] = []
    for prompt in prompts:
        try:
            good.append(prompt if prompt.ids is not None else _shown(prompt, template))
        except RowError as error:
            bad.append(BadRow(prompt.source, prompt.line, error.reason.value, error.detail))
    return good, bad


class _Template:
    """The target's chat template with the run's switches; its errors are the row's."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> None:
        self._tokenizer, self._template_kwargs = tokenizer, template_kwargs

    def show(self, messages: list[Message], tools: list[Message] | None) -> str:
        # transformers takes seconds to import, and the driver imports this module in every run
        from components.target.chat import TemplateError, render_text

        try:
            return render_text(self._tokenizer, messages, tools, True, self._template_kwargs)
        except TemplateError as error:
            raise RowError(Reason.TEMPLATE_REJECTS, error.said) from None


def _shown(prompt: Prompt, template: _Template) -> Prompt:
    prompt = _with_reasoning(prompt, template)
    _check(prompt, template)
    return prompt


def _with_reasoning(prompt: Prompt, template: _Template) -> Prompt:
    for i, message in enumerate(prompt.messages):
        if REASONING_KEYS[0] in message:
            prompt = _as_template_reads(prompt, i, template)
    return prompt


def _as_template_reads(prompt: Prompt, i: int, template: _Template) -> Prompt:
    """The prompt with the reasoning of message i under the name that shows it, or without it."""
    message = prompt.messages[i]
    plain = {key: value for key, value in message.items() if key != REASONING_KEYS[0]}
    ways = [{**plain, key: message[REASONING_KEYS[0]]} for key in REASONING_KEYS]
    without = _text_after(prompt, i, plain, template)
    way = next((way for way in ways if _text_after(prompt, i, way, template) != without), None)
    messages = [*prompt.messages[:i], way or plain, *prompt.messages[i + 1 :]]
    return replace(prompt, messages=messages, cut=prompt.cut or (None if way else Reason.TEMPLATE_HIDES_REASONING))


def _text_after(prompt: Prompt, i: int, message: Message, template: _Template) -> str:
    """What the target reads before its next answer, with `message` in place i: later, templates forget reasoning."""
    later = takewhile(lambda other: other["role"] != "user", prompt.messages[i + 1 :])
    upto = replace(prompt, messages=[*prompt.messages[:i], message, *later])
    return template.show(_with_answers(upto), prompt.tools)


def _check(prompt: Prompt, template: _Template) -> None:
    messages = _with_answers(prompt)
    shown = template.show(messages, prompt.tools)
    if prompt.tools and shown == template.show(messages, None):
        raise RowError(Reason.TEMPLATE_HIDES_TOOLS, "the tools do not show")
    for i, message in enumerate(messages):
        if message["content"].strip() in shown and "tool_calls" not in message:
            continue
        if shown == template.show([*messages[:i], _altered(message), *messages[i + 1 :]], prompt.tools):
            has_tool = message["role"] in ("assistant", "tool")
            reason = Reason.TEMPLATE_HIDES_TOOLS if has_tool else Reason.TEMPLATE_HIDES_TEXT
            raise RowError(reason, f"the {message['role']} turn does not show")


def _with_answers(prompt: Prompt) -> list[Message]:
    first, *later = prompt.turns()
    messages = list(first)
    for piece in later:
        messages += [{"role": "assistant", "content": STAND_IN_ANSWER}, *piece]
    return messages


def _altered(message: Message) -> Message:
    if "tool_calls" in message:
        calls = [{**call, "function": {**call["function"], "name": "another"}} for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    return {**message, "content": f"{message['content']} (altered)"}
