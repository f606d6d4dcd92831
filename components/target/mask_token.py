"""The id that stands for "not known yet" in a chain: one that no text uses."""

from collections.abc import Iterable, Set

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from components.section import ConfigError

SETTING = "draft.mask_token_id"


def choose_mask_token(
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    used_ids: Set[int] | None = None,
    explicit: int | None = None,
    end_token_ids: Iterable[int] = (),
) -> int:
    """Pick the mask token: the first unused row of the vocabulary, else the last unused control token.

    Args:
        tokenizer: The target's.
        config: The target's; its `vocab_size` may exceed the tokenizer's.
        used_ids: Ids that occur in the corpus, when it is known.
        explicit: The user's choice; it is checked and kept.
        end_token_ids: Ids that end an answer; generation_config.json may name more than `config` does.

    Raises:
        ConfigError: at `draft.mask_token_id`: an explicit id that is out of range or in use, or no id is free.
    """
    used = frozenset(used_ids or ())
    reserved = _reserved_ids(tokenizer, config) | set(end_token_ids)
    if explicit is not None:
        _check_explicit(explicit, config.vocab_size, reserved, used)
        return explicit
    known = set(tokenizer.get_vocab().values())
    unused_rows = (i for i in range(config.vocab_size) if i not in known and i not in used and i not in reserved)
    row = next(unused_rows, None)
    if row is not None:
        return row
    controls = [i for i in _control_ids(tokenizer) if i < config.vocab_size and i not in used and i not in reserved]
    if not controls:
        fix = "set it to the id of a rare token; text that holds it costs acceptance only"
        raise ConfigError(SETTING, "the vocabulary has neither an unused row nor an unused control token", fix)
    return max(controls)


def _check_explicit(token_id: int, vocab_size: int, reserved: set[int], used: frozenset[int]) -> None:
    fix = "choose an id that no text uses, or leave it out"
    if not 0 <= token_id < vocab_size:
        raise ConfigError(SETTING, f"{token_id} is outside the target's vocabulary of {vocab_size}", fix)
    if token_id in reserved:
        raise ConfigError(SETTING, f"{token_id} is the target's pad, bos, eos or unknown token", fix)
    if token_id in used:
        raise ConfigError(SETTING, f"{token_id} occurs in the training text", fix)


def _reserved_ids(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> set[int]:
    ids: set[int] = set()
    for holder in (tokenizer, config):
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id"):
            value = getattr(holder, name, None)
            ids.update(value if isinstance(value, list) else [value] if value is not None else [])
    return ids


def _control_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Special tokens that the chat template never writes."""
    templates = str(tokenizer.chat_template or "")
    decoder = tokenizer.added_tokens_decoder
    return [i for i, token in decoder.items() if token.special and token.content not in templates]
