"""The gate as a table of situations: what must be promoted, and everything that must not."""

from dataclasses import replace

import numpy as np
import pytest

from components.config import GateConfig
from components.evaluation.acceptance import RequestRecord
from components.evaluation.gate import Measured, UnderLoad, Verdict, decide
from components.evaluation.statistics import Interval
from tests.components.evaluation.records import FAMILIES, draw_records, make_record

POLICY = GateConfig(bootstrap_samples=500)
PLATFORM = {"vllm": "0.32.0", "torch": "2.13.0", "device": "cpu", "target": "abc"}


def steady(accepted: int, rounds: int = 100, *, k: int = 3, num_prompts: int = 40) -> list[RequestRecord]:
    """Answers that all accept the same, but for one draft more on every other prompt."""
    return [
        make_record(f"p{i}", accepted + i % 2, rounds, family=FAMILIES[i % len(FAMILIES)], k=k)
        for i in range(num_prompts)
    ]


def speeds(tokens_per_s: float, num_prompts: int = 6) -> dict[str, float]:
    return {f"p{i}": tokens_per_s * (1 + 0.002 * i) for i in range(num_prompts)}


def measured(name: str, records: list[RequestRecord], *, k: int = 3, rate: float = 20.0) -> Measured:
    return Measured(name, PLATFORM, k, f"digest of {name}", {k: records}, speeds(rate), num_errors=0, num_faults=0)


NONE_ARM = Measured("none", PLATFORM, tokens_per_s=speeds(15.0), num_errors=0)
CHAMPION = measured("champion", steady(30))
BETTER = measured("candidate", steady(40))


def failed(verdict: Verdict) -> list[str]:
    return [reason.check for reason in verdict.failures]


def test_a_better_head_is_promoted_with_every_check_listed() -> None:
    verdict = decide(BETTER, CHAMPION, NONE_ARM, POLICY)

    assert verdict.promote
    assert {f"family {name}" for name in FAMILIES} < {reason.check for reason in verdict.reasons}
    assert "1.305 -> 1.405" in next(r.measured for r in verdict.reasons if r.check == "acceptance length at K=3")


def test_the_very_same_head_is_refused_as_such() -> None:
    twin = replace(CHAMPION, name="candidate")

    verdict = decide(twin, CHAMPION, NONE_ARM, POLICY)

    assert "another head" in failed(verdict)
    assert any(reason.measured == "same head" for reason in verdict.failures)


def test_equal_heads_are_hardly_ever_promoted_by_the_luck_of_the_prompts() -> None:
    rng = np.random.default_rng(0)
    promoted = sum(
        decide(
            measured("candidate", draw_records(rng, 0.3, spread=0.1)),
            measured("champion", draw_records(rng, 0.3, spread=0.1)),
            NONE_ARM,
            GateConfig(bootstrap_samples=300, seed=seed),
        ).promote
        for seed in range(200)
    )
    assert promoted <= 10  # one tail of a 95% interval is 2.5%


def test_the_best_of_several_equal_heads_is_hardly_ever_promoted_either() -> None:
    """Chosen by the same prompts that judge it, without the correction it passed 17 of 150 times."""
    rng = np.random.default_rng(1)
    promoted = {1: 0, 8: 0}
    for seed in range(150):
        champion = measured("champion", draw_records(rng, 0.3, spread=0.1))
        heads = [measured("candidate", draw_records(rng, 0.3, spread=0.1)) for _ in range(8)]
        best = max(
            heads, key=lambda head: sum(r.accepted for r in head.records[3]) / sum(r.rounds for r in head.records[3])
        )
        policy = GateConfig(min_effect=0.0, task_margin=0.9, bootstrap_samples=600, seed=seed)
        for assumed in promoted:
            promoted[assumed] += decide(best, champion, NONE_ARM, policy, num_candidates=assumed).promote
    assert promoted[8] <= 8 < promoted[1]


