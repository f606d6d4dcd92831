"""What is written of one measured arm, and the figures made of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from components.evaluation.acceptance import Acceptance, RequestRecord, by_family, total
from components.evaluation.arms import Arm
from components.evaluation.looping import is_looped
from components.storage import Location


@dataclass(frozen=True)
class Answer:
    """One answer, ended by the target itself or by its length."""

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

    @property
    def is_looped(self) -> bool:
        """Whether it repeated itself until it was cut off (`looping`)."""
        return is_looped(self.output_ids, self.record.finish_reason)


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
    """One arm's answers to one set of prompts; of the held-out prompts with the times of the speed pass."""

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
    kv_capacity_tokens: int | None = None
    """Tokens whose keys and values the engine has room for; None where it does not say."""
    preemptions: int | None = None
    """Requests that were put back for want of that room, over the answers pass."""
    speeds_again: tuple[Speed, ...] = ()
    """On the same prompts once more after the last arm; empty on arms that the gate does not compare."""

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
    def timed(self) -> tuple[Speed, ...]:
        """The speed pass that counts. Of two the faster one, for what else a machine does only ever takes time from an arm."""
        return max(self.speeds, self.speeds_again, key=_median_tokens_per_s)

    @property
    def tokens_per_s(self) -> dict[str, float]:
        return tokens_per_s(self.timed)


def tokens_per_s(speeds: Sequence[Speed]) -> dict[str, float]:
    """By the prompt's key."""
    return {speed.key: speed.tokens_per_s for speed in speeds}


def _median_tokens_per_s(speeds: Sequence[Speed]) -> float:
    return median(tokens_per_s(speeds).values()) if speeds else 0.0


@dataclass(frozen=True)
class TimedAgain:
    """An arm's second speed pass."""

    speeds: tuple[Speed, ...]
    problems: tuple[str, ...] = ()


_RESULT = TypeAdapter(ArmResult)
_TIMED_AGAIN = TypeAdapter(TimedAgain)


def save_result(result: ArmResult, location: Location) -> None:
    location.write_bytes(_RESULT.dump_json(result))


def load_result(location: Location) -> ArmResult:
    return _RESULT.validate_json(location.read_bytes())


def save_timed_again(again: TimedAgain, location: Location) -> None:
    location.write_bytes(_TIMED_AGAIN.dump_json(again))


def add_timed_again(result: ArmResult, location: Location) -> ArmResult:
    """The arm with the second pass that is written there; as it is where there is none."""
    if not location.exists():
        return result
    again = _TIMED_AGAIN.validate_json(location.read_bytes())
    return replace(result, speeds_again=again.speeds, problems=(*result.problems, *again.problems))


def find_problems(
    answers: Sequence[Answer],
    engine_counters: Acceptance | None,
    speeds: Sequence[Speed] = (),
    speed_tokens: int = 0,
) -> tuple[str, ...]:
    """Why these figures cannot be trusted: empty or failed answers, or counters that contradict each other.

    Args:
        answers: Of the answers pass.
        engine_counters: The engine's own over that pass: they must be the very sums of the answers' counters.
        speeds: Of the speed pass; one that is shorter than `speed_tokens` failed, and is no slow answer.
        speed_tokens: What each of them had to give.
    """
    records = [answer.record for answer in answers]
    errors = sorted({record.error for record in records if record.error is not None})
    problems = [f"{sum(r.error == e for r in records)} of {len(records)} answers: {e}" for e in errors]
    if not records:
        problems.append("no answers")
    problems += cut_short(speeds, speed_tokens)
    if engine_counters is not None and (sums := _sums(records)) != engine_counters:
        problems.append(f"the requests' counters sum to {sums}, the engine counted {engine_counters}")
    return tuple(problems)


def cut_short(speeds: Sequence[Speed], speed_tokens: int) -> list[str]:
    """What is wrong with timed answers that had to give `speed_tokens` tokens; empty: nothing."""
    cut = sum(speed.tokens != speed_tokens for speed in speeds)
    return [f"{cut} of {len(speeds)} timed answers: not {speed_tokens} tokens"] if cut else []


def figures(result: ArmResult) -> dict[str, Any]:
    """The arm's figures (JSON); a share without a denominator is None.

    `al` is 1 + accepted drafts / rounds with a proposal, `tokens_per_step` is output tokens after each answer's
    first / target steps, `coverage` is rounds with a proposal / target steps.
    """
    sums = total(result.records)
    good = [answer for answer in result.answers if answer.record.error is None]
    steps = sum(answer.target_steps for answer in good)
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
        "tokens_per_step": tokens_per_step(good),
        "coverage": sums.rounds / steps if steps and result.arm.speculates else None,
        "tokens_per_s_c1": _median_tokens_per_s(result.timed) if result.timed else None,
        "first_token_s": median(speed.first_token_s for speed in result.timed) if result.timed else None,
        "looped": share_looped(good),
        "kv_capacity_tokens": result.kv_capacity_tokens,
        "preemptions": result.preemptions,
        "family_al": {family: part.acceptance_length for family, part in by_family(result.records).items()},
        "engine_start_s": round(result.engine_start_s, 1),
        "platform": result.platform,
    }


def tokens_per_step(answers: Sequence[Answer]) -> float | None:
    """Output tokens after each answer's first / steps of the target; None without a step."""
    steps = sum(answer.target_steps for answer in answers)
    return sum(answer.record.output_tokens - 1 for answer in answers) / steps if steps else None


def share_looped(answers: Sequence[Answer]) -> float | None:
    """Share of the answers that ended in a loop; None without answers."""
    return sum(answer.is_looped for answer in answers) / len(answers) if answers else None


def _sums(records: list[RequestRecord]) -> Acceptance:
    """Over all requests, failed ones too: the engine counted those as well."""
    return total([RequestRecord(**(asdict(record) | {"error": None})) for record in records])


def as_json(value: Any) -> Any:
    """A dataclass (or None) as plain JSON values."""
    return None if value is None else TypeAdapter(type(value)).dump_python(value, mode="json")
