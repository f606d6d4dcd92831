"""What becomes of a row: every shape, role name and defect, one row at a time."""

import pytest

from components.data.conversation import Conversation, conversation
from components.data.prompts import Prompt
from components.data.reasons import Reason, RowError

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}
CALL = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Faro"}'}}


def said(*turns: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def asked(row: dict) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in conversation(row).messages]


def refused(row: object) -> Reason:
    with pytest.raises(RowError) as error:
        conversation(row)
    return error.value.reason


@pytest.mark.parametrize(
    "row",
    [
        said(("user", "Count the bees.")),
        said(("user", "Count the bees."), ("assistant", "Nine.")),
        {"conversations": [{"from": "human", "value": "Count the bees."}, {"from": "gpt", "value": "Nine."}]},
        {"conversations": [{"role": "user", "content": "Count the bees."}]},
        {"conversation": [{"from": "user", "value": "Count the bees."}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Count "}, {"type": "text", "text": "the bees."}]}
            ]
        },
        {"prompt": "Count the bees.", "completion": "Nine."},
        {"prompt": [{"role": "user", "content": "Count the bees."}]},
        {"instruction": "Count the bees.", "input": "", "output": "Nine."},
        {"turns": ["Count the bees."]},
        {"turns": 1, "messages": [{"role": "user", "content": "Count the bees."}]},
        {
            "messages": [
                {"role": "user", "content": "Count the bees."},
                {"role": "assistant", "content": "Nine.", "tool_calls": None},
            ]
        },
    ],
)
def test_every_shape_asks_the_same(row):
    assert conversation(row) == Conversation([{"role": "user", "content": "Count the bees."}], None, None)


@pytest.mark.parametrize("name", ["human", "User", "PROMPTER", " user "])
def test_names_of_the_user(name):
    assert asked(said((name, "Ahoy"))) == [("user", "Ahoy")]


@pytest.mark.parametrize("name", ["gpt", "ChatGPT", "Assistant", "bot", "MODEL"])
def test_names_of_the_assistant(name):
    assert asked(said(("user", "Ahoy"), (name, "Hello."), ("user", "Bye"))) == [("user", "Ahoy"), ("user", "Bye")]


def test_unknown_role_refuses_the_row():
    assert refused(said(("user", "Ahoy"), ("narrator", "It was night."))) == Reason.UNKNOWN_ROLE


@pytest.mark.parametrize("key", ["input", "context"])
@pytest.mark.parametrize("task", ["instruction", "prompt"])
def test_input_of_an_instruction_is_kept(task, key):
    assert asked({task: "Sort the words.", key: "oak elm ash"}) == [("user", "Sort the words.\n\noak elm ash")]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "Sort.", "input": "oak elm", "context": "Trees."}, "Sort.\n\noak elm\n\nTrees."),
        ({"prompt": "Sort.", "input": " ", "context": "Trees."}, "Sort.\n\nTrees."),
        ({"prompt": "Sort.", "input": None, "context": []}, "Sort."),
        ({"instruction": None, "prompt": "Sort."}, "Sort."),
        ({"instruction": "Sort", "prompt": "Sort oak elm"}, "Sort\n\nSort oak elm"),
        ({"instruction": "Sort.", "input": "oak", "prompt": "# Task\nSort.\n# Words\noak\n# Answer\n"}, "Sort.\n\noak"),
    ],
)
def test_an_instruction_has_all_its_parts(row, text):
    assert asked(row) == [("user", text)]


def test_null_stands_for_a_key_that_the_row_lacks():
    row = {"system": None, "system_prompt": "Be kind.", "messages": None, "tools": None}
    turn = {"role": None, "from": "human", "content": None, "value": "Hi"}
    found = conversation({**row, "functions": [WEATHER], "conversations": [turn]})
    assert [(m["role"], m["content"]) for m in found.messages] == [("system", "Be kind."), ("user", "Hi")]
    assert found.tools == [{"type": "function", "function": WEATHER}]


def test_what_stands_under_two_names_is_all_there():
    assert (
        asked({"system": "Be kind.", "system_prompt": "Use rhymes.", "prompt": "Hi"})[0][1] == "Be kind.\n\nUse rhymes."
    )
    found = conversation({"prompt": "Hi", "tools": [WEATHER], "functions": [WEATHER, {"name": "now"}]}).tools
    assert [tool["function"]["name"] for tool in found] == ["weather", "now"]


