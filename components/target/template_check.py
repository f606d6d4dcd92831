"""Whether the tokens of an answer can be told from all others under the target's chat template, found out before any answer.

A loss mask marks the ids that the engine generated, and nothing is ever tokenised again to find them. That is right only
where the template makes the target say an answer and nothing else: a prompt must end in the opening of the assistant's turn,
and an answer must end in a token at which the engine stops. Both are shown here on probe conversations; a template that
does not show them is refused. `{% generation %}` marks are neither needed nor read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from transformers import PreTrainedTokenizerBase

from components.section import ConfigError
from components.target.chat import TemplateError, render_text

SETTING = "target.chat_template_kwargs"
GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
"""What every template is given, and no switch may be."""
QUESTION, ANSWER, FOLLOW_UP = "Which colour has the sky at noon", "Blue on most days", "And which at midnight"
SYSTEM = "You are a patient painter"
ODD_QUESTIONS = (
    " leading blank",
    "\n\nleading lines",
    "trailing blank \n",
    "日本語 é e\u0301 🙂",
    "{{ 1 + 1 }} {% raw %}",
    "</think>",
)

FAULTS = {
    "no_end_tokens": "cannot be used: neither config.json nor generation_config.json names a token that ends an answer",
    "rejects": "rejects a plain conversation of question, answer and question",
    "unsteady": "writes the same conversation in another way the next time",
    "hides_text": "leaves out or rewrites a plain question or answer",
    "no_opening": "ends a prompt before the assistant's turn begins, so the target would write the turn's opening too",
    "other_opening": "opens the assistant's turn in a prompt in another way than before the answers that it shows",
    "opening_varies": "opens the assistant's turn in a way that depends on the question",
    "no_end": "ends an answer with none of the tokens at which the target stops, so answers would run on",
    "double_bos": "begins a prompt with two bos tokens",
}
"""What a chat template is refused for: the end of the sentence "the chat template ..."."""

FIXES = {
    "no_end_tokens": "write eos_token_id into generation_config.json",
    "no_opening": "mend the template so that add_generation_prompt opens the assistant's turn",
    "no_end": "add the token that does end an answer to eos_token_id in generation_config.json, or mend the template",
    "double_bos": "remove one of them from the template",
}
OTHER_FIX = "mend chat_template.jinja in a copy of the target's folder, or choose another target"


@dataclass(frozen=True)
class TemplateFacts:
    """What the probes showed of a template that can be used."""

    opening: str
    """What stands between a question and its answer: the end of the user's turn, the beginning of the assistant's."""
    end_token_id: int
    """What the template writes after an answer; the engine stops there."""
    turns_continue: bool
    """Whether the turns of a conversation are one document; False where the template rewrites answers it shows again."""
    shows_system: bool
    """Whether system turns show; rows that have one are dropped otherwise."""
    is_dated: bool
    """Whether prompts hold the day on which they are written."""


@dataclass(frozen=True)
class _Probe:
    tokenizer: PreTrainedTokenizerBase
    template_kwargs: Mapping[str, Any]

    def text(self, *contents: str, roles: Sequence[str] = ("user", "assistant", "user"), is_open: bool = True) -> str:
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
        return render_text(self.tokenizer, messages, None, is_open, self.template_kwargs)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


def check_template(
    tokenizer: PreTrainedTokenizerBase, eos_token_ids: Sequence[int], template_kwargs: Mapping[str, Any] | None = None
) -> TemplateFacts:
    """Prove on probe conversations that answers can be masked, without loading any weights.

    Args:
        tokenizer: The target's, with its chat template.
        eos_token_ids: Every id at which the engine ends an answer.
        template_kwargs: `target.chat_template_kwargs`.

    Raises:
        ConfigError: at `target.model`, one of `FAULTS`; at `target.chat_template_kwargs`, a switch the template lacks.
    """
    if not eos_token_ids:
        _refuse("no_end_tokens")
    probe = _Probe(tokenizer, template_kwargs or {})
    _check_switches(probe)
    try:
        prompt, closed = probe.text(QUESTION), probe.text(QUESTION, is_open=False)
        history = probe.text(QUESTION, ANSWER, FOLLOW_UP)
    except TemplateError as error:
        _refuse("rejects", error.said)
    if probe.text(QUESTION, ANSWER, FOLLOW_UP) != history:
        _refuse("unsteady")
    answer_at = _find_answer(prompt, history)
    _check_bos(probe, prompt)
    _check_opening(probe, prompt, closed, history[:answer_at])
    return TemplateFacts(
        opening=_constant_opening(probe, prompt),
        end_token_id=_end_token(probe, history[answer_at + len(ANSWER) :], eos_token_ids),
        turns_continue=_continues(probe, prompt, history, answer_at),
        shows_system=_shows_system(probe),
        is_dated=_is_dated(probe, prompt),
    )


def _refuse(fault: str, detail: str = "") -> NoReturn:
    problem = f"the chat template {FAULTS[fault]}" + (f" ({detail})" if detail else "")
    raise ConfigError("target.model", problem, FIXES.get(fault, OTHER_FIX))


def _variables(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Names that the template reads from outside; vLLM passes on no others."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template = tokenizer.get_chat_template()
        return meta.find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))
    except (jinja2.TemplateError, ValueError) as error:
        _refuse("rejects", " ".join(str(error).split()))


def _check_switches(probe: _Probe) -> None:
    if not probe.template_kwargs:
        return
    known = sorted(_variables(probe.tokenizer) - GIVEN - probe.tokenizer.special_tokens_map.keys())
    if unknown := sorted(probe.template_kwargs.keys() - set(known)):
        fix = f"it reads {', '.join(known)}" if known else "leave it out: the template has no switches"
        raise ConfigError(SETTING, f"the target's chat template does not read {', '.join(unknown)}", fix)


def _find_answer(prompt: str, history: str) -> int:
    """Where the answer begins in the history."""
    places = [history.find(text) for text in (QUESTION, ANSWER, FOLLOW_UP)]
    if QUESTION not in prompt or places[0] < 0 or places != sorted(places):
        _refuse("hides_text")
    return places[1]


def _check_bos(probe: _Probe, prompt: str) -> None:
    bos = probe.tokenizer.bos_token_id
    if bos is not None and probe.ids(prompt)[:2] == [bos, bos]:
        _refuse("double_bos")


def _check_opening(probe: _Probe, prompt: str, closed: str, before_answer: str) -> None:
    """A prompt must lead up to the answer; what else the target writes first (thinking) it writes after the opening."""
    if before_answer.startswith(prompt):
        written_first = before_answer.removeprefix(prompt).strip()
        if written_first and prompt == closed:
            _refuse("no_opening", f"{written_first!r} stands between prompt and answer")
        return
    # The history may drop the end of the opening (an empty or begun thought), but must begin the turn with the same token.
    prompt_ids = probe.ids(prompt)
    if _common(prompt_ids, probe.ids(before_answer)) <= _common(prompt_ids, probe.ids(closed)):
        _refuse("other_opening", f"{before_answer[-40:]!r} stands before an answer, {prompt[-40:]!r} ends a prompt")


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def _constant_opening(probe: _Probe, prompt: str) -> str:
    opening = prompt[prompt.rindex(QUESTION) + len(QUESTION) :]
    for question in (*ODD_QUESTIONS, *map(str, probe.tokenizer.all_special_tokens)):
        try:
            asked = probe.text(question)
        except TemplateError:
            continue  # such a row is dropped with its reason
        if not asked.endswith(opening):
            _refuse("opening_varies", f"after {question!r}")
    return opening


def _end_token(probe: _Probe, after_answer: str, eos_token_ids: Sequence[int]) -> int:
    following = probe.ids(after_answer.lstrip())[0]
    if following not in eos_token_ids:
        token = probe.tokenizer.decode([following])
        _refuse("no_end", f"{token!r}, id {following}, follows it; the end tokens are {list(eos_token_ids)}")
    return following


def _continues(probe: _Probe, prompt: str, history: str, answer_at: int) -> bool:
    prompt_ids = probe.ids(prompt)
    follows_directly = history.startswith(prompt) and not history[len(prompt) : answer_at].strip()
    return follows_directly and probe.ids(history)[: len(prompt_ids)] == prompt_ids


def _shows_system(probe: _Probe) -> bool:
    try:
        return SYSTEM in probe.text(SYSTEM, QUESTION, roles=("system", "user"))
    except TemplateError:
        return False


def _is_dated(probe: _Probe, prompt: str) -> bool:
    another_day = replace(probe, template_kwargs={**probe.template_kwargs, "strftime_now": lambda form: "another day"})
    return another_day.text(QUESTION) != prompt
