"""Workers that answer prompts: one vLLM engine an actor, every turn of every prompt in flight as soon as it can be.

A turn's prompt holds the target's own answers to the turns before it. Prompts are rendered by the chat template and passed
as token ids; what is recorded is vLLM's own prompt ids and output ids.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from components.config import DataConfig
from components.data.documents import merged_tokens
from components.data.part_map import PartTask, PartWorker
from components.data.parts import PartAccount, part_name, part_writer
from components.data.prompt_list import PROMPTS, ListedPrompt, PromptRange, read_range
from components.storage import Location
from components.target.chat import TemplateError, load_tokenizer, render

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("prompt_key", pa.string()),
        ("family", pa.string()),
        ("split", pa.string()),
        ("turn", pa.int32()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("output_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
    ]
)
FINISHED, CUT_OFF = "stop", "length"


@dataclass
class _Part:
    """A part in the making."""

    number: int
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

    def place(self) -> dict[str, Any]:
        return {"key": self.key, "source": self.listed.prompt.source, "line": self.listed.prompt.line}


class AnswerWorker(PartWorker):
    """Answers the prompts of its parts, all of them at once, and writes each part when its last answer is there."""

    def __init__(
        self,
        output: Location,
        progress: Any,
        prompts: Location,
        target_path: str,
        engine_kwargs: dict[str, Any],
        config: DataConfig,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        # takes seconds, and only engine actors need it
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        super().__init__(output, progress)
        self._prompts_file = prompts.join(PROMPTS)
        self._config = config
        self._max_model_len = engine_kwargs["max_model_len"]
        self._tokenizer = load_tokenizer(Path(target_path))
        self._render = partial(render, self._tokenizer, template_kwargs=template_kwargs)
        self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_kwargs))
        self._sampling_params = partial(SamplingParams, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False)
        self._waiting: dict[str, _Dialogue] = {}

    def make(self, tasks: list[PartTask]) -> None:
        """Answer every prompt of these parts, at once."""
        for task in tasks:
            self._open_part(task)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                self._on_answer(self._waiting.pop(output.request_id), output)

    def _open_part(self, task: PartTask) -> None:
        part = _Part(task.number)
        listed = read_range(self._prompts_file, PromptRange(task.number, task.start, task.num_bytes))
        part.dialogues = [_Dialogue(prompt, part) for prompt in listed]
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
        if len(prompt_ids) + self._config.max_new_tokens > self._max_model_len:
            detail = f"{len(prompt_ids)} prompt tokens and an answer do not fit in {self._max_model_len}"
            return self._give_up(dialogue, "too_long", detail)
        self._waiting[dialogue.key] = dialogue
        self._engine.add_request(dialogue.key, {"prompt_token_ids": prompt_ids}, self._params(dialogue.key))

    def _params(self, key: str) -> Any:
        # A seed of its own for each turn: what is drawn does not depend on what else is in the batch.
        seed = int.from_bytes(hashlib.sha256(f"{self._config.seed}:{key}".encode()).digest()[:4])
        return self._sampling_params(
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            max_tokens=self._config.max_new_tokens,
            seed=seed if self._config.temperature > 0 else None,
        )

    def _give_up(self, dialogue: _Dialogue, reason: str, detail: str, is_failure: bool = False) -> None:
        """Account for this turn and those after it, which cannot be asked without its answer."""
        lose = dialogue.part.account.fail if is_failure else dialogue.part.account.drop
        for turn in range(len(dialogue.rows), len(dialogue.turns)):
            lose(reason, {**dialogue.place(), "key": f"{dialogue.listed.prompt.key}:{turn}"}, detail)
        dialogue.is_over = True

    def _on_answer(self, dialogue: _Dialogue, output: Any) -> None:
        answer = output.outputs[0]
        output_ids = list(answer.token_ids)
        if not output_ids or answer.finish_reason not in (FINISHED, CUT_OFF):
            self._give_up(dialogue, "no_answer", f"finish reason {answer.finish_reason}", is_failure=True)
        else:
            self._keep(dialogue, list(output.prompt_token_ids), output_ids, answer.finish_reason)
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

    def _close_if_complete(self, part: _Part) -> None:
        if not part.is_complete:
            return
        rows = [row for dialogue in part.dialogues for row in dialogue.rows]
        part.account.figures["document_tokens"] = merged_tokens(rows)
        with part_writer(self.output.join(part_name(part.number)), SCHEMA, part.account) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
