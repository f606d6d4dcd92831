"""What is written of one measured arm, and the figures made of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from components.evaluation.acceptance import Acceptance, RequestRecord, by_family, total
from components.evaluation.arms import Arm
from components.storage import Location


@dataclass(frozen=True)
class Answer:
    """One greedy answer to a held-out prompt, ended by the target itself or by its length."""

    record: RequestRecord
    output_ids: tuple[int, ...]
    target_steps: int
    """Steps of the target after the one that ended the prefill (in every arm that one gives the first token)."""
    rivals: tuple[dict[int, float], ...] = ()
    """On the plain arm, at each position: other likely tokens -> by how much their logit is lower."""

    @property
    def accepted_past_end(self) -> int:
        """Drafts accepted beyond the answer's last token.

        Prefill and steps gave 1 + target_steps + accepted tokens. Those that the answer does not hold were cut off; the first of
        them is the target's own token, which follows the accepted drafts, the others are drafts.
        """
        return max(0, self.target_steps + self.record.accepted - self.record.output_tokens)


@dataclass(frozen=True)
class Speed:
    """One answer of fixed length, alone on the engine."""

    key: str
    tokens: int
    duration_s: float
    """From submission to the last token, the prefill included."""
    first_token_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s


@dataclass(frozen=True)
class ArmResult:
    arm: Arm
    platform: dict[str, str]
    answers: tuple[Answer, ...]
    speeds: tuple[Speed, ...]
    engine_start_s: float
    answers_s: float
    """Wall time of the whole answers pass."""
    engine_counters: Acceptance | None = None
    """The engine's own counters over the answers pass; None where nothing speculates."""
    problems: tuple[str, ...] = field(default=())
    """Why the arm's figures must not be used; empty for a valid arm."""

    @property
    def acceptance_length_within(self) -> float | None:
        """AL without the drafts that vLLM accepted past an answer's end: what a walk along the recorded answer gives."""
        good = [answer for answer in self.answers if answer.record.error is None]
        rounds = sum(answer.record.rounds for answer in good)
        return 1 + sum(a.record.accepted - a.accepted_past_end for a in good) / rounds if rounds else None

    @property
    def records(self) -> list[RequestRecord]:
        return [answer.record for answer in self.answers]

    @property
    def num_errors(self) -> int:
        return sum(record.error is not None for record in self.records)

    @property
    def tokens_per_s(self) -> dict[str, float]:
        return {speed.key: speed.tokens_per_s for speed in self.speeds}


_RESULT = TypeAdapter(ArmResult)


def save_result(result: ArmResult, location: Location) -> None:
    location.write_bytes(_RESULT.dump_json(result))


def load_result(location: Location) -> ArmResult:
    return _RESULT.validate_json(location.read_bytes())


def find_problems(answers: tuple[Answer, ...], engine_counters: Acceptance | None) -> tuple[str, ...]:
    """Why these answers cannot be trusted: empty or failed ones, or counters that contradict each other."""
    records = [answer.record for answer in answers]
    errors = sorted({record.error for record in records if record.error is not None})
    problems = [f"{sum(r.error == e for r in records)} of {len(records)} answers: {e}" for e in errors]
    if not records:
        problems.append("no answers")
    if engine_counters is not None and (sums := _sums(records)) != engine_counters:
        problems.append(f"the requests' counters sum to {sums}, the engine counted {engine_counters}")
    return tuple(problems)


def figures(result: ArmResult) -> dict[str, Any]:
    """The arm's figures (JSON); a share without a denominator is None.

    `al` is 1 + accepted drafts / rounds with a proposal, `tokens_per_step` is output tokens after each answer's
    first / target steps, `coverage` is rounds with a proposal / target steps.
    """
    sums = total(result.records)
    good = [answer for answer in result.answers if answer.record.error is None]
    steps = sum(answer.target_steps for answer in good)
    tokens = sum(answer.record.output_tokens - 1 for answer in good)
    return {
        "method": result.arm.method,
        "synthetic": result.arm.is_synthetic,
        "num_speculative_tokens": result.arm.num_speculative_tokens,
        "requests": len(result.answers),
        "errors": result.num_errors,
        "problems": list(result.problems),
        "output_tokens": sum(answer.record.output_tokens for answer in good),
        "target_steps": steps,
        "rounds": sums.rounds,
        "drafted": sums.drafted,
        "accepted": sums.accepted,
        "al": sums.acceptance_length,
        "acceptance_rate": sums.acceptance_rate,
        "accepted_at": list(sums.rate_at),
        "tokens_per_step": tokens / steps if steps else None,
        "coverage": sums.rounds / steps if steps and result.arm.speculates else None,
        "tokens_per_s_c1": median(result.tokens_per_s.values()) if result.speeds else None,
        "first_token_s": median(speed.first_token_s for speed in result.speeds) if result.speeds else None,
        "family_al": {family: part.acceptance_length for family, part in by_family(result.records).items()},
        "engine_start_s": round(result.engine_start_s, 1),
        "platform": result.platform,
    }


def _sums(records: list[RequestRecord]) -> Acceptance:
    """Over all requests, failed ones too: the engine counted those as well."""
    return total([RequestRecord(**(asdict(record) | {"error": None})) for record in records])


def as_json(value: Any) -> Any:
    """A dataclass (or None) as plain JSON values."""
    return None if value is None else TypeAdapter(type(value)).dump_python(value, mode="json")


def median_or_none(values: Mapping[str, float]) -> float | None:
    return median(values.values()) if values else None
