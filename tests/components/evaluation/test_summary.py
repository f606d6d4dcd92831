"""From arms' files to facts and verdict, with a champion that is served with another K."""

from dataclasses import replace
from pathlib import Path

import pytest

from components.config import GateConfig
from components.evaluation.acceptance import RequestRecord
from components.evaluation.arms import Arm, head_arm
from components.evaluation.results import Answer, ArmResult, Speed, TimedAgain, save_result, save_timed_again
from components.evaluation.summary import (
    HeadIdentity,
    choose,
    chosen_place,
    evaluation_verdict,
    needed_arms,
    summarise,
)
from components.stage import Artifact
from components.storage import Location
from tests.components.evaluation.records import FAMILIES, make_record

NONE = Arm("none", "none")
CANDIDATE = HeadIdentity("new", 7, Path("/heads/new"))
CHAMPION = HeadIdentity("old", 3, Path("/heads/old"))
WALKED = {"head": {"3": {"al": 1.4}, "7": {"al": 1.41}}, "bigram": {"3": {"al": 1.1}, "7": {"al": 1.12}}}
NUM_PROMPTS = 12


def result(arm: Arm, accepted: int, rate: float | None = 20.0, token: int = 7) -> ArmResult:
    """100 rounds a prompt; the last token of each answer is `token`."""
    records = [
        make_record(f"p{i}", accepted, 100, family=FAMILIES[i % 4], k=arm.num_speculative_tokens or 1)
        for i in range(NUM_PROMPTS)
    ]
    return ArmResult(
        arm=arm,
        platform={"vllm": "0.32.0", "dtype": "bfloat16"},
        answers=tuple(answer(record, token, arm) for record in records),
        speeds=() if rate is None else tuple(Speed(f"p{i}", 64, 64 / rate, 0.1) for i in range(6)),
        engine_start_s=10.0,
        answers_s=5.0,
    )


def answer(record: RequestRecord, token: int, arm: Arm) -> Answer:
    rivals = () if arm.speculates else ({3: 2.0}, {8: 0.125, 9: 4.0})
    return Answer(record, (5, token), 100, rivals)


def results(at_champions_k: int, token: int = 7) -> dict[str, ArmResult]:
    arms = [
        result(NONE, 0, 15.0),
        result(head_arm("candidate", "/heads/new", 7), 60, token=token),
        result(head_arm("champion", "/heads/old", 3), 30),
        result(head_arm("candidate_at_k3", "/heads/new", 3), at_champions_k, None),
    ]
    return {r.arm.name: r for r in arms}


def evaluate(
    folder: Path, measured: dict[str, ArmResult], champion: HeadIdentity | None = CHAMPION
) -> tuple[dict, Artifact, dict]:
    location = Location(str(folder))
    for name, arm_result in measured.items():
        save_result(replace(arm_result, speeds_again=()), location.join("arms", f"{name}.json"))
        if arm_result.speeds_again:
            save_timed_again(TimedAgain(arm_result.speeds_again), location.join("again", f"{name}.json"))
    facts, differences = summarise(measured, WALKED, CANDIDATE, champion)
    return facts, Artifact("evaluation", location, "f", {"facts": facts, "digest": "d"}), differences


def test_a_champion_with_another_k_adds_an_arm_without_a_speed_pass() -> None:
    arms = needed_arms([NONE], CANDIDATE, CHAMPION)

    assert [(arm.name, arm.num_speculative_tokens, speed) for arm, speed in arms] == [
        ("none", None, True),
        ("candidate", 7, True),
        ("champion", 3, True),
        ("candidate_at_k3", 3, False),
    ]
    assert len(needed_arms([NONE], CANDIDATE, HeadIdentity("old", 7, Path("/heads/old")))) == 3
    assert len(needed_arms([NONE], CANDIDATE, None)) == 2