def test_several_candidates_widen_the_interval_of_the_gain_and_not_of_the_harm() -> None:
    records = [replace(r, accepted=5) if r.family == "maths" else replace(r, accepted=60) for r in steady(30)]
    verdict = decide(measured("candidate", records), CHAMPION, NONE_ARM, POLICY, num_candidates=5)

    said = {reason.check: reason.measured for reason in verdict.reasons}
    assert "(99%)" in said["acceptance length at K=3"]
    assert "(95%)" in said["family maths"]
    assert failed(verdict) == ["family maths"]


def test_a_head_with_noise_is_refused() -> None:
    verdict = decide(measured("candidate", steady(12)), CHAMPION, NONE_ARM, POLICY)

    assert {"acceptance length at K=3", "family code"} <= set(failed(verdict))


def test_a_gain_below_the_minimum_effect_is_refused_however_certain() -> None:
    verdict = decide(measured("candidate", steady(32)), CHAMPION, NONE_ARM, POLICY)  # +1.5%

    assert failed(verdict) == ["acceptance length at K=3"]


def test_a_gain_that_a_few_prompts_make_is_refused() -> None:
    records = [make_record(f"p{i}", 75 if i < 3 else 29, 100, family=FAMILIES[i % 4]) for i in range(40)]

    verdict = decide(measured("candidate", records), CHAMPION, NONE_ARM, POLICY)

    assert failed(verdict) == ["acceptance length at K=3"]


def test_a_larger_k_alone_is_no_improvement() -> None:
    larger = replace(
        measured("candidate", steady(55, k=7), k=7, rate=25.0), records={7: steady(55, k=7), 3: steady(30)}
    )

    verdict = decide(larger, CHAMPION, NONE_ARM, POLICY)

    assert failed(verdict) == ["acceptance length at K=3"]


def test_the_champions_own_weights_at_a_larger_k_are_refused() -> None:
    larger = replace(measured("candidate", steady(55, k=7), k=7, rate=25.0), head_digest=CHAMPION.head_digest)

    assert "another head" in failed(decide(larger, CHAMPION, NONE_ARM, POLICY))


def test_a_better_head_with_another_k_is_compared_at_the_champions() -> None:
    wider = replace(measured("candidate", steady(80, k=5), k=5), records={5: steady(80, k=5), 3: steady(40)})

    assert decide(wider, CHAMPION, NONE_ARM, POLICY).promote


def test_a_candidate_that_was_not_measured_at_the_champions_k_is_refused() -> None:
    verdict = decide(measured("candidate", steady(80, k=5), k=5), CHAMPION, NONE_ARM, POLICY)

    assert {"acceptance length at K=3", "same prompts"} <= set(failed(verdict))


def test_harm_in_one_family_is_refused() -> None:
    records = [replace(r, accepted=5) if r.family == "maths" else replace(r, accepted=60) for r in steady(30)]

    assert failed(decide(measured("candidate", records), CHAMPION, NONE_ARM, POLICY)) == ["family maths"]


def test_too_few_prompts_of_a_family_are_no_proof_of_harm() -> None:
    records = [*steady(40), make_record("rare", 10, 100, family="rare")]
    champion = measured("champion", [*steady(30), make_record("rare", 30, 100, family="rare")])

    assert decide(measured("candidate", records), champion, NONE_ARM, POLICY).promote


def test_a_slower_arm_is_refused_at_the_k_it_is_served_with() -> None:
    slower = replace(BETTER, tokens_per_s=speeds(19.0))  # 5% below the champion's 20
    within = replace(BETTER, tokens_per_s=speeds(19.8))

    assert failed(decide(slower, CHAMPION, NONE_ARM, POLICY)) == ["speed as served (K=3 against K=3)"]
    assert decide(within, CHAMPION, NONE_ARM, POLICY).promote


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_a_speed_that_is_no_number_is_refused(bad: float) -> None:
    broken = replace(BETTER, tokens_per_s=speeds(20.0) | {"p2": bad})

    assert not decide(broken, CHAMPION, NONE_ARM, POLICY).promote
    assert not decide(broken, None, NONE_ARM, POLICY).promote


