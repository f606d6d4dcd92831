"""Where a row keeps its prompt: messages with known roles and plain text, whichever keys the file uses."""

import json
from collections.abc import Mapping
from typing import Any

from components.data.reasons import Reason, RowError

Message = dict[str, Any]

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response"), "tool"),
}
"""Role names in lower case; a `call` is an assistant turn whose text is the JSON of one tool call."""


MBPP_PROMPT = (
    "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n{tests}"
)
"""Of the paper (Austin et al. 2021, section 3.1)."""

TEXT_KEYS = ("turns", "messages", "conversations", "conversation", "prompt", "instruction")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Where templates and files keep what an assistant thought; here it is the first."""


def has_text_shape(row: dict[str, Any]) -> bool:
    """Whether `row_messages` knows where this row keeps its prompt."""
    return any(row.get(key) for key in TEXT_KEYS)


def published_row(value: Any) -> Any:
    """A row of a benchmark as its authors publish it, with its prompt where `row_messages` looks for it."""
    if not isinstance(value, Mapping) or isinstance(value.get("messages"), list):
        return value
    if value.get("test_list"):
        text = value.get("text") or value.get("prompt")
        return {**value, "prompt": MBPP_PROMPT.format(text=text, tests="\n".join(value["test_list"]))}
    return {**value, "prompt": value["question"]} if "question" in value and not has_text_shape(dict(value)) else value


def row_messages(row: dict[str, Any]) -> list[Message]:
    """The messages of a row as `{"role", "content"}`, roles system, user, assistant or tool, text as it stands.

    An assistant message may hold `tool_calls` (arguments as an object) and then `reasoning_content`, a tool message
    `tool_call_id` and `name`.
    Shapes in the order in which they are looked for: `turns` (user turns; the system turn may stand in `messages`),
    `messages`, `conversations`, `conversation`, `prompt` as a list; then `instruction` and `prompt` as text, joined by
    blank lines with `input` and `context`, after the `history` of pairs (question, answer). A prompt that has the
    instruction on lines of its own was rendered from it, often with the answer, and is left out. `system` and
    `system_prompt` beside any of them come first. A null is a key that the row lacks.

    Raises:
        RowError: no such key, or a message that cannot be used.
    """
    systems = _given(row, "system", "system_prompt")
    for system in systems:
        if not isinstance(system, str):
            raise RowError(Reason.CONTENT_NOT_TEXT, f"the system prompt is a {type(system).__name__}")
    leading = [{"role": "system", "content": system} for system in systems]
    return [_message(raw) for raw in leading + _raw_messages(row)]


def row_tools(row: dict[str, Any]) -> list[Message] | None:
    """The tools and functions of a row, each once, as a list of `{"type": "function", "function": {...}}`, or None.

    They may stand there as a list, as one object or as JSON text, whole or item by item.

    Raises:
        RowError: something else stands there.
    """
    fields = [field for raw in _given(row, "tools", "functions") if (field := _decoded(raw, Reason.BAD_TOOLS))]
    raw_tools = [tool for field in fields for tool in (field if isinstance(field, list) else [field])]
    tools = [_decoded(tool, Reason.BAD_TOOLS) for tool in raw_tools]
    wrapped = [{"type": "function", "function": t} if isinstance(t, dict) and "name" in t else t for t in tools]
    for tool in wrapped:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError(Reason.BAD_TOOLS, "a tool without a function or its name")
    return [tool for i, tool in enumerate(wrapped) if tool not in wrapped[:i]] or None


def _given(row: dict[str, Any], *keys: str) -> list[Any]:
    """What the row holds under these keys. Rows written with one schema have every key that any row has, with null for what they lack."""
    return [row[key] for key in keys if row.get(key) is not None]


def _raw_messages(row: dict[str, Any]) -> list[Any]:
    if isinstance(row.get("turns"), list) and row["turns"]:
        return _from_turns(row)
    for key in ("messages", "conversations", "conversation", "prompt"):
        if isinstance(row.get(key), list) and row[key]:
            return row[key]
    if tasks := [task for task in _given(row, "instruction", "prompt") if not isinstance(task, list)]:
        # an empty list or object of another schema says nothing
        beside = [part for part in _given(row, "input", "context") if part not in ([], {})]
        return _from_history(row) + _from_instruction(tasks, beside)
    if any(row.get(key) == [] for key in ("turns", "messages", "conversations", "conversation", "prompt")):
        raise RowError(Reason.NO_USER_TURN, "no turn at all")
    raise RowError(Reason.UNKNOWN_SHAPE, f"keys: {', '.join(sorted(map(str, row)))[:80]}")


def _from_turns(row: dict[str, Any]) -> list[Any]:
    beside = row["messages"] if isinstance(row.get("messages"), list) else []
    leading = [message for message in beside if isinstance(message, dict) and message.get("role") == "system"]
    return leading + [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in row["turns"]]


def _from_history(row: dict[str, Any]) -> list[Any]:
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RowError(Reason.BAD_MESSAGE, "the history holds something else than pairs of question and answer")
    return [
        {"role": role, "content": text}
        for pair in history
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def _from_instruction(tasks: list[Any], beside: list[Any]) -> list[Any]:
    if not all(isinstance(part, str) for part in tasks + beside):
        raise RowError(Reason.CONTENT_NOT_TEXT, "instruction, prompt, input and context must be text")
    said = [task for task in tasks if task.strip()]
    if len(said) == 2 and f"\n{said[0].strip()}\n" in f"\n{said[1]}\n":
        said = said[:1]
    return [{"role": "user", "content": "\n\n".join([*said, *(part for part in beside if part.strip())])}]


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise RowError(Reason.BAD_MESSAGE, f"a message is a {type(raw).__name__}")
    name = next(iter(_given(raw, "role", "from")), None)
    if not isinstance(name, str):
        raise RowError(Reason.BAD_MESSAGE, f"no role among the keys {', '.join(sorted(map(str, raw)))[:80]}")
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise RowError(Reason.UNKNOWN_ROLE, name[:80])
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": [_tool_call(_content(raw))]}
    if raw.get("tools") or raw.get("functions"):
        raise RowError(Reason.BAD_TOOLS, f"the {role} turn holds tools: they belong beside the messages")
    calls = _tool_calls(raw) if role == "assistant" else []
    message: Message = {"role": role, "content": _content(raw)}
    if calls:
        message["tool_calls"] = calls
        thought = next((raw[key] for key in REASONING_KEYS if _is_said(raw.get(key))), None)
        message |= {REASONING_KEYS[0]: thought} if thought else {}
    if role == "tool":
        message |= {key: raw[key] for key in ("tool_call_id", "name") if isinstance(raw.get(key), str)}
    return message


def _is_said(text: Any) -> bool:
    return isinstance(text, str) and bool(text.strip())


def _content(raw: dict[str, Any]) -> str:
    keys = [key for key in ("content", "value", "text") if key in raw]
    content = next((raw[key] for key in keys if raw[key] is not None), "")
    if not keys and not raw.get("tool_calls") and not raw.get("function_call"):
        raise RowError(Reason.BAD_MESSAGE, "no content")
    if isinstance(content, list):
        return _joined_parts(content)
    if not isinstance(content, str):
        raise RowError(Reason.CONTENT_NOT_TEXT, f"content is a {type(content).__name__}")
    return content


def _joined_parts(parts: list[Any]) -> str:
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RowError(Reason.CONTENT_NOT_TEXT, "a part of the content is no text")
    return "".join(part["text"] for part in parts)


def _tool_calls(raw: dict[str, Any]) -> list[Message]:
    calls = _decoded(raw.get("tool_calls"), Reason.BAD_TOOL_CALL) or []
    if not isinstance(calls, list):
        raise RowError(Reason.BAD_TOOL_CALL, f"tool_calls is a {type(calls).__name__}")
    single = raw.get("function_call")
    return [_tool_call(call) for call in [*calls, *([single] if single else [])]]


def _tool_call(raw: Any) -> Message:
    call = _decoded(raw, Reason.BAD_TOOL_CALL)
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    # Chat templates write the arguments themselves: they want the object, not its JSON text.
    arguments = _decoded(function.get("arguments"), Reason.BAD_TOOL_CALL) or {} if isinstance(function, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise RowError(Reason.BAD_TOOL_CALL, "a call needs a name and an object of arguments")
    ids = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**ids, "type": "function", "function": {"name": name, "arguments": arguments}}


def _decoded(value: Any, reason: Reason) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise RowError(reason, str(error)) from None
