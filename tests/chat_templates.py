"""Chat templates as the families of targets write them, each with a tiny tokenizer that has the family's control tokens.

Written for the tests: what matters is how each family opens and ends an answer, and what it does to earlier ones.
"""

from dataclasses import dataclass
from functools import lru_cache

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.tiny import NUM_BYTES, byte_level_bpe

LLAMA = """{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
    {%- set said = messages[0].content | trim -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set said = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- set today = date_string if date_string is defined else strftime_now('%d %b %Y') -%}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + today + '\\n\\n' + said + '<|eot_id|>' -}}
{%- for turn in turns -%}
    {{- '<|start_header_id|>' + turn.role + '<|end_header_id|>\\n\\n' -}}
    {%- if turn.role == 'assistant' -%}
        {%- generation -%}{{- turn.content | trim + '<|eot_id|>' -}}{%- endgeneration -%}
    {%- else -%}{{- turn.content | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

QWEN = """{%- set last = namespace(question=-1) -%}
{%- for turn in messages -%}{%- if turn.role == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for turn in messages -%}
    {%- set said = turn.content -%}
    {%- if turn.role == 'assistant' and loop.index0 < last.question and '</think>' in said -%}
        {%- set said = said.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>' + turn.role + '\\n' + said + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

GEMMA = """{{- bos_token -}}
{%- for turn in messages -%}
    {%- if turn.role == 'system' -%}{{- raise_exception('there is no system role') -}}{%- endif -%}
    {%- if (turn.role == 'user') != (loop.index0 is even) -%}{{- raise_exception('user and model take turns') -}}{%- endif -%}
    {{- '<start_of_turn>' + ('model' if turn.role == 'assistant' else turn.role) + '\\n' -}}
    {{- turn.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""

# The system turn moves on to the last question, so that a conversation that has one is rewritten at every turn.
MISTRAL = """{{- bos_token -}}
{%- if messages[0].role == 'system' -%}
    {%- set said = messages[0].content + '\\n\\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set said = '' -%}{%- set turns = messages -%}
{%- endif -%}
{%- for turn in turns -%}
    {%- if turn.role == 'user' -%}
        {{- '[INST]' + (said if loop.last else '') + turn.content + '[/INST]' -}}
    {%- elif turn.role == 'assistant' -%}
        {{- turn.content + eos_token -}}
    {%- else -%}{{- raise_exception('only user and assistant take turns') -}}
    {%- endif -%}
{%- endfor -%}
"""

# Its prompt ends with an opened thought that the history never shows.
REASONER = """{{- bos_token -}}
{%- for turn in messages -%}
    {%- if turn.role == 'assistant' -%}
        {{- '<assistant>' + turn.content.split('</think>')[-1] + eos_token -}}
    {%- else -%}{{- '<user>' + turn.content -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant><think>\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Family:
    template: str
    control_tokens: tuple[str, ...]
    """The first is the pad token."""
    end_tokens: tuple[str, ...]
    """At which the engine stops; the first is the tokenizer's eos."""
    bos: str | None = None
    text_tokens: tuple[str, ...] = ()
    """Tokens of their own that decoding shows."""


FAMILIES = {
    "llama": Family(
        LLAMA,
        ("<|pad|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ("<|eot_id|>", "<|end_of_text|>"),
        "<|begin_of_text|>",
    ),
    "qwen": Family(
        QWEN,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<|im_end|>", "<|endoftext|>"),
        None,
        ("<think>", "</think>"),
    ),
    "gemma": Family(
        GEMMA,
        ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        ("<eos>", "<end_of_turn>"),
        "<bos>",
    ),
    "mistral": Family(MISTRAL, ("<pad>", "<s>", "</s>", "[INST]", "[/INST]"), ("</s>",), "<s>"),
    "reasoner": Family(
        REASONER, ("<pad>", "<begin>", "<end>", "<user>", "<assistant>"), ("<end>",), "<begin>", ("<think>", "</think>")
    ),
}


@lru_cache
def family_tokenizer(name: str, num_merges: int = 0) -> PreTrainedTokenizerFast:
    """The family's tokenizer and template; without merges every byte of a text is a token."""
    family = FAMILIES[name]
    tokens = list(family.control_tokens)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(len(tokens) + NUM_BYTES + num_merges, tokens),
        pad_token=tokens[0],
        bos_token=family.bos,
        eos_token=family.end_tokens[0],
    )
    tokenizer.add_tokens([AddedToken(token, special=False) for token in family.text_tokens])
    tokenizer.chat_template = family.template
    return tokenizer


def end_token_ids(name: str) -> list[int]:
    """`eos_token_id` as the family's config files list it."""
    return family_tokenizer(name).convert_tokens_to_ids(list(FAMILIES[name].end_tokens))