def test_acceptance_without_a_number_is_refused() -> None:
    rows = [replace(r, accepted=float("nan")) for r in steady(40)]  # type: ignore[arg-type]
    silent = [replace(r, accepted=0, rounds=0) for r in steady(40)]

    for records in (rows, silent, []):
        verdict = decide(measured("candidate", records), CHAMPION, NONE_ARM, POLICY)
        assert "acceptance length at K=3" in failed(verdict)


def test_what_was_not_measured_passes_nothing() -> None:
    empty = Measured("candidate", PLATFORM)

    for champion in (None, CHAMPION):
        verdict = decide(empty, champion, NONE_ARM, POLICY)
        assert {"no errors", "lossless"} <= set(failed(verdict))


def test_a_prompt_that_the_candidate_did_not_answer_is_not_passed_over() -> None:
    records = [replace(steady(40)[0], error="empty answer"), *steady(40)[2:]]

    verdict = decide(replace(BETTER, records={3: records}, num_errors=1), CHAMPION, NONE_ARM, POLICY)

    assert failed(verdict) == ["no errors", "same prompts"]


@pytest.mark.parametrize(
    ("change", "check"), [({"num_faults": 1}, "lossless"), ({"num_errors": 1}, "no errors")], ids=["fault", "error"]
)
def test_a_changed_answer_or_an_error_is_refused(change: dict[str, int], check: str) -> None:
    assert failed(decide(replace(BETTER, **change), CHAMPION, NONE_ARM, POLICY)) == [check]
    assert failed(decide(replace(BETTER, **change), None, NONE_ARM, POLICY)) == [check]


@pytest.mark.parametrize("arm", ["candidate", "champion", "none"])
def test_what_a_load_test_measured_is_refused(arm: str) -> None:
    candidate, champion, none_arm = (
        replace(measured, is_synthetic=measured.name == arm) for measured in (BETTER, CHAMPION, NONE_ARM)
    )

    verdict = decide(candidate, champion, none_arm, POLICY)

    assert failed(verdict) == ["real acceptance"]
    assert verdict.failures[0].measured == f"synthetic: {arm}"


@pytest.mark.parametrize("name", sorted(PLATFORM))
def test_figures_of_another_platform_are_not_compared(name: str) -> None:
    elsewhere = replace(CHAMPION, platform=PLATFORM | {name: "other"})

    verdict = decide(BETTER, elsewhere, NONE_ARM, POLICY)

    assert failed(verdict) == ["same platform"]
    assert "champion other" in verdict.failures[0].measured


def test_the_first_champion_must_be_faster_than_plain_decoding_beyond_doubt() -> None:
    assert decide(BETTER, None, NONE_ARM, POLICY).promote
    for rate in (14.0, 15.0):
        verdict = decide(replace(BETTER, tokens_per_s=speeds(rate)), None, NONE_ARM, POLICY)
        assert failed(verdict) == ["faster than plain decoding"]


def test_the_first_champion_needs_more_than_a_lucky_median() -> None:
    mixed = {"p0": 10.0, "p1": 11.0, "p2": 15.8, "p3": 16.0, "p4": 17.0, "p5": 18.0}

    assert failed(decide(replace(BETTER, tokens_per_s=mixed), None, NONE_ARM, POLICY)) == ["faster than plain decoding"]


@pytest.mark.parametrize("champion", [CHAMPION, None])
def test_every_load_that_was_measured_must_be_no_slower(champion: Measured | None) -> None:
    def load(concurrency: int, ratio: float | None) -> UnderLoad:
        return UnderLoad(concurrency, "baseline", None if ratio is None else Interval(ratio, ratio - 0.1, ratio + 0.1))

    good = [load(1, 1.2), load(8, 1 - POLICY.speed_margin)]
    bad = [load(16, 0.97), load(32, None), load(64, float("nan"))]

    passed = decide(BETTER, champion, NONE_ARM, POLICY, loads=good)
    refused = decide(BETTER, champion, NONE_ARM, POLICY, loads=[*good, *bad])

    assert passed.promote, passed.failures
    assert [r.check for r in passed.reasons][-2:] == ["speed at c=1 against baseline", "speed at c=8 against baseline"]
    assert failed(refused) == [f"speed at c={c} against baseline" for c in (16, 32, 64)]
