"""Items of a JSON array as `json` reads them, wherever the blocks of the file end."""

import io
import json

import pytest

from components.data import json_array
from components.data.json_array import array_items

ITEMS = [
    {"prompt": 'a "quoted" [list], {brace}\\', "é日🙂": [1, -2.5e3, True, None, {"deep": [[]]}]},
    12345,
    "half \ud83d",
    [],
    {},
    float("inf"),
    0,
]


@pytest.mark.parametrize("block", [1, 2, 7, 64, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii", [True, False])
def test_items_are_those_that_json_reads(block, indent, ascii, monkeypatch):
    monkeypatch.setattr(json_array, "BLOCK_CHARS", block)
    for items in (ITEMS, ITEMS[:1], []):
        text = f" \r\n{json.dumps(items, indent=indent, ensure_ascii=ascii)}\n "
        assert list(array_items(io.StringIO(text))) == items


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    "text", ["", "[", "[1", "[1,", "[1,]", "[1 2]", "[1]]", '["a', "[{]}", "{}", "[,1]", "[1]\n\n\n{}"]
)
def test_what_is_no_whole_array_is_an_error_after_its_items(text, block, monkeypatch):
    monkeypatch.setattr(json_array, "BLOCK_CHARS", block)
    with pytest.raises(json.JSONDecodeError):
        list(array_items(io.StringIO(text)))


def test_no_more_is_read_than_is_asked_for(monkeypatch):
    monkeypatch.setattr(json_array, "BLOCK_CHARS", 64)
    file = io.StringIO(json.dumps([{"prompt": f"row {i}"} for i in range(10_000)]))
    items = array_items(file)
    assert [next(items)["prompt"] for _ in range(100)][-1] == "row 99"
    assert file.tell() < 100 * 32
