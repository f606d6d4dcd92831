"""From a model's answer to a program that passes or fails: HumanEval and MBPP.

HumanEval (Chen et al. 2021): the prompt is the start of a module that ends in a function without body; the row's `test` defines `check`. Rows
without `test` are judged by the examples (`>>>`) in their docstring, which is a weaker test: the score's name says which it was. MBPP
(Austin et al. 2021): the tests are assertions, in `test_list` or in the prompt itself.
"""

import ast
import doctest
import re
from collections.abc import Iterator, Mapping
from typing import Any

FENCE = re.compile(r"^[ \t]*```[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
"""A fenced block; one that was cut off ends with the answer."""
SAME = """
def _same(got, want):
    import ast
    try:
        return got == ast.literal_eval(want)
    except (ValueError, SyntaxError):
        return repr(got) == want
"""


def humaneval_reference(row: Mapping[str, Any], prompt: str) -> dict[str, str] | None:
    """What an answer to the row is run with; None where nothing can tell right from wrong."""
    function = _last_function(prompt)
    entry_point = row.get("entry_point") or (function.name if function else None)
    if entry_point is None:
        return None
    if isinstance(row.get("test"), str):
        return _reference("pass@1", prompt, f"{row['test']}\n\ncheck({entry_point})\n", entry_point)
    examples = list(_examples(ast.get_docstring(function) or "")) if function else []
    tests = "\n".join([SAME, *examples])
    return _reference("docstring examples", prompt, tests, entry_point) if examples else None


def mbpp_reference(row: Mapping[str, Any], prompt: str) -> dict[str, str] | None:
    """What an answer to the row is run with; None without an assertion."""
    listed = row.get("test_list")
    tests = "\n".join(map(str, listed)) if listed else _assertions(prompt)
    setup = str(row.get("test_setup_code") or "\n".join(map(str, row.get("test_imports") or [])))
    return _reference("pass@1", "", f"{setup}\n{tests}\n", "") if tests else None


def code_alone(prompt: str) -> dict[str, str]:
    """What an answer is run with where the row has no tests: the prompt, if it is the start of the program."""
    function = _last_function(prompt)
    return {"prompt": prompt if function else "", "tests": "", "entry_point": function.name if function else ""}


def program_of(answer: str, reference: Mapping[str, str]) -> str:
    """The answer's code with the reference's tests behind it.

    Code that defines the asked function stands behind the prompt, whose imports and helpers it may use; other code continues it.
    """
    code, entry_point = code_in(answer), reference["entry_point"]
    continues = bool(entry_point) and not re.search(rf"^\s*(async )?def {re.escape(entry_point)}\b", code, re.MULTILINE)
    joint = "" if continues else "\n\n"
    return f"{reference['prompt']}{joint}{code}\n\n{reference['tests']}"


def code_in(answer: str) -> str:
    """The first fenced block, or the whole answer where there is none."""
    found = FENCE.search(answer)
    return found[1] if found else answer


def _reference(score: str, prompt: str, tests: str, entry_point: str) -> dict[str, str]:
    return {"score": score, "prompt": prompt, "tests": tests, "entry_point": entry_point}


def _last_function(prompt: str) -> ast.FunctionDef | None:
    try:
        body = ast.parse(prompt).body
    except SyntaxError:
        return None
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return functions[-1] if functions else None


def _examples(docstring: str) -> Iterator[str]:
    """Python lines that assert what the docstring's examples show."""
    try:
        found = doctest.DocTestParser().get_examples(docstring)
    except ValueError:  # an example that is not laid out as one
        return
    for example in found:
        source, want = example.source.strip(), example.want.strip()
        if not _is_expression(source):
            yield source
        elif want and "Traceback" not in want:
            yield f"assert _same({source}, {want!r})"


def _is_expression(source: str) -> bool:
    try:
        ast.parse(source, mode="eval")
    except SyntaxError:
        return False
    return True


def _assertions(prompt: str) -> str:
    """The prompt's assertions: from the first to the end, or each line that is one."""
    lines = prompt.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("assert ")), len(lines))
    whole = "\n".join(lines[start:])
    try:
        ast.parse(whole)
    except SyntaxError:
        return "\n".join(line for line in lines if line.startswith("assert "))
    return whole
