"""Conversations to token ids, through the target's own chat template and nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from components.section import ConfigError

Messages = Sequence[Mapping[str, Any]]
MAX_SHOWN = 200
"""Characters of a template's own error that are passed on."""


class TemplateError(ValueError):
    """The target's chat template rejects a conversation; the row is dropped with this reason."""

    def __init__(self, said: str) -> None:
        super().__init__(f"the chat template rejects the conversation: {said}")
        self.said = said
        """The template's own words, cut and on one line."""


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
    messages: Messages,
    tools: Messages | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, as vLLM's chat endpoint makes them.

    The template writes the bos token itself, if the target has one: nothing is added when its text is tokenised.

    Args:
        tokenizer: The target's.
        messages: `role` and `content` of every message, in OpenAI's form.
        tools: Functions offered to the model, in OpenAI's form.
        add_generation_prompt: End with the opening of the assistant's turn.
        template_kwargs: Switches of the template, from `target.chat_template_kwargs`.

    Raises:
        TemplateError: the template rejects this conversation.
    """
    text = render_text(tokenizer, messages, tools, add_generation_prompt, template_kwargs)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Messages | None = None,
    add_generation_prompt: bool = True,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that `render` tokenises; the same arguments, the same error."""
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **(template_kwargs or {}),
        )
    except Exception as error:  # a template is code that came with the model: it may raise anything
        raise TemplateError(" ".join(str(error).split())[:MAX_SHOWN]) from error
