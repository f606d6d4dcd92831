"""Conversations to token ids, through the target's own chat template and nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from components.config import ConfigError


class TemplateError(ValueError):
    """The target's chat template rejects a conversation; the row is dropped with this reason."""


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The target's tokenizer, without remote code.

    Raises:
        ConfigError: at `target.model` when it has no chat template.
    """
    tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ConfigError(
            "target.model",
            f"the tokenizer of {path} has no chat template",
            "use the instruction-tuned model, or add chat_template.jinja to the folder",
        )
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a conversation, as vLLM's chat endpoint makes them.

    The template writes the bos token itself, if the target has one: nothing is added when its text is tokenised.

    Args:
        tokenizer: The target's.
        messages: `role` and `content` of every message, in OpenAI's form.
        tools: Functions offered to the model, in OpenAI's form.
        add_generation_prompt: End with the opening of the assistant's turn.

    Raises:
        TemplateError: the template rejects this conversation.
    """
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=False,
        )
    except (jinja2.TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
        raise TemplateError(f"the chat template rejects the conversation: {error}") from error
    return list(ids)
