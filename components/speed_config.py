"""What the speed pass measures, as a run's settings say it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from components.section import Count, Section


class SpeedConfig(Section):
    concurrencies: list[Count] = []
    """Requests at once, each measured for itself; empty leaves the whole pass out."""
    num_speculative_tokens: Annotated[list[Count], Field(min_length=1)] = [1, 2, 3]
    """K: every arm that speculates is served with each of them, and with its own."""
    request_rate: Annotated[float, Field(gt=0.0)] | None = None
    """Requests a second of one more point at the largest concurrency, beside those without a limit; null leaves it out."""
    repetitions: Count = 2
    """Times that every arm is started and measured, in turn with the others: what a busy moment does to one is seen."""
    num_prompts: Count | None = 32
    """Prompts of each task, or null for all; a point with more requests at once asks some of them again."""
    output_tokens: Count = 128
    """Tokens of every answer; end tokens are ignored."""
    prompts: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")], str] = {}
    """Tasks, by name: files or folders as in `data.prompts`, asked at their first turn. Empty: the held-out prompts, as `code_editing` and
    `chat` (all other held-out families)."""
    dynamic: bool = True
    """Also measure vLLM's dynamic K for the arms that can have it, with each load's best K."""
    max_num_seqs: Count | None = None
    """Most requests that a server runs at once; null: the largest concurrency."""
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of the cached keys and values; auto: the target's."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sent with every request; the temperature is 0."""
    seed: int = 0
    """Of the servers and of the order in which requests arrive."""
    start_timeout_s: Annotated[float, Field(gt=0.0)] = 1800.0
    """A server that does not answer after this long has failed."""

    @model_validator(mode="after")
    def _check(self) -> "SpeedConfig":
        for name in ("concurrencies", "num_speculative_tokens"):
            values = getattr(self, name)
            if values != sorted(set(values)):
                raise ValueError(f"{name} {values} is not in rising order: sort it, and name each value once")
        if self.max_num_seqs is not None and self.concurrencies and self.max_num_seqs < self.concurrencies[-1]:
            raise ValueError(
                f"max_num_seqs {self.max_num_seqs} is below the largest concurrency {self.concurrencies[-1]}: raise it"
            )
        return self

    @property
    def is_left_out(self) -> bool:
        return not self.concurrencies
