"""What a vLLM server counts of itself: `/metrics`, read whole, and differences of two readings."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import zip_longest

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

NAMES = {
    "vllm:request_success_total": "requests",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:spec_decode_num_drafts_total": "rounds",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
CACHE = "vllm:cache_config_info"


class CountersReset(Exception):
    """A counter went back: the server, or what stands behind its address, is not the one of the first reading."""


@dataclass(frozen=True)
class Counters:
    """Since the server's start, summed over its engines."""

    requests: int = 0
    """Finished, whatever the reason."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    rounds: int = 0
    """Verification rounds that had a proposal."""
    drafted: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()
    """accepted_at[i]: rounds that accepted at least i + 1 draft tokens; length K, empty where nothing speculates."""

    def __sub__(self, earlier: "Counters") -> "Counters":
        """Raises CountersReset where a counter is lower than before."""
        names = [f.name for f in fields(self) if f.name != "accepted_at"]
        values = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        accepted_at = tuple(a - b for a, b in zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0))
        lower = [name for name, value in values.items() if value < 0]
        if lower or min(accepted_at, default=0) < 0:
            raise CountersReset(f"the server's counters went back: {', '.join(lower or ['accepted_at'])}")
        return Counters(**values, accepted_at=accepted_at)


def parse_counters(metrics: str) -> Counters:
    """The counters in the text of `/metrics`."""
    sums, accepted_at = dict.fromkeys(NAMES.values(), 0), Counter[int]()
    for sample in _samples(metrics):
        if sample.name in NAMES:
            sums[NAMES[sample.name]] += int(sample.value)
        elif sample.name == ACCEPTED_AT:
            accepted_at[int(sample.labels["position"])] += int(sample.value)
    return Counters(**sums, accepted_at=tuple(accepted_at[i] for i in sorted(accepted_at)))


def kv_capacity_tokens(metrics: str) -> int | None:
    """Tokens that the KV cache holds, over all engines; None where the server does not say."""
    capacities = [_capacity(sample) for sample in _samples(metrics) if sample.name == CACHE]
    known = [capacity for capacity in capacities if capacity]
    return sum(known) if known else None


def _capacity(sample: Sample) -> int:
    """vLLM's own figure, which knows of layers that share or bound their cache; else blocks times their size."""
    labels = sample.labels
    if labels.get("kv_cache_size_tokens", "").isdecimal():
        return int(labels["kv_cache_size_tokens"])
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(blocks) * int(size) if blocks.isdecimal() and size.isdecimal() else 0


def _samples(metrics: str) -> Iterator[Sample]:
    for family in text_string_to_metric_families(metrics):
        yield from family.samples
