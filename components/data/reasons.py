"""Why a row of prompts cannot be used, or was used in part only: the names that manifests and logs count by."""

from enum import StrEnum


class Reason(StrEnum):
    """A name for each thing that can be wrong with a row."""

    NOT_UTF8 = "not_utf8"
    """Bytes that are no UTF-8; they are never replaced."""
    TRUNCATED_LINE = "truncated_line"
    """The last line of the file was cut off."""
    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"
    """The row is JSON, but no object."""
    UNKNOWN_SHAPE = "unknown_shape"
    """None of the known keys holds the prompt."""
    BAD_MESSAGE = "bad_message"
    """A message is no object, or lacks its role or its content."""
    UNKNOWN_ROLE = "unknown_role"
    CONTENT_NOT_TEXT = "content_not_text"
    """Content that is neither text nor a list of text parts."""
    LONE_SURROGATE = "lone_surrogate"
    """Half a surrogate pair, which no tokenizer takes."""
    EMPTY_CONTENT = "empty_content"
    """A blank question, or a question whose recorded answer is blank."""
    STARTS_WITH_ASSISTANT = "starts_with_assistant"
    NO_USER_TURN = "no_user_turn"
    SYSTEM_WITHOUT_QUESTION = "system_without_question"
    """A system turn after the last question (the rest of the row is used), or between a question and its answer."""
    TOOL_WITHOUT_CALL = "tool_without_call"
    """A tool result that follows no call, or answers another one."""
    BAD_TOOL_CALL = "bad_tool_call"
    BAD_TOOLS = "bad_tools"
    TEMPLATE_REJECTS = "template_rejects"
    """The target's chat template raises an error on the conversation."""
    TEMPLATE_HIDES_TOOLS = "template_hides_tools"
    """The chat template leaves out tools, tool calls or tool results."""
    TEMPLATE_HIDES_TEXT = "template_hides_text"
    """The chat template leaves out a system or user turn."""
    TEMPLATE_HIDES_REASONING = "template_hides_reasoning"
    """The chat template leaves out what stood before a tool call; the rest of the row is used."""
    BAD_IDS = "bad_ids"
    """Token ids that are no list of integers, or a mask that does not fit them."""
    IDS_OUT_OF_VOCABULARY = "ids_out_of_vocabulary"
    LATER_TURNS = "later_turns"
    """Recorded ids go on after the first answer; only what precedes it is asked."""
    DUPLICATE = "duplicate"
    """Equal to a row that is used."""
    NEAR_DUPLICATE = "near_duplicate"
    """Almost equal to a row that is used."""
    CONTAMINATED = "contaminated"
    """Repeats a held-out or a benchmark prompt."""
    OVER_CAP = "over_cap"
    """Not drawn: `max_prompts` of the settings or of the source is reached."""


CHOSEN = frozenset({Reason.DUPLICATE, Reason.NEAR_DUPLICATE, Reason.CONTAMINATED, Reason.OVER_CAP})
"""Reasons of rows that nothing is wrong with: the settings leave them out."""


class RowError(Exception):
    """A row that cannot be used."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail
