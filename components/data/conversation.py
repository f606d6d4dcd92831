"""From a raw row, in whatever shape, to what the target is asked: system, user turns and tool exchanges.

Recorded answers go: the target answers every user turn itself. What stays of an assistant is a tool call with its
results, which the target needs to read. Three rules for what recorded chats contain:

- Consecutive user messages: where the row records answers they got one answer together, so they are one turn, joined by
  a blank line; in a row without answers each is a turn of its own.
- A blank question or a blank recorded answer ends the conversation before that question.
- System turns before the first question are joined by a blank line; a later one goes with the question after it, and the chat template
  says whether the target can be told so. One that no question follows is left out, a blank one says nothing and is left out too; one
  between a question and its answer refuses the row.
"""

import json
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from components.data.reasons import Reason, RowError
from components.data.shapes import row_messages, row_tools

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """What the target is asked. `cut` names why the recorded conversation was longer, if it was."""

    messages: list[Message]
    tools: list[Message] | None
    cut: Reason | None


def conversation(row: Any) -> Conversation:
    """The conversation in one parsed row.

    Raises:
        RowError: the row cannot be used; the error names the reason.
    """
    if not isinstance(row, dict):
        raise RowError(Reason.NOT_AN_OBJECT, type(row).__name__)
    _check_surrogates(row)
    system, turns = _split_system(row_messages(row))
    _check_tool_results(turns)
    records_answers = any(turn["role"] == "assistant" for turn in turns)
    turns, cut = _from_first_user(turns)
    turns, blank = _until_blank(turns)
    turns, unasked = _until_last_question(turns)
    messages, tools = _joined_systems(system + _questions(turns, records_answers)), row_tools(row)
    # Once more: calls and tools may have stood there as JSON text with escapes of its own.
    _check_surrogates([messages, tools])
    return Conversation(messages, tools, blank or cut or unasked)


def _check_surrogates(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(Reason.LONE_SURROGATE, f"{error.object[error.start]!r} is half a character") from None


def _split_system(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """The system turn in front, and all other turns that say something."""
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    texts = dict.fromkeys(message["content"] for message in leading if message["content"].strip())
    turns = [turn for turn in messages[len(leading) :] if turn["role"] != "system" or turn["content"].strip()]
    if any(one["role"] == "system" and other["role"] == "assistant" for one, other in pairwise(turns)):
        raise RowError(Reason.SYSTEM_WITHOUT_QUESTION, "a system turn stands between a question and its answer")
    return [{"role": "system", "content": "\n\n".join(texts)}] if texts else [], turns


def _check_tool_results(turns: list[Message]) -> None:
    calls: list[Message] = []
    for turn in turns:
        if turn["role"] != "tool":
            calls = turn.get("tool_calls", [])
            continue
        ids = {call["id"] for call in calls if "id" in call}
        answered = turn.get("tool_call_id")
        if not calls or (answered is not None and ids and answered not in ids):
            raise RowError(Reason.TOOL_WITHOUT_CALL, f"id {answered}" if calls else "no call before it")


def _from_first_user(turns: list[Message]) -> tuple[list[Message], Reason | None]:
    start = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
    if start is None:
        raise RowError(
            Reason.NO_USER_TURN,
            f"only turns of {', '.join(sorted({turn['role'] for turn in turns}))}" if turns else "no turn at all",
        )
    while start and turns[start - 1]["role"] == "system":
        start -= 1
    return turns[start:], Reason.STARTS_WITH_ASSISTANT if start else None


def _until_last_question(turns: list[Message]) -> tuple[list[Message], Reason | None]:
    end = len(turns)
    while turns[end - 1]["role"] == "system":
        end -= 1
    return turns[:end], Reason.SYSTEM_WITHOUT_QUESTION if end < len(turns) else None


def _until_blank(turns: list[Message]) -> tuple[list[Message], Reason | None]:
    blank = next((i for i, turn in enumerate(turns) if _is_blank(turn)), None)
    if blank is None:
        return turns, None
    question = blank
    while turns[question]["role"] != "user":
        question -= 1
    while 0 < question < blank and turns[question - 1]["role"] == "user":
        question -= 1
    if not question:
        raise RowError(Reason.EMPTY_CONTENT, f"the first {turns[blank]['role']} turn is blank")
    if all(turn["role"] == "system" for turn in turns[:question]):
        raise RowError(Reason.EMPTY_CONTENT, "the first question is blank")
    return turns[:question], Reason.EMPTY_CONTENT


def _joined_systems(messages: list[Message]) -> list[Message]:
    """System turns that follow one another are one: what stood between them is not asked again."""
    joined: list[Message] = []
    for message in messages:
        if message["role"] == "system" and joined and joined[-1]["role"] == "system":
            joined[-1] = {"role": "system", "content": f"{joined[-1]['content']}\n\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _is_blank(turn: Message) -> bool:
    # A tool may well say nothing, and a call needs no words.
    return turn["role"] != "tool" and not turn.get("tool_calls") and not turn["content"].strip()


def _questions(turns: list[Message], records_answers: bool) -> list[Message]:
    kept: list[Message] = []
    previous = ""
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        if turn["role"] == "user" and previous == "user" and records_answers:
            kept[-1] = {"role": "user", "content": f"{kept[-1]['content']}\n\n{turn['content']}"}
        elif turn["role"] != "assistant" or (following is not None and following["role"] == "tool"):
            kept.append(turn)
        previous = turn["role"]
    return kept