def test_turns_are_user_turns_and_keep_the_system_turn_beside_them():
    row = {"turns": ["First?", "Second?"], **said(("system", "Be terse."), ("user", "First?"))}
    assert asked(row) == [("system", "Be terse."), ("user", "First?"), ("user", "Second?")]


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_system_field_comes_first_and_once(key):
    assert asked({key: "Be kind.", "prompt": "Hi"}) == [("system", "Be kind."), ("user", "Hi")]
    assert asked({key: "Be kind.", **said(("system", "Be kind."), ("user", "Hi"))})[0] == ("system", "Be kind.")
    assert asked({key: " ", "prompt": "Hi"}) == [("user", "Hi")]


def test_leading_system_turns_are_joined():
    row = said(("system", "Be kind."), ("developer", "Use rhymes."), ("user", "Hi"))
    assert asked(row) == [("system", "Be kind.\n\nUse rhymes."), ("user", "Hi")]


def test_a_later_system_turn_goes_with_the_question_after_it():
    row = said(("system", "One."), ("user", "Hi"), ("assistant", "Hello."), ("system", "Two."), ("user", "Bye"))
    assert asked(row) == [("system", "One."), ("user", "Hi"), ("system", "Two."), ("user", "Bye")]
    messages = conversation(row).messages
    pieces = Prompt("k", "f", messages, None, "a.jsonl", 1).turns()
    assert [[message["content"] for message in piece] for piece in pieces] == [["One.", "Hi"], ["Two.", "Bye"]]


def test_a_system_turn_after_a_welcome_comes_first():
    row = said(("system", "One."), ("assistant", "Welcome."), ("system", "Two."), ("user", "Hi"))
    found = conversation(row)
    assert [message["content"] for message in found.messages] == ["One.\n\nTwo.", "Hi"]
    assert found.cut == Reason.STARTS_WITH_ASSISTANT


@pytest.mark.parametrize("last", [(), (("user", " "),), (("user", "Bye"), ("assistant", " "))])
def test_a_system_turn_that_no_question_follows_is_left_out_and_said(last):
    found = conversation(said(("user", "Hi"), ("assistant", "Hello."), ("system", "Two."), *last))
    assert found.messages == [{"role": "user", "content": "Hi"}]
    assert found.cut == (Reason.EMPTY_CONTENT if last else Reason.SYSTEM_WITHOUT_QUESTION)


def test_a_system_turn_between_a_question_and_its_answer_refuses_the_row():
    assert refused(said(("user", "Hi"), ("system", "Two."), ("assistant", "Hello."))) == Reason.SYSTEM_WITHOUT_QUESTION


def test_the_history_of_an_instruction_comes_before_it():
    row = {"history": [["Name a river.", "Nile."]], "instruction": "And a lake.", "input": ""}
    assert asked(row) == [("user", "Name a river."), ("user", "And a lake.")]
    assert refused(row | {"history": ["Name a river."]}) == Reason.BAD_MESSAGE


def test_what_cannot_be_told_to_the_target_has_a_reason():
    assert refused({"prompt": "Hi", "system": {"text": "Be kind."}}) == Reason.CONTENT_NOT_TEXT
    tools = [{"type": "function", "function": {"name": "now"}}]
    row = {"messages": [{"role": "system", "content": "x", "tools": tools}, {"role": "user", "content": "Hi"}]}
    assert refused(row) == Reason.BAD_TOOLS


def test_leading_assistant_turn_is_left_out_and_said():
    found = conversation(said(("assistant", "Welcome!"), ("user", "Hi"), ("assistant", "Hello.")))
    assert found == Conversation([{"role": "user", "content": "Hi"}], None, Reason.STARTS_WITH_ASSISTANT)


@pytest.mark.parametrize("row", [said(("assistant", "... the end.")), said(("system", "Be kind.")), {"messages": []}])
def test_no_user_turn(row):
    assert refused(row) == Reason.NO_USER_TURN


@pytest.mark.parametrize(
    "row",
    [
        said(("user", "Write a limerick."), ("assistant", "")),
        said(("user", "Write a limerick."), ("user", "About tin."), ("assistant", "")),
        said(("user", " \n\t"), ("assistant", "What do you need?")),
        {"prompt": ""},
        {"instruction": " ", "input": ""},
        {"messages": [{"role": "user", "content": None}]},
    ],
)
def test_blank_first_question_or_answer_refuses_the_row(row):
    assert refused(row) == Reason.EMPTY_CONTENT


@pytest.mark.parametrize(
    "rest",
    [
        [("user", "Thanks"), ("assistant", "  ")],
        [("user", "Thanks"), ("user", "and bye"), ("assistant", "")],
        [("user", ""), ("assistant", "Anything else?")],
        [("user", "Thanks"), ("assistant", ""), ("user", "Hello?"), ("assistant", "Yes.")],
    ],
)
def test_blank_turn_later_cuts_the_conversation_before_its_question(rest):
    found = conversation(said(("user", "Opposite of up?"), ("assistant", "Down."), *rest))
    assert found == Conversation([{"role": "user", "content": "Opposite of up?"}], None, Reason.EMPTY_CONTENT)


