"""`pipelines/data.py --until prompts` over files as people have them: every row is kept, cut or dropped, and whoever must mend one is told where."""

import json
import sys
from pathlib import Path

import pytest

from components.section import ConfigError
from pipelines.cli import guarded
from pipelines.data import app

NOWHERE = "http://127.0.0.1:9"


def chat(*turns: tuple[str, str]) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}).encode() + b"\n"


def shared(*turns: tuple[str, str]) -> bytes:
    return json.dumps({"conversations": [{"from": role, "value": text} for role, text in turns]}).encode() + b"\n"


CALL = {"id": "a", "type": "function", "function": {"name": "tides", "arguments": '{"port": "Brest"}'}}
TOOL_ROW = {
    "messages": [
        {"role": "user", "content": "When is high tide in Brest?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "17:40"},
        {"role": "assistant", "content": "At 17:40."},
    ],
    "tools": [{"type": "function", "function": {"name": "tides", "parameters": {"type": "object"}}}],
}
FILES = {
    "names.jsonl": shared(("Human", "Which bird runs fastest?"), ("ChatGPT", "The ostrich."))
    + chat(("prompter", "Which fish flies?"), ("Assistant", "The flying fish.")),
    "welcome.jsonl": shared(("gpt", "Welcome!"), ("human", "Spell knee."), ("gpt", "K-n-e-e."))
    + shared(("gpt", "... and so it ended.")),
    "blank.jsonl": chat(("user", "Write one line."), ("assistant", ""))
    + chat(("user", "Opposite of up?"), ("assistant", "Down."), ("user", "Fine"), ("assistant", " \n")),
    "together.jsonl": chat(("user", "About tea."), ("user", "How long does it draw?"), ("assistant", "Four minutes."))
    + chat(("user", "One."), ("user", "Two.")),
    "systems.jsonl": chat(("system", "Be brief."), ("system", "Be kind."), ("user", "Who are you?"), ("assistant", "I?"))
    + chat(("user", "Tell me more."), ("system", "Say no."), ("assistant", "No.")),
    "tools.jsonl": json.dumps(TOOL_ROW).encode() + b"\n",
    "bytes.jsonl": chat(("user", "Name a tree.")) + chat(("user", "A cafX?")).replace(b"X", b"\xe9")
    + b'{"prompt": "half \\ud83d"}\n' + b'{"prompt": "cut o',
    "windows.jsonl": b"\xef\xbb\xbf" + '{"prompt": "Two\u2028lines?"}\r\n\r\n{"prompt": "After a blank line?"}\r\n'.encode(),
}  # fmt: skip
ASKED = [
    [["user", "Which bird runs fastest?"]],
    [["user", "Which fish flies?"]],
    [["user", "Spell knee."]],
    [["user", "Opposite of up?"]],
    [["user", "About tea.\n\nHow long does it draw?"]],
    [["user", "One."], ["user", "Two."]],
    [["system", "Be brief.\n\nBe kind."], ["user", "Who are you?"]],
    [["user", "Name a tree."]],
    [["user", "Two\u2028lines?"]],
    [["user", "After a blank line?"]],
]
CUT = {("welcome.jsonl", 1, "starts_with_assistant"), ("blank.jsonl", 2, "empty_content")}
LOST = [
    ("blank.jsonl", 1, "empty_content"),
    ("bytes.jsonl", 2, "not_utf8"),
    ("bytes.jsonl", 3, "lone_surrogate"),
    ("bytes.jsonl", 4, "truncated_line"),
    ("systems.jsonl", 2, "system_without_question"),
    ("tools.jsonl", 1, "template_hides_tools"),
    ("welcome.jsonl", 2, "no_user_turn"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the files; there is no cluster, which reading prompts does not need."""

    def none_is_up() -> None:
        raise ConfigError("ray", "no Ray cluster is up", "start one")

    monkeypatch.setattr("pipelines.cli.connect_to_ray", none_is_up)
    (tmp_path / "chats").mkdir()
    for name, content in FILES.items():
        (tmp_path / "chats" / name).write_bytes(content)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, target: Path, *overrides: str, until: str = "prompts") -> int:
    """The exit code of the command."""
    settings = [
        f"target.model={target}",
        "target.dtype=float32",
        f"storage.uri={folder}/s",
        f"data.prompts={folder}/chats",
    ]
    settings += [f"mlflow.tracking_uri={NOWHERE}", *overrides]
    monkeypatch.setattr(sys, "argv", ["data.py", "--until", until, *(word for s in settings for word in ("--set", s))])
    with pytest.raises(SystemExit) as end:
        guarded(app)
    return int(end.value.code or 0)


def lines(folder: Path, name: str) -> list[dict]:
    (file,) = (folder / "s" / "prompts").glob(f"*/{name}")
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def test_every_row_of_bad_files_is_kept_cut_or_dropped_with_its_place(folder, tiny_target, monkeypatch, caplog) -> None:
    caplog.set_level("INFO", "aerie")
    assert run(monkeypatch, folder, tiny_target, "data.max_dropped_fraction=0.5") == 0
    asked = [[[m["role"], m["content"]] for m in row["messages"]] for row in lines(folder, "prompts.jsonl")]
    assert sorted(asked) == sorted(ASKED)
    lost = [(Path(row["source"]).name, row["line"], row["reason"]) for row in lines(folder, "quarantine.jsonl")]
    assert lost == LOST
    places = lines(folder, "_places.jsonl")
    assert {(Path(row["source"]).name, row["line"], row["cut"]) for row in places if "cut" in row} == CUT
    assert "prompts: in 17, kept 8, truncated 2, dropped[empty_content] 1" in caplog.text
    assert "rows used in part: empty_content 1, starts_with_assistant 1; " in caplog.text


def test_too_many_bad_rows_end_the_command_with_the_first_ones_place(folder, tiny_target, monkeypatch, capsys) -> None:
    assert run(monkeypatch, folder, tiny_target) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "prompts: 41.2% of the rows were lost, data.max_dropped_fraction allows 10.0%: in 17, kept 8" in line
    assert f"(the first: {folder}/chats/blank.jsonl:1 empty_content (the first assistant turn is blank))" in line


def test_what_asks_the_target_needs_a_cluster(folder, tiny_target, monkeypatch, capsys) -> None:
    assert run(monkeypatch, folder, tiny_target, until="responses") == 2
    assert "error: ray: no Ray cluster is up" in capsys.readouterr().err
