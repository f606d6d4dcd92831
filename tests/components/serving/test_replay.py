"""Sessions of the replayed traffic, and what an HTTP answer becomes."""

import json

import pytest

from components.config import Settings
from components.data.prompt_list import write_prompts
from components.data.prompts import Prompt
from components.evaluation.acceptance import total
from components.serving.replay import (
    Session,
    make_record,
    make_sessions,
    read_body,
    read_stream,
    request_body,
)
from components.serving.stages import read_sessions
from components.stage import Artifact
from components.storage import Location

SPECULATION = {
    "acceptance_histogram": [4, 3, 2, 1],
    "num_spec_steps": 10,
    "num_draft_tokens": 30,
    "num_accepted_draft_tokens": 10,
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 20, "total_tokens": 27}


def prompt(key, *questions, tools=None):
    return Prompt(key, "family", [{"role": "user", "content": q} for q in questions], tools, "file", 1)


def session(**changes):
    turn = ({"role": "user", "content": "a"},)
    return Session(**{"key": "k", "family": "f", "turns": (turn,), "tools": None, "stream": False} | changes)


def body(**changes):
    choice = {"message": {"content": "hello"}, "finish_reason": "length"}
    return {"choices": [choice], "usage": USAGE, "metrics": {"speculative_decoding": SPECULATION}} | changes


def stream(*events, end="data: [DONE]\n\n"):
    return ("".join(f"data: {json.dumps(event)}\n\n" for event in events) + end).encode()


@pytest.mark.parametrize("num_requests", [1, 4, 5, 13])
def test_sessions_hold_exactly_the_requests_asked_for(num_requests):
    sessions = make_sessions([prompt("a", "1", "2"), prompt("b", "1"), prompt("c", "1")], num_requests)
    assert sum(len(s.turns) for s in sessions) == num_requests
    assert len({s.key for s in sessions}) == len(sessions), "a prompt that comes again is another session"


def test_no_prompts_are_no_traffic():
    with pytest.raises(ValueError, match="no prompts"):
        make_sessions([], 3)


def test_the_request_samples_as_serving_does_and_streams_tell_their_usage():
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    settings = Settings.model_validate({"data": sampling, "ab": {"max_new_tokens": 9}})
    request = request_body(session(stream=True, tools=[{"type": "function"}]), [], settings)
    assert {name: request[name] for name in sampling} == sampling
    assert request["max_tokens"] == 9
    assert request["stream_options"] == {"include_usage": True}
    assert request["tool_choice"] == "none"


def test_a_body_becomes_a_record_whose_sums_are_vllms():
    record = make_record(session(), read_body("x", 200, json.dumps(body()).encode()), 1.5)
    assert record.accepted_at == (6, 3, 1)
    acceptance = total([record])
    assert (acceptance.rounds, acceptance.drafted, acceptance.accepted) == (10, 30, 10)
    assert acceptance.acceptance_length == 2.0
    assert sum(record.accepted_at) == record.accepted
    assert (record.arm, record.output_tokens, record.error) == ("x", 20, None)


def test_a_stream_becomes_the_same_record_as_a_body():
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "hel"}}]},
        {"choices": [{"delta": {"content": "lo"}, "finish_reason": "length"}]},
        {"choices": [], "usage": USAGE, "metrics": {"speculative_decoding": SPECULATION}},
    ]
    assert read_stream("x", stream(*events)) == read_body("x", 200, json.dumps(body()).encode())


def test_a_stream_may_hold_letters_that_end_a_line_elsewhere():
    text = "a\u2028b\u0085c"
    event = {"choices": [{"delta": {"content": text}, "finish_reason": "length"}], "usage": USAGE}
    raw = f"data: {json.dumps(event, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()
    assert read_stream("x", raw).text == text


@pytest.mark.parametrize(
    ("status", "raw", "error"),
    [
        (502, b'{"error": {"code": "arm_failed"}}', "502 arm_failed"),
        (200, b"", "200 without JSON"),
        (200, b'{"choices": []}', "empty answer"),
        (200, json.dumps(body(usage=USAGE | {"completion_tokens": 0})).encode(), "empty answer"),
    ],
)
def test_an_answer_without_an_answer_is_an_error(status, raw, error):
    reply = read_body("x", status, raw)
    assert reply.error == error
    assert total([make_record(session(), reply, 1.0)]).rounds == 0


def test_an_answer_of_its_end_token_only_is_empty():
    choice = {"message": {"content": ""}, "finish_reason": "stop"}
    raw = json.dumps(body(choices=[choice], usage=USAGE | {"completion_tokens": 1})).encode()
    assert read_body("x", 200, raw).error == "empty answer"


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (stream({"choices": [{"delta": {"content": "hel"}}]}, end=""), "broken stream"),
        (stream({"choices": []}, {"error": {"code": 500}}), "200 500"),
        (b"", "broken stream"),
        (stream(), "empty answer"),
    ],
)
def test_a_stream_that_breaks_is_an_error(raw, error):
    assert read_stream("x", raw).error == error


def test_prompts_given_as_ids_are_no_traffic(tmp_path):
    asked = [prompt("a", "Hello?"), Prompt("b", "family", [], None, "file", 2, ids=[5, 6])]
    folder = Location(str(tmp_path))
    write_prompts(folder, asked, {"a": "held_out", "b": "held_out"})
    sessions = read_sessions(Artifact("prompts", folder, "f", {}), Settings())
    assert {turn[0]["content"] for session in sessions for turn in session.turns} == {"Hello?"}
