"""Workers that answer prompts: one vLLM engine an actor, every turn of every prompt in flight as soon as it can be.

A turn's prompt holds the target's own answers to the turns before it. Prompts are rendered by the chat template and passed
as token ids; what is recorded is vLLM's own prompt ids and output ids.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from components.config import DataConfig
from components.data.answers import CUT_OFF, FINISHED, SCHEMA, read_answers, write_answers
from components.data.documents import merged_tokens
from components.data.part_worker import PartTask, PartWorker, Piece
from components.data.parts import PartAccount, read_account
from components.data.prompt_list import PROMPTS, ListedPrompt, PromptRange, read_range
from components.storage import Location
from components.target.chat import TemplateError, load_tokenizer, render


@dataclass
class _Part:
    """A part, or a piece of one, in the making."""

    piece: Piece
    dialogues: list["_Dialogue"] = field(default_factory=list)
    account: PartAccount = field(default_factory=PartAccount)

    @property
    def is_complete(self) -> bool:
        return all(dialogue.is_over for dialogue in self.dialogues)


@dataclass
class _Dialogue:
    """One prompt and the answers so far."""

    listed: ListedPrompt
    part: _Part
    messages: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    is_over: bool = False

    @property
    def key(self) -> str:
        """Key of the turn that is next."""
        return f"{self.listed.prompt.key}:{len(self.rows)}"

    @property
    def turns(self) -> list[list[dict[str, Any]]]:
        return self.listed.prompt.turns()


class AnswerWorker(PartWorker):
    """Answers the prompts of its parts, all of them at once, and writes each part when its last answer is there."""

    schema = SCHEMA

    def __init__(
        self,
        output: Location,
        report: Callable[[Mapping[str, int]], Any],
        prompts: Location,
        target_path: str,
        engine_kwargs: dict[str, Any],
        config: DataConfig,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(output, report)
        self._prompts_file = prompts.join(PROMPTS)
        self._config = config
        self._engine_kwargs = engine_kwargs
        self._tokenizer = load_tokenizer(Path(target_path))
        self._render = partial(render, self._tokenizer, template_kwargs=template_kwargs)
        self._waiting: dict[str, _Dialogue] = {}

    @cached_property
    def _engine(self) -> Any:
        from vllm import EngineArgs, LLMEngine  # takes seconds, and only workers with something to answer need it

        return LLMEngine.from_engine_args(EngineArgs(**self._engine_kwargs))

    def make(self, pieces: list[Piece]) -> None:
        """Answer every prompt of these pieces, at once."""
        for piece in pieces:
            self._open_part(piece)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                self._on_answer(self._waiting.pop(output.request_id), output)
            self.alive()

    def num_rows(self, task: PartTask) -> int:
        return len(self._prompts(task))

    def lose(self, piece: Piece, reason: str, detail: str) -> None:
        part = self._part(piece)
        if piece.draft is not None and piece.draft.exists():
            part.account = read_account(piece.draft)
            part.dialogues[0].rows = read_answers(piece.draft)
        for dialogue in part.dialogues:
            self._give_up(dialogue, reason, detail, is_failure=True)
        self._close_if_complete(part)

    def _prompts(self, task: PartTask) -> list[ListedPrompt]:
        return read_range(self._prompts_file, PromptRange(task.number, task.start, task.num_bytes))

    def _part(self, piece: Piece) -> _Part:
        part = _Part(piece)
        part.dialogues = [_Dialogue(prompt, part) for prompt in piece.of(self._prompts(piece.task))]
        return part

    def _open_part(self, piece: Piece) -> None:
        part = self._part(piece)
        for dialogue in part.dialogues:
            self._ask(dialogue)
        self._close_if_complete(part)

    def _ask(self, dialogue: _Dialogue) -> None:
        """Send the next turn to the engine, or end the dialogue where it cannot go on."""
        if len(dialogue.rows) == len(dialogue.turns):
            dialogue.is_over = True
            return
        dialogue.messages += dialogue.turns[len(dialogue.rows)]
        prompt = dialogue.listed.prompt
        try:
            prompt_ids = prompt.ids or self._render(dialogue.messages, prompt.tools)
        except TemplateError as error:
            return self._give_up(dialogue, "template_rejects", str(error))
        max_model_len = self._engine_kwargs["max_model_len"]
        if len(prompt_ids) + self._config.max_new_tokens > max_model_len:
            detail = f"{len(prompt_ids)} prompt tokens and an answer do not fit in {max_model_len}"
            return self._give_up(dialogue, "too_long", detail)
        self._waiting[dialogue.key] = dialogue
        self._engine.add_request(dialogue.key, {"prompt_token_ids": prompt_ids}, self._params(dialogue.key))

    def _params(self, key: str) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        # A seed of its own for each turn: what is drawn does not depend on what else is in the batch.
        seed = int.from_bytes(hashlib.sha256(f"{self._config.seed}:{key}".encode()).digest()[:4])
        return SamplingParams(
            output_kind=RequestOutputKind.FINAL_ONLY,
            detokenize=False,
            **self._config.sampling,
            max_tokens=self._config.max_new_tokens,
            seed=seed if self._config.temperature > 0 else None,
        )

    def _give_up(self, dialogue: _Dialogue, reason: str, detail: str, is_failure: bool = False) -> None:
        """Account for this turn and those after it, which cannot be asked without its answer."""
        lose = dialogue.part.account.fail if is_failure else dialogue.part.account.drop
        for turn in range(len(dialogue.rows), len(dialogue.turns)):
            lose(reason, {"key": f"{dialogue.listed.prompt.key}:{turn}"}, detail)
        dialogue.is_over = True

    def _on_answer(self, dialogue: _Dialogue, output: Any) -> None:
        answer = output.outputs[0]
        output_ids = list(answer.token_ids)
        if not output_ids or answer.finish_reason not in (FINISHED, CUT_OFF):
            self._give_up(dialogue, "no_answer", f"finish reason {answer.finish_reason}", is_failure=True)
        elif answer.finish_reason == CUT_OFF and self._config.truncation == "drop":
            self._give_up(dialogue, "cut_off", f"no end within {self._config.max_new_tokens} tokens")
        else:
            self._keep(dialogue, list(output.prompt_token_ids), output_ids, answer.finish_reason)
            self._keep_draft(dialogue)
            self._ask(dialogue)
        self._close_if_complete(dialogue.part)

    def _keep(self, dialogue: _Dialogue, prompt_ids: list[int], output_ids: list[int], finish_reason: str) -> None:
        prompt = dialogue.listed.prompt
        row = {
            "key": dialogue.key,
            "prompt_key": prompt.key,
            "family": prompt.family,
            "split": dialogue.listed.split,
            "turn": len(dialogue.rows),
            "prompt_ids": prompt_ids,
            "output_ids": output_ids,
            "finish_reason": finish_reason,
        }
        dialogue.rows.append(row)
        text = self._tokenizer.decode(output_ids, skip_special_tokens=True)
        dialogue.messages.append({"role": "assistant", "content": text})
        account = dialogue.part.account
        account.kept += finish_reason == FINISHED
        account.truncated += finish_reason == CUT_OFF
        account.figures.update(prompt_tokens=len(prompt_ids), output_tokens=len(output_ids))
        self.count(answers=1, tokens=len(output_ids))

    def _keep_draft(self, dialogue: _Dialogue) -> None:
        """Leave the answers so far of a prompt that is tried alone: the next turn may be the one that ends the engine."""
        draft = dialogue.part.piece.draft
        if draft is not None and len(dialogue.rows) < len(dialogue.turns):
            _write(draft, dialogue.rows, dialogue.part.account)

    def _close_if_complete(self, part: _Part) -> None:
        if part.is_complete:
            rows = [row for dialogue in part.dialogues for row in dialogue.rows]
            _write(part.piece.file, rows, part.account)


def _write(file: Location, rows: list[dict[str, Any]], account: PartAccount) -> None:
    account.figures["document_tokens"] = merged_tokens(rows)
    write_answers(file, rows, account)
