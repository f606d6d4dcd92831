"""A mend of vLLM's CPU build, which vLLM itself loads into every one of its processes (entry point `vllm.general_plugins`).

In vLLM 0.32's CPU build `expand_batch_to_tokens` leaves its float results unwritten (vllm-project/vllm#55005): with
speculation, temperature, top-p and top-k of a sampled request are then whatever the memory held, and its answers are noise.
Greedy requests are not touched by it.
"""

import torch
from torch import Tensor


def mend_sampling() -> None:
    """Put a working `expand_batch_to_tokens` in the place of the CPU build's."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """[num_tokens] the value of each token's request, `replace_from` replaced; vLLM's contract.

    Args:
        x: [requests] values of any dtype.
        cu_num_tokens: [requests] running sum of the requests' tokens.
        num_tokens: its last entry.
        replace_from: a value that is not wanted.
        replace_to: what stands in its place.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = torch.repeat_interleave(x, counts.long(), output_size=num_tokens)
    return expanded.masked_fill(expanded == replace_from, replace_to)
