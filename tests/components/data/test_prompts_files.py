"""What is read from files: bytes that are no rows, kinds of files, folders, and the errors for the user."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.config import PromptSource
from components.data.formats import read_rows
from components.data.prompts import BadRow
from components.data.sources import source_identity
from components.section import ConfigError
from tests.components.data.prompt_rows import read


def row(text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]}


def line(text: str) -> bytes:
    return json.dumps(row(text), ensure_ascii=False).encode() + b"\n"


def texts(prompts) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in sorted(prompts, key=lambda prompt: prompt.line)]


def read_bytes(path, content: bytes):
    path.write_bytes(content)
    return read(path)


def reasons(bad: list[BadRow]) -> list[tuple[int, str]]:
    return [(row.line, row.reason) for row in bad]


def test_byte_order_mark_crlf_blank_lines_and_line_separators(tmp_path):
    content = b"\xef\xbb\xbf" + line("one").replace(b"\n", b"\r\n") + b"\r\n  \n" + line("two\u2028\u0085three\x0bfour")
    prompts, bad = read_bytes(tmp_path / "a.jsonl", content)
    assert texts(prompts) == ["one", "two\u2028\u0085three\x0bfour"]
    assert [prompt.line for prompt in sorted(prompts, key=lambda prompt: prompt.line)] == [1, 4]
    assert bad == []


def test_escaped_line_breaks_stay_as_they_are(tmp_path):
    prompts, _ = read_bytes(tmp_path / "a.jsonl", line("one\r\ntwo"))
    assert texts(prompts) == ["one\r\ntwo"]


def test_latin1_line_and_lone_surrogate_cost_their_own_rows_only(tmp_path):
    latin1 = line("a café?").replace("é".encode(), "é".encode("latin-1"))
    surrogate = line("half: X").replace(b"X", b"\\ud83d")
    prompts, bad = read_bytes(tmp_path / "a.jsonl", line("one") + latin1 + surrogate + line("four"))
    assert texts(prompts) == ["one", "four"]
    assert reasons(bad) == [(2, "not_utf8"), (3, "lone_surrogate")]
    for bad_row in bad:
        assert bad_row.source == str(tmp_path / "a.jsonl")
        assert bad_row.detail.encode("utf-8")


@pytest.mark.parametrize("part", [line("two")[:-9], line("naïve")[: line("naïve").index("ï".encode()) + 1]])
def test_truncated_last_line_is_reported(tmp_path, part):
    prompts, bad = read_bytes(tmp_path / "a.jsonl", line("one") + part)
    assert texts(prompts) == ["one"]
    assert reasons(bad) == [(2, "truncated_line")]


def test_last_line_without_line_feed_counts_if_whole(tmp_path):
    prompts, bad = read_bytes(tmp_path / "a.jsonl", line("one") + line("two")[:-1])
    assert texts(prompts) == ["one", "two"]
    assert bad == []


def test_rows_in_are_prompts_and_bad_rows(tmp_path):
    deep = b"[" * 100_000 + b"\n"
    prompts, bad = read_bytes(
        tmp_path / "a.jsonl", line("one") + b"{oops}\n" + b"[1]\n" + b'"text"\n' + deep + line("six")
    )
    assert texts(prompts) == ["one", "six"]
    assert reasons(bad) == [(2, "bad_json"), (3, "not_an_object"), (4, "not_an_object"), (5, "bad_json")]


def test_json_array_wrapped_array_single_row_and_jsonl_under_its_name(tmp_path):
    rows = [row("one"), row("two")]
    assert texts(read_bytes(tmp_path / "a.json", json.dumps(rows, indent=1).encode())[0]) == ["one", "two"]
    assert texts(read_bytes(tmp_path / "b.json", json.dumps({"data": rows}).encode())[0]) == ["one", "two"]
    assert texts(read_bytes(tmp_path / "c.json", json.dumps(row("one")).encode())[0]) == ["one"]
    prompts, bad = read_bytes(tmp_path / "d.json", line("one") + b"{oops\n" + line("three"))
    assert texts(prompts) == ["one", "three"]
    assert reasons(bad) == [(2, "bad_json")]


def test_parquet_with_nulls_for_missing_keys(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": "{}"}}]}
    rows = [
        row("one"),
        {"messages": [{"role": "user", "content": "two"}, call, {"role": "tool", "content": "noon"}]},
        {"messages": [{"role": "user", "content": "three"}, {"role": "critic", "content": "x"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1)
    prompts, bad = read(tmp_path / "a.parquet")
    assert texts(prompts) == ["one", "two"]
    assert sorted(len(prompt.messages) for prompt in prompts) == [1, 3]
    assert reasons(bad) == [(3, "unknown_role")]


def test_parquet_string_that_is_no_utf8(tmp_path):
    column = pa.array([b"one", b"caf\xe9", b"three"]).view(pa.string())
    pq.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet")
    prompts, bad = read(tmp_path / "a.parquet")
    assert texts(prompts) == ["one", "three"]
    assert reasons(bad) == [(2, "not_utf8")]


def test_same_rows_have_the_same_keys_in_every_kind_of_file(tmp_path):
    rows = [row("one"), row("two")]
    read_bytes(tmp_path / "a.jsonl", b"".join(line(text) for text in ("two", "one")))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    keys = {tuple(p.key for p in read(path)[0]) for path in tmp_path.iterdir()}
    assert len(keys) == 1


def test_folder_reads_all_data_files_below_it_and_nothing_hidden(tmp_path):
    for name in ("a/one.jsonl", "b/two.json", ".cache/three.jsonl", "a/.four.jsonl", "notes.md"):
        path = tmp_path / "rows" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(line(name))
    prompts, bad = read(tmp_path / "rows")
    assert sorted(prompt.messages[0]["content"] for prompt in prompts) == ["a/one.jsonl", "b/two.json"]
    assert sorted(prompt.family for prompt in prompts) == ["one", "two"]
    assert bad == []


def test_what_a_folder_holds_beside_its_data_files_is_named(tmp_path, caplog):
    rows, elsewhere = tmp_path / "rows", tmp_path / "elsewhere"
    for name in ("a.jsonl", "deep/b.jsonl.gz", "c.csv", ".hidden.csv"):
        (rows / name).parent.mkdir(parents=True, exist_ok=True)
        (rows / name).write_bytes(line(name))
    elsewhere.mkdir()
    (elsewhere / "d.jsonl").write_bytes(line("d"))
    (rows / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(rows)
    (rows / "gone.jsonl").symlink_to(tmp_path / "nothing.jsonl")
    source = PromptSource(path=str(rows))
    assert [name for name, _ in source_identity(source)["files"]] == ["a.jsonl", "d.jsonl"]
    assert source_identity(source) == source_identity(source)
    prompts, _ = read(rows)
    assert sorted(prompt.messages[0]["content"] for prompt in prompts) == ["a.jsonl", "d"]
    (warning,) = [line for line in caplog.messages if "are not read" in line]
    assert f"3 files of {rows} are not read" in warning
    assert warning.endswith("c.csv, deep/b.jsonl.gz, gone.jsonl")


def test_family_comes_from_the_row_else_from_the_file(tmp_path):
    named = [{"prompt": f"p{i}", field: " law "} for i, field in enumerate(("family", "task", "category"))]
    plain = [{"prompt": "q"}, {"prompt": "r", "task": ""}, {"prompt": "s", "task": 3}]
    prompts, _ = read_bytes(tmp_path / "mail.jsonl", b"".join(json.dumps(r).encode() + b"\n" for r in named + plain))
    assert sorted(prompt.family for prompt in prompts) == ["law"] * 3 + ["mail"] * 3


def test_builtin_and_files_together(tmp_path):
    read_bytes(tmp_path / "a.jsonl", line("A question that the built-in set does not ask."))
    prompts, _ = read("builtin", tmp_path / "a.jsonl")
    assert {"a", "code"} <= {prompt.family for prompt in prompts}


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("rows.csv", b"a,b\n", "unknown kind"),
        ("empty.jsonl", b"", "holds no row"),
        ("blank.jsonl", b"\n\r\n", "holds no row"),
        ("empty.json", b"[]", "holds no row"),
        ("roles.jsonl", b'{"messages": [{"role": "elf", "content": "Hi"}]}\n' * 3, "unknown_role 3"),
        ("broken.parquet", b"PAR1 no", "cannot read"),
        ("broken.json", b"[{", "no whole JSON array"),
    ],
)
def test_nothing_usable_is_an_error_of_data_prompts(tmp_path, name, content, part):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read(tmp_path / name)
    assert error.value.path == "data.prompts"
    assert part in error.value.problem
    assert "\n" not in str(error.value)


def test_folder_without_data_files_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="holds no data file"):
        read(tmp_path)


def test_an_array_that_was_cut_off_is_refused_beside_a_good_file(tmp_path):
    """As one bad row of 51 it would cost a hundred, and stay below every limit."""
    (tmp_path / "good.jsonl").write_bytes(b"".join(line(f"good {i}") for i in range(50)))
    array = json.dumps([row(f"row {i}") for i in range(100)]).encode()
    (tmp_path / "cut.json").write_bytes(array[:-5])
    assert next(read_rows(tmp_path / "cut.json", "cut.json")).value == row("row 0")  # nothing is read ahead of its turn
    with pytest.raises(ConfigError, match=r"data\.prompts: .*cut\.json is no whole JSON array.*leave out the file"):
        read(tmp_path)


@pytest.mark.parametrize("depth", range(500, 980, 20))
def test_a_deeply_nested_row_costs_itself_only(tmp_path, depth):
    nested = "[" * depth + "]" * depth
    tools = f'[{{"function": {{"name": "f", "parameters": {nested}}}}}]'
    deep = f'{{"prompt": "deep", "tools": {tools}}}\n'.encode()
    prompts, bad = read_bytes(tmp_path / "a.jsonl", line("one") + deep + line("three"))
    assert texts(prompts) == ["one", "three"]
    assert reasons(bad) == [(2, "bad_json")]
