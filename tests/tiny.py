"""Factories of tiny targets: real Llama folders that transformers and vLLM both load, made in a second.

vLLM's CPU attention takes head sizes 32, 64, 80, 96, ... only, so `head_dim` is its own setting.
Token ids of every tokenizer made here: 0 pad, 1 bos, 2 eos (ends a chat turn), 3 opens a chat turn,
4..7 control tokens that no text uses, then the 256 bytes, then merges.
"""

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = [
    "<pad>",
    "<bos>",
    "<|im_end|>",
    "<|im_start|>",
    "<unused_0>",
    "<unused_1>",
    "<unused_2>",
    "<unused_3>",
]
PAD, BOS, EOS = 0, 1, 2
FIRST_ORDINARY_ID = len(SPECIAL_TOKENS)
NUM_BYTES = 256

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{% if loop.first and m['role'] == 'assistant' %}"
    "{{ raise_exception('a conversation cannot start with the assistant') }}{% endif %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = """
A lighthouse keeper counts the ships that pass before sunrise and writes every name in a narrow green book.
The function returns the largest value of the list, or nothing when the list is empty, and never raises.
Please explain why bread rises when yeast is warm, how sugar helps, and what happens if the oven is opened.
Translate the following sentence, then summarise the paragraph in two lines and answer the question below.
def total(values): result = 0 for value in values: result += value return result print(total([1, 2, 3]))
She bought twelve apples, gave three of them to her brother, shared four with friends, and kept the rest.
Rivers carve valleys slowly; glaciers carve them faster, leaving polished stone and long lakes behind.
user assistant system message request response number letter window garden planet engine bridge winter
"""


def make_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `num_tokens` ids; its chat template rejects bad conversations."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(num_tokens, SPECIAL_TOKENS),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def byte_level_bpe(num_tokens: int, special_tokens: list[str]) -> Tokenizer:
    """At most `num_tokens` ids: the special tokens, the 256 bytes, then merges."""
    if num_tokens < len(special_tokens) + NUM_BYTES:
        raise ValueError(f"num_tokens must be at least {len(special_tokens) + NUM_BYTES}, got {num_tokens}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS.splitlines(), trainer)
    return backend


def make_tiny_llama(
    path: Path | str,
    *,
    hidden: int = 64,
    layers: int = 6,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 128,
    vocab: int = 512,
    unused_rows: int = 0,
    max_positions: int = 512,
    seed: int = 0,
    norm_weight_not_one: bool = True,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random Llama whose layers all matter and whose logits are of order 1.

    Args:
        path: Folder to write (created).
        unused_rows: Rows at the end of the vocabulary that the tokenizer never produces.
        norm_weight_not_one: Norm weights uniform in [0.5, 1.5], so that a missing or doubled norm shows.
        tie: Share the embedding with the lm_head.

    Returns:
        The folder, with config, safetensors, tokenizer and generation config.
    """
    config = _config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie,
    )
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            spread = 0.5 if norm_weight_not_one else 0.0
            value = 1 + spread * (2 * torch.rand(parameter.shape, generator=generator) - 1)
        else:
            value = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            if name.endswith("embed_tokens.weight") and not tie:
                value *= parameter.shape[-1] ** 0.5
        parameter.data.copy_(value)
    if not tie:
        # logit 0 among 500 of order 1: greedy never picks a control token, so no test ends early by chance
        model.lm_head.weight.data[:FIRST_ORDINARY_ID] = 0
    return _save(model, make_tokenizer(vocab - unused_rows), path, dtype)


SWITCH = {"brief": True}
"""A switch of the chat template that `add_switch` writes."""


def add_switch(target: Path) -> None:
    """Let the target's chat template begin with more text where `brief` is on."""
    template = target / "chat_template.jinja"
    template.write_text("{% if brief %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}" + template.read_text())


def permutation_cycle(cycle: int = 31, vocab: int = 320, seed: int = 0) -> list[int]:
    """The ids of the permutation target in generation order; ordinary tokens, not sorted."""
    return random.Random(seed).sample(range(FIRST_ORDINARY_ID, vocab), cycle)


def make_permutation_llama(
    path: Path | str,
    cycle: int = 31,
    *,
    hidden: int = 64,
    layers: int = 6,
    vocab: int = 320,
    max_positions: int = 512,
    seed: int = 0,
    logit_margin: float = 12.0,
    dtype: torch.dtype = torch.float32,
) -> list[int]:
    """Write a Llama whose greedy next token walks one cycle of prime length, exactly, by construction.

    Attention and MLP outputs are zero, so the residual stream is the embedding: one-hot in the token's place
    in the cycle (ids outside it enter at id % cycle). The lm_head row of the cycle's next id reads that place
    and beats every other logit by `logit_margin`.

    Returns:
        The cycle: ids in generation order; after ids[j] comes ids[(j + 1) % cycle].
    """
    if cycle > hidden:
        raise ValueError(f"cycle {cycle} needs hidden >= {cycle}, got {hidden}")
    ids = permutation_cycle(cycle, vocab, seed)
    config = _config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_positions,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.zero_()
        elif parameter.dim() == 1:
            parameter.data.fill_(1.0)
    place = torch.arange(vocab) % cycle
    place[torch.tensor(ids)] = torch.arange(cycle)
    model.model.embed_tokens.weight.data.copy_(torch.nn.functional.one_hot(place, hidden))
    model.lm_head.weight.data.zero_()
    successors = torch.tensor(ids[1:] + ids[:1])
    # the final norm turns a one-hot row into sqrt(hidden) at its place
    model.lm_head.weight.data[successors, torch.arange(cycle)] = logit_margin / hidden**0.5
    _save(model, make_tokenizer(vocab), path, dtype)
    return ids


def _config(**shape: Any) -> LlamaConfig:
    return LlamaConfig(
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **shape,
    )


def _save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path | str, dtype: torch.dtype) -> Path:
    path = Path(path)
    model.to(dtype).save_pretrained(path)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(path)
    return path
