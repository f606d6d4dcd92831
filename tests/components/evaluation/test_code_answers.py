from components.evaluation.code_answers import code_in, humaneval_reference, mbpp_reference, program_of
from components.evaluation.sandbox import Limits, run_programs
from components.evaluation.scorers import (
    Question,
    judge,
    kept_facts,
    last_number,
    plain_reference,
    reference_of,
    score_facts,
)
from components.evaluation.statistics import Bootstrap

PROMPT = '''from typing import List


def helper(x):
    return x + 1


def add_one(numbers: List[int]) -> List[int]:
    """ Adds one to each.
    >>> add_one([1, 2])
    [2, 3]
    >>> add_one([])
    []
    """
'''
TEST = "def check(candidate):\n    assert candidate([1]) == [2]\n    assert candidate([5, 6]) == [6, 7]\n"
RIGHT = "Here it is:\n```python\ndef add_one(numbers: List[int]) -> List[int]:\n    return [helper(n) for n in numbers]\n```\nDone."
WRONG = "```python\ndef add_one(numbers):\n    return numbers\n```"
BODY = "    return [n + 1 for n in numbers]\n"


def passed(answers: list[str], reference: dict | None) -> list[bool]:
    assert reference is not None
    return [o == "passed" for o in run_programs([program_of(a, reference) for a in answers], Limits(), 2)]


def test_humaneval_runs_the_rows_tests_on_a_function_or_a_body() -> None:
    reference = humaneval_reference({"test": TEST, "entry_point": "add_one"}, PROMPT)

    assert passed([RIGHT, WRONG, BODY, "I cannot do that.", ""], reference) == [True, False, True, False, False]
    assert reference is not None
    assert reference["score"] == "pass@1"


def test_humaneval_without_tests_falls_back_on_the_docstrings_examples() -> None:
    reference = humaneval_reference({}, PROMPT)

    assert passed([RIGHT, WRONG, BODY], reference) == [True, False, True]
    assert reference is not None
    assert reference["score"] == "docstring examples"


def test_a_row_that_cannot_be_judged_has_no_reference() -> None:
    assert humaneval_reference({}, "def f(x):\n    '''No example.'''\n") is None
    assert humaneval_reference({}, "Write a function.") is None
    assert mbpp_reference({}, "Write a function.") is None
    assert reference_of("gsm8k", {"answer": "no number"}, "") is None
    assert reference_of("none", {"answer": "#### 4"}, "") is None


def test_mbpp_takes_its_assertions_from_the_row_or_the_prompt() -> None:
    prompt = "Your code should pass these tests:\n\nassert twice(2) == 4\nassert twice([1,\n  2]) == [1, 2, 1, 2]"
    answers = ["```python\ndef twice(x):\n    return x * 2\n```", "```\ndef twice(x):\n    return 4\n```"]

    assert passed(answers, mbpp_reference({}, prompt)) == [True, False]
    assert passed(answers, mbpp_reference({"test_list": ["assert twice(3) == 6"]}, "")) == [True, False]
    setup = {"test_list": ["assert twice(N) == 6"], "test_setup_code": "N = 3"}
    assert passed(answers, mbpp_reference(setup, "")) == [True, False]


def test_assertions_in_the_middle_of_a_prompt() -> None:
    reference = mbpp_reference({}, "assert f(1) == 1\nThink first, please: what is f?")
    assert reference is not None
    assert reference["tests"].strip() == "assert f(1) == 1"


def test_a_block_that_was_cut_off_is_still_the_code() -> None:
    assert code_in("Sure.\n```python\nx = 1\n") == "x = 1\n"
    assert code_in("```\nx = 1\n```\n```\ny = 2\n```") == "x = 1\n"
    assert code_in("x = 1") == "x = 1"


def test_the_last_number_in_one_spelling() -> None:
    assert last_number("She has 3 + 4 = 7 apples.\n#### 1,200") == "1200"
    assert last_number("so 18.") == "18"
    assert last_number("$1,200.50 in all") == "1200.5"
    assert last_number("-3") == "-3"
    assert last_number("18.00") == "18"
    assert last_number("none at all") is None


def test_gsm8k_is_an_exact_match_of_the_last_number() -> None:
    reference = reference_of("gsm8k", {"answer": "9 * 2 = 18\n#### 18"}, "")
    assert reference is not None
    questions = [Question(str(i), text, reference) for i, text in enumerate(["It is 18.", "It is 17", "no idea"])]

    assert judge("gsm8k", questions, Limits(), 1) == {"0": "passed", "1": "failed", "2": "failed"}


def test_a_score_stands_beside_plain_decodings_on_the_same_prompts() -> None:
    plain = {str(i): "passed" if i < 6 else "failed" for i in range(10)}
    arm = plain | {"0": "failed", "9": "timed out"}

    facts = score_facts("pass@1", arm, plain, Bootstrap())

    assert facts is not None
    assert (facts["name"], facts["num_prompts"], facts["timed_out"]) == ("pass@1", 10, 1)
    assert facts["estimate"] == 0.5
    assert facts["low"] < 0.5 < facts["high"]
    difference = facts["against_none"]
    assert round(difference["estimate"], 6) == -0.1
    assert difference["low"] < 0 <= difference["high"]
    assert score_facts("pass@1", plain, plain, Bootstrap())["against_none"] == {
        "estimate": 0.0,
        "low": 0.0,
        "high": 0.0,
    }
    assert score_facts("pass@1", {}, plain, Bootstrap()) is None


def test_few_prompts_have_a_score_and_no_interval() -> None:
    facts = score_facts("exact match", {"a": "passed"}, {"a": "passed"}, Bootstrap())
    assert facts is not None
    assert (facts["estimate"], facts["low"], facts["high"]) == (1.0, None, None)


def test_without_references_the_last_number_is_compared_with_plain_decodings() -> None:
    def outcomes(*answers: str) -> dict[str, str]:
        questions = [Question(str(i), text, plain_reference("gsm8k", "How much?")) for i, text in enumerate(answers)]
        return judge("gsm8k", questions, Limits(), 1)

    plain = outcomes("It is 18.", "So 1,200.", "I cannot say.", "7")

    facts = kept_facts(outcomes("2 * 9 = 18", "It is 1200.0", "3", "no number"), plain, Bootstrap())

    assert facts is not None
    assert (facts["num_prompts"], facts["estimate"]) == (3, 2 / 3)  # the third has no number to keep
    assert kept_facts(plain, {}, Bootstrap()) is None


def test_without_tests_code_is_compared_by_whether_it_runs() -> None:
    prompt = "def twice(x):\n    '''No example.'''\n"

    def outcomes(*answers: str) -> dict[str, str]:
        questions = [Question(str(i), a, plain_reference("humaneval", prompt)) for i, a in enumerate(answers)]
        return judge("humaneval", questions, Limits(), 2)

    plain = outcomes("    return x * 2\n", "```python\ndef twice(x):\n    return 2 * x\n```", "    return (")

    assert plain == {"0": "passed", "1": "passed", "2": "failed"}
    facts = kept_facts(outcomes("    return x + x\n", "    return [", "I cannot."), plain, Bootstrap())
    assert facts is not None
    assert facts["estimate"] == 2 / 3


def test_prose_is_no_start_of_a_program() -> None:
    (outcome,) = judge(
        "mbpp", [Question("0", "```\ndef f():\n    return 1\n```", plain_reference("mbpp", "Write f."))], Limits(), 1
    ).values()
    assert outcome == "passed"
