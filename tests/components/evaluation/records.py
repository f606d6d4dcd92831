"""Request records with chosen or drawn acceptance."""

import numpy as np

from components.evaluation.acceptance import RequestRecord

FAMILIES = ("code", "maths", "chat", "rewriting")


def make_record(
    key: str, accepted: int, rounds: int, *, family: str = "code", k: int = 3, error: str | None = None
) -> RequestRecord:
    return RequestRecord(
        key=key,
        family=family,
        arm="arm",
        prompt_tokens=10,
        output_tokens=rounds + accepted,
        finish_reason="length",
        rounds=rounds,
        drafted=k * rounds,
        accepted=accepted,
        accepted_at=(accepted,) + (0,) * (k - 1),
        duration_s=1.0,
        error=error,
    )


def draw_records(
    rng: np.random.Generator, acceptance: float, num_prompts: int = 40, *, spread: float = 0.05, k: int = 3
) -> list[RequestRecord]:
    """Answers whose prompts differ in how predictable they are (`spread`): accepted drafts a round around `acceptance`."""
    records = []
    for number in range(num_prompts):
        rate = np.clip(acceptance + spread * rng.standard_normal(), 0.01, 0.99)
        rounds = int(rng.integers(40, 100))
        accepted = int(rng.binomial(rounds, rate))
        records.append(make_record(f"p{number}", accepted, rounds, family=FAMILIES[number % len(FAMILIES)], k=k))
    return records
