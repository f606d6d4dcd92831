"""Which of the target's layers a head reads, and what their states take on disk."""

from collections.abc import Sequence

from components.section import ConfigError

NUM_AUX_LAYERS = 3
BF16_BYTES = 2
ID_AND_MASK_BYTES = 5


def choose_aux_layers(configured: Sequence[int] | None, num_layers: int) -> list[int]:
    """The layers of `draft.aux_layers`, or the usual three.

    Raises:
        ConfigError: layers that a target of `num_layers` does not have.
    """
    return default_aux_layers(num_layers) if configured is None else validate_aux_layers(configured, num_layers)


def default_aux_layers(num_layers: int) -> list[int]:
    """`[2, L//2, L-3]`; in a shallow target what falls away or coincides is made up from the deepest layers.

    Source: vLLM, `get_eagle3_default_aux_hidden_state_layers` of its models.
    """
    chosen = {i for i in (2, num_layers // 2, num_layers - 3) if 0 < i < num_layers}
    for layer in reversed(range(num_layers)):
        if len(chosen) >= NUM_AUX_LAYERS:
            break
        chosen.add(layer)
    return sorted(chosen)


def validate_aux_layers(aux_layers: Sequence[int], num_layers: int) -> list[int]:
    """The layers as a list when they are usable.

    vLLM concatenates aux states in the order of the layers, whatever the order of the list: so it must ascend.

    Raises:
        ConfigError: at `draft.aux_layers`: empty, out of range, repeated or not ascending.
    """
    layers = list(aux_layers)
    fix = f"give ascending layers from 0 to {num_layers - 1}, such as {default_aux_layers(num_layers)}"
    if not layers:
        raise ConfigError("draft.aux_layers", "no layer is named", fix)
    outside = [i for i in layers if not 0 <= i < num_layers]
    if outside:
        raise ConfigError("draft.aux_layers", f"{outside} are not layers of a target with {num_layers}", fix)
    if layers != sorted(set(layers)):
        raise ConfigError("draft.aux_layers", f"{layers} repeats a layer or does not ascend", fix)
    return layers


def bytes_per_token(num_aux_layers: int, hidden_size: int) -> int:
    """(A + 1) * H bf16 values, and the id with its mask."""
    return (num_aux_layers + 1) * hidden_size * BF16_BYTES + ID_AND_MASK_BYTES
