"""What a prompt that is given as ids says: its text without what the target's chat template wrote around it."""

import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, NamedTuple


class Said(NamedTuple):
    text: str
    """All of it, a system turn of its own included."""
    turns: list[str]
    """The user's turns; the whole text where the target's template did not write it."""


def reader_of_ids(tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> Callable[[list[int]], Said]:
    """Tells what ids say, from how the template writes a conversation of question, answer and question.

    Args:
        tokenizer: The target's, with its chat template.
        template_kwargs: Switches of the template, from `target.chat_template_kwargs`.
    """
    control = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    control_token = re.compile("|".join(control) or "(?!)")
    marks = _marks(_probe(tokenizer, template_kwargs), control_token)

    def bare(text: str) -> str:
        return control_token.sub(" ", text)

    def read(ids: list[int]) -> Said:
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if marks is None or not (turns := marks.turns(text)):
            return Said(bare(text), [bare(text)])
        return Said(bare(marks.rest(text)), [bare(turn) for turn in turns])

    return read


class _Marks(NamedTuple):
    """What the template writes, as text."""

    beginning: str
    """Before the first question, its own system turn included."""
    question: str
    """Before every question."""
    answer: str
    """Between a question and its answer."""
    end: str
    """After the last question."""

    def turns(self, text: str) -> list[str]:
        """The user's; none where the template did not write this text."""
        parts = text.removesuffix(self.end).split(self.answer)
        return [part.rpartition(self.question)[2] for part in parts if self.question in part]

    def rest(self, text: str) -> str:
        """The text without the marks."""
        unmarked = text.removesuffix(self.end).removeprefix(self.beginning)
        return unmarked.replace(self.answer, "\n").replace(self.question, "\n")


def _probe(tokenizer: Any, template_kwargs: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """What the template writes before, between and after a question, an answer and a question; None: it does not show them."""
    # transformers takes seconds to import, and the driver imports this module in every run
    from components.target.chat import TemplateError, render_text
    from components.target.template_check import ANSWER, FOLLOW_UP, QUESTION

    said = zip(("user", "assistant", "user"), (QUESTION, ANSWER, FOLLOW_UP), strict=True)
    messages = [{"role": role, "content": content} for role, content in said]
    try:
        text = render_text(tokenizer, messages, template_kwargs=template_kwargs)
    except TemplateError:
        return None
    found = re.fullmatch(f"(.*){QUESTION}(.*){ANSWER}(.*){FOLLOW_UP}(.*)", text, re.DOTALL)
    return found.groups() if found else None


def _marks(written: tuple[str, ...] | None, control_token: re.Pattern[str]) -> _Marks | None:
    if written is None:
        return None
    beginning, before_answer, before_question, end = written
    # in characters and whole control tokens, or half a token that two of them share would stay
    units = re.compile(f"{control_token.pattern}|.", re.DOTALL)
    answer = "".join(_common(units.findall(before_answer), units.findall(end)))
    question = "".join(_common(units.findall(beginning)[::-1], units.findall(before_question)[::-1])[::-1])
    return _Marks(beginning, question, answer, end) if question.strip() and answer.strip() else None


def _common(first: list[str], second: list[str]) -> list[str]:
    """What both begin with."""
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
