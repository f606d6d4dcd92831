"""Whether the target's chat template shows a conversation: a row that it rejects or garbles costs that row only."""

from collections.abc import Iterable
from typing import Any

from components.data.prompts import BadRow, Prompt
from components.data.reasons import Reason, RowError

Message = dict[str, Any]

STAND_IN_ANSWER = "Fine."
"""Stands for the target's own answers, which do not exist yet."""


def renderable(prompts: Iterable[Prompt], tokenizer: Any) -> tuple[list[Prompt], list[BadRow]]:
    """The prompts whose whole conversation `tokenizer`'s chat template shows, and those that it does not.

    A template may raise an error on a conversation (a system turn, a tool role), or leave a part out without a word: both
    end up here, with a reason each.
    """
    good: list[Prompt] = []
    bad: list[BadRow] = []
    for prompt in prompts:
        try:
            _check(prompt, tokenizer)
        except RowError as error:
            bad.append(BadRow(prompt.source, prompt.line, error.reason.value, error.detail))
        else:
            good.append(prompt)
    return good, bad


def _check(prompt: Prompt, tokenizer: Any) -> None:
    messages = _with_answers(prompt)
    shown = _render(tokenizer, messages, prompt.tools)
    if prompt.tools and shown == _render(tokenizer, messages, None):
        raise RowError(Reason.TEMPLATE_HIDES_TOOLS, "the tools do not show")
    for i, message in enumerate(messages):
        if message["content"].strip() in shown and "tool_calls" not in message:
            continue
        if shown == _render(tokenizer, [*messages[:i], _altered(message), *messages[i + 1 :]], prompt.tools):
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


def _render(tokenizer: Any, messages: list[Message], tools: list[Message] | None) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # A template is code that came with the model: it may raise anything.
        raise RowError(Reason.TEMPLATE_REJECTS, " ".join(str(error).split())[:200]) from None