def test_the_candidate_with_the_best_al_at_the_champions_k_is_chosen_and_judged_as_one_of_two(tmp_path: Path) -> None:
    second = HeadIdentity("second", 7, Path("/heads/second"), "candidate_2", "candidates/2")
    measured = results(at_champions_k=32) | {
        "candidate_2": result(head_arm("candidate_2", "/heads/second", 7), 50),
        "candidate_2_at_k3": result(head_arm("candidate_2_at_k3", "/heads/second", 3), 40, None),
    }
    assert set(measured) == {arm.name for arm, _ in needed_arms([NONE], CANDIDATE, CHAMPION, second)}

    assert choose(measured, [CANDIDATE, second], None) == CANDIDATE  # at its own K the first one is better
    chosen = choose(measured, [CANDIDATE, second], CHAMPION)
    assert chosen == second
    invalid = measured | {"candidate_2_at_k3": replace(measured["candidate_2_at_k3"], problems=("no answers",))}
    assert choose(invalid, [CANDIDATE, second], CHAMPION) == CANDIDATE  # whatever its AL
    for name, arm_result in measured.items():
        save_result(arm_result, Location(str(tmp_path)).join("arms", f"{name}.json"))
    facts, _ = summarise(measured, WALKED, chosen, CHAMPION, 2)

    assert facts["candidate"]["arm"] == "candidate_2"
    assert facts["against_champion"]["al"]["acceptance_length"] == pytest.approx(1.4)
    artifact = Artifact("evaluation", Location(str(tmp_path)), "f", {"facts": facts, "digest": "d"})
    assert chosen_place(artifact) == "candidates/2"
    verdict = evaluation_verdict(artifact, GateConfig())
    assert verdict.promote, verdict.failures
    assert "(97.5%)" in next(r.measured for r in verdict.reasons if r.check == "acceptance length at K=3")


def test_acceptance_is_compared_at_the_champions_k_and_speed_as_served(tmp_path: Path) -> None:
    facts, artifact, _ = evaluate(tmp_path, results(at_champions_k=40))

    against = facts["against_champion"]
    assert against["num_speculative_tokens"] == 3
    assert against["al"]["acceptance_length"] == pytest.approx(1.4)
    assert against["al"]["baseline"] == pytest.approx(1.3)
    assert set(against["families"]) == set(FAMILIES)
    assert facts["speed_against_none"]["estimate"] == pytest.approx(20 / 15)
    assert evaluation_verdict(artifact, GateConfig()).promote


@pytest.mark.parametrize(("again", "promotes"), [(14.0, True), (30.0, False)])
def test_a_machine_that_became_faster_makes_no_head_faster(tmp_path: Path, again: float, promotes: bool) -> None:
    """The head gives 20 tokens/s; plain decoding gave 15 before it, on a machine that may have been busy."""
    measured = {name: result for name, result in results(at_champions_k=40).items() if name in ("none", "candidate")}
    measured["none"] = replace(
        measured["none"], speeds_again=tuple(Speed(f"p{i}", 64, 64 / again, 0.1) for i in range(6))
    )

    facts, artifact, _ = evaluate(tmp_path, measured, None)

    assert facts["plain_again"]["estimate"] == pytest.approx(again / 15)
    assert facts["speed_against_none"]["estimate"] == pytest.approx(20 / max(again, 15))
    assert evaluation_verdict(artifact, GateConfig()).promote == promotes


def test_an_arm_that_accepted_by_chance_is_marked_and_refused(tmp_path: Path) -> None:
    measured = results(at_champions_k=40)
    synthetic = Arm("candidate", "peagle", 7, "/heads/new", {"rejection_sample_method": "synthetic"})
    measured["candidate"] = replace(measured["candidate"], arm=synthetic)

    facts, artifact, _ = evaluate(tmp_path, measured)

    assert {name: arm["synthetic"] for name, arm in facts["arms"].items() if arm["synthetic"]} == {"candidate": True}
    assert [reason.check for reason in evaluation_verdict(artifact, GateConfig()).failures] == ["real acceptance"]


def test_a_larger_k_alone_is_refused(tmp_path: Path) -> None:
    _, artifact, _ = evaluate(tmp_path, results(at_champions_k=30))

    verdict = evaluation_verdict(artifact, GateConfig())

    assert [reason.check for reason in verdict.failures] == ["acceptance length at K=3"]


@pytest.mark.parametrize(("token", "kind"), [(8, "tie"), (9, "fault")])
def test_every_difference_from_plain_decoding_is_listed_and_faults_refuse(
    tmp_path: Path, token: int, kind: str
) -> None:
    facts, artifact, differences = evaluate(tmp_path, results(at_champions_k=40, token=token))

    assert len(differences["candidate"]) == NUM_PROMPTS
    assert {d["kind"] for d in differences["candidate"]} == {kind}
    assert facts["arms"]["candidate"]["lossless"][f"{kind}s"] == NUM_PROMPTS
    assert differences["champion"] == []
    failures = [reason.check for reason in evaluation_verdict(artifact, GateConfig()).failures]
    assert failures == (["lossless"] if kind == "fault" else [])


def test_the_walk_is_held_against_the_server(tmp_path: Path) -> None:
    walked = evaluate(tmp_path, results(at_champions_k=40))[0]["walked"]

    assert walked["vllm_al"] == pytest.approx(1.6)
    assert walked["relative_difference"] == pytest.approx(1.41 / 1.6 - 1)
    assert walked["agrees"] is False