def test_consecutive_user_turns_are_one_where_answers_are_recorded_and_several_where_not():
    pair = [("user", "About bread."), ("user", "How long does it rise?")]
    assert asked(said(*pair, ("assistant", "An hour."))) == [("user", "About bread.\n\nHow long does it rise?")]
    assert asked(said(*pair)) == pair


def test_consecutive_assistant_turns_are_left_out():
    assert asked(said(("user", "Count."), ("assistant", "One,"), ("assistant", "two."))) == [("user", "Count.")]


def tool_row(result: dict, **more: object) -> dict:
    question = {"role": "user", "content": "How warm is it in Faro?"}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return {"messages": [question, call, result, {"role": "assistant", "content": "It is 21."}], **more}


def test_tool_exchange_is_context_and_the_answer_goes():
    found = conversation(tool_row({"role": "tool", "tool_call_id": "a1", "content": "21"}, tools=[WEATHER]))
    call = {"id": "a1", "type": "function", "function": {"name": "weather", "arguments": {"town": "Faro"}}}
    assert found.messages[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "21", "tool_call_id": "a1"},
    ]
    assert found.tools == [{"type": "function", "function": WEATHER}]


def test_sharegpt_call_and_observation():
    turns = [
        ("human", "Height?"),
        ("function_call", '{"name": "look", "arguments": {"q": "height"}}'),
        ("observation", "31 m"),
    ]
    found = conversation({"conversations": [{"from": name, "value": text} for name, text in turns]})
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool"]
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": {"q": "height"}}


def test_call_without_result_is_an_answer_like_any_other():
    row = tool_row({"role": "user", "content": "Never mind."})
    assert asked(row) == [("user", "How warm is it in Faro?"), ("user", "Never mind.")]


@pytest.mark.parametrize("result", [{"role": "tool", "tool_call_id": "b2", "content": "21"}])
def test_result_of_another_call_refuses_the_row(result):
    assert refused(tool_row(result)) == Reason.TOOL_WITHOUT_CALL


def test_tool_result_without_a_call_refuses_the_row():
    assert refused(said(("user", "Hi"), ("assistant", "Hello."), ("tool", "21"))) == Reason.TOOL_WITHOUT_CALL


@pytest.mark.parametrize("arguments", ["{not json", "[1]", 4])
def test_bad_tool_call(arguments):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert refused({"messages": [{"role": "user", "content": "Hi"}, call]}) == Reason.BAD_TOOL_CALL


def test_tools_as_list_object_or_text_are_the_same():
    wrapped = {"type": "function", "function": WEATHER}
    text = '[{"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}]'
    for tools in ([WEATHER], [wrapped], wrapped, text, [text[1:-1]]):
        assert conversation({"prompt": "Hi", "tools": tools}).tools == [wrapped]
    for tools in (None, [], "", "[]"):
        assert conversation({"prompt": "Hi", "tools": tools}).tools is None


@pytest.mark.parametrize("tools", ["[oops", [3], [{"type": "function"}], 7])
def test_bad_tools(tools):
    assert refused({"prompt": "Hi", "tools": tools}) == Reason.BAD_TOOLS


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (["a", "list"], Reason.NOT_AN_OBJECT),
        (None, Reason.NOT_AN_OBJECT),
        ({"question": "Hi"}, Reason.UNKNOWN_SHAPE),
        ({}, Reason.UNKNOWN_SHAPE),
        ({"messages": ["Hi"]}, Reason.BAD_MESSAGE),
        ({"messages": [{"content": "Hi"}]}, Reason.BAD_MESSAGE),
        ({"messages": [{"role": "user"}]}, Reason.BAD_MESSAGE),
        ({"messages": [{"role": "user", "content": 5}]}, Reason.CONTENT_NOT_TEXT),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, Reason.CONTENT_NOT_TEXT),
        ({"prompt": 5}, Reason.CONTENT_NOT_TEXT),
        ({"prompt": "Double it.", "input": 0}, Reason.CONTENT_NOT_TEXT),
        ({"instruction": None, "prompt": None}, Reason.UNKNOWN_SHAPE),
        ({"prompt": "Half a smile \ud83d"}, Reason.LONE_SURROGATE),
        ({"prompt": "Hi", "task": "\udc00"}, Reason.LONE_SURROGATE),
        ({"prompt": "Hi", "tools": '[{"name": "\\ud83d"}]'}, Reason.LONE_SURROGATE),
    ],
)
def test_defects_have_names(row, reason):
    assert refused(row) == reason
