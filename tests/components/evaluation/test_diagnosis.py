"""Each cause is named from the facts that it leaves behind, and from a sound run none is."""

from typing import Any

import pytest

from components.evaluation.causes.no_speedup import best_k
from components.evaluation.diagnosis import Finding, diagnose
from tests.components.publishing.by_hand import arm_facts, curves, evaluation_facts, point, speed_facts, target_facts

VOCABULARY = {"size": 8000, "target_size": 49152, "coverage_train": 0.97, "coverage_held_out": 0.95}
HEAD = {"num_depths": 4, "num_layers": 2, "aux_layers": [2, 15, 27], "held_out": {}}
SOUND_PREFLIGHT = {"compared": 900, "mismatches_at": [0, 1, 0], "cause": None}
LOW = [0.1, 0.02, 0.0]
GPU = {"device": "NVIDIA H200", "target": "d" * 64}


def evaluation(rates: list[float], tokens_per_s: float = 180.0, bigram: float = 1.05, **changes: Any) -> dict[str, Any]:
    """Facts in which the candidate accepts by `rates`; `changes` are of its arm."""
    facts = evaluation_facts()
    k = len(rates)
    facts["arms"]["candidate"] = arm_facts("peagle", k, rates, tokens_per_s, **changes)
    facts["candidate"]["num_speculative_tokens"] = k
    facts["bigram_walked_al"] = bigram
    facts["walked"] |= {"al": 1 + sum(rates)}
    return facts


def causes(findings: list[Finding]) -> list[str]:
    return [finding.cause for finding in findings]


def only(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


def learnt_little() -> list[dict[str, float]]:
    """Curves of a head whose walk is as low as its serving, and which stopped rising."""
    return [row | {"validation/walked_al_1": 1.1, "validation/walked_al_3": 1.12, "validation/accuracy_depth_0": 0.15,
                   "validation/accuracy_depth_1": 0.05, "train/accuracy_depth_0": 0.16} for row in curves()]  # fmt: skip


def test_a_sound_run_has_no_finding() -> None:
    found = diagnose(
        evaluation_facts(),
        target=target_facts(),
        vocabulary=VOCABULARY,
        head=HEAD,
        curves=curves(),
        preflight=SOUND_PREFLIGHT,
        speed=speed_facts(),
        max_num_seqs=16,
    )
    assert found == []


class TestLowAcceptance:
    def test_numbers_and_a_next_step_come_with_every_cause(self) -> None:
        finding = only(
            diagnose(evaluation(LOW), curves=learnt_little(), vocabulary=VOCABULARY | {"coverage_held_out": 0.81})
        )
        assert finding.symptom == "AL is 1.120 at K=3, a bigram table's 1.050"
        assert "81.0% of held-out answer tokens are among its 8000 of 49152 ids" in finding.evidence
        assert "draft.vocab_size" in finding.next_step

    def test_a_head_that_a_bigram_table_beats_is_low_whatever_its_al(self) -> None:
        assert diagnose(evaluation([0.5, 0.2, 0.1], bigram=1.9))

    def test_nothing_proposed_at_all(self) -> None:
        finding = only(diagnose(evaluation([0.0, 0.0], al=None, accepted_at=[None, None])))
        assert "undefined" in finding.symptom

    def test_invalid_answers_come_first(self) -> None:
        found = diagnose(
            evaluation(LOW, problems=["3 of 32 answers: empty answer"]),
            vocabulary=VOCABULARY | {"coverage_held_out": 0.5},
        )
        assert causes(found)[0] == "the arm's answers are not valid"
        assert "3 of 32" in found[0].evidence

    def test_another_target(self) -> None:
        found = only(diagnose(evaluation(LOW, platform={"device": "gpu", "target": "e" * 64}), target=target_facts()))
        assert "another target" in found.cause
        assert "eeeeeeeeeeee" in found.evidence

    def test_a_preflight_mismatch_names_its_own_cause(self) -> None:
        preflight = {"compared": 900, "mismatches_at": [0, 9, 6], "cause": "the mask token or mask_hidden"}
        found = only(diagnose(evaluation(LOW), preflight=preflight))
        assert "the mask token or mask_hidden" in found.cause
        assert "15 of 900" in found.evidence

    def test_head_and_server_that_compute_otherwise(self) -> None:
        facts = evaluation(LOW)
        facts["walked"] = {
            "al": 2.2,
            "vllm_al": 1.12,
            "vllm_al_within_answers": 1.12,
            "relative_difference": 0.96,
            "agrees": False,
        }
        found = only(diagnose(facts, curves=curves()))
        assert "chat template" in found.cause
        assert "AL 2.200, vLLM 1.120 (+96.0%" in found.evidence

    def test_another_chat_template_than_the_features(self) -> None:
        found = diagnose(evaluation(LOW), head=HEAD | {"held_out": {"held_out/walked_al_3": 2.2}})
        assert "chat template" in only(found).cause
        assert "2.200 in training, 1.120 in the evaluation" in only(found).evidence

    def test_labels_off_by_one(self) -> None:
        """70% accuracy in training and an AL of 1.02 (cases: SpecForge#455)."""
        rows = [row | {"validation/accuracy_depth_0": 0.7, "train/accuracy_depth_0": 0.7, "validation/walked_al_1": 1.02,
                       "validation/walked_al_3": 1.02} for row in curves()]  # fmt: skip
        found = only(diagnose(evaluation([0.02, 0.0, 0.0]), curves=rows))
        assert "labels shifted" in found.cause
        assert "70%" in found.evidence

    def test_a_larger_k_than_trained(self) -> None:
        found = only(diagnose(evaluation([0.1, 0.05, 0.02, 0.01, 0.0]), head=HEAD, curves=learnt_little()))
        assert "larger K" in found.cause
        assert "train.num_depths 4" in found.evidence

    def test_a_mask_token_that_serving_does_not_know(self) -> None:
        found = diagnose(
            evaluation([0.25, 0.0, 0.0]), curves=[row | {"validation/walked_al_3": 1.25} for row in curves()]
        )
        assert "the mask token" in only(found).cause
        assert "accuracy at depth 1 is 35%" in only(found).evidence

    def test_only_the_first_depth_was_learnt(self) -> None:
        rows = [row | {"validation/walked_al_1": 1.24, "validation/walked_al_3": 1.25, "validation/accuracy_depth_0": 0.25,
                       "validation/accuracy_depth_1": 0.02, "train/accuracy_depth_0": 0.25} for row in curves()]  # fmt: skip
        assert "only the first token" in only(diagnose(evaluation([0.25, 0.01, 0.0]), curves=rows)).cause

    def test_training_that_does_not_learn(self) -> None:
        rows = [row | {"train/loss": 9.0} for row in learnt_little()]
        found = only(diagnose(evaluation(LOW), curves=rows))
        assert "does not learn" in found.cause
        assert "from 9.000 to 9.000 in 40 steps" in found.evidence

    def test_training_that_ended_while_it_still_rose(self) -> None:
        rows = [row | {"validation/walked_al_3": 1.02 + 0.03 * i} for i, row in enumerate(learnt_little())]
        found = only(diagnose(evaluation(LOW), curves=rows))
        assert "ended too early" in found.cause
        assert "from 1.080 to 1.110" in found.evidence

    def test_answers_learnt_by_heart(self) -> None:
        rows = [row | {"train/accuracy_depth_0": 0.8} for row in learnt_little()]
        assert "by heart" in only(diagnose(evaluation(LOW), curves=rows)).cause

    def test_prompts_unlike_the_training_ones(self) -> None:
        found = only(diagnose(evaluation(LOW), curves=curves()))
        assert "unlike the training ones" in found.cause
        assert (
            "2.200 on validation answers, 1.120 on the evaluation's; AL by family: code 1.12, chat 1.12"
            in found.evidence
        )

    def test_prompts_longer_than_the_training_ones(self) -> None:
        facts = evaluation(LOW)
        lengths = facts["tasks"]["code_editing"]["arms"]["candidate"]["by_prompt_length"]
        lengths["64-255"]["al"]["estimate"] = 1.3
        found = only(diagnose(facts, curves=learnt_little()))
        assert "longer" in found.cause
        assert "AL 2.200 for prompts of 0-63 tokens, 1.300 for 64-255" in found.evidence

    def test_no_known_cause_is_said_too(self) -> None:
        facts = evaluation(LOW)
        del facts["tasks"]
        assert "none of the known ones" in only(diagnose(facts, curves=learnt_little(), vocabulary=VOCABULARY)).cause


class TestNoSpeedup:
    """AL 2.2; a plain step gives 100 tokens/s, so a head at 90 tokens/s takes 2.44 plain steps a round."""

    RATES = [0.6, 0.4, 0.2]

    def find(self, rates: list[float] | None = None, tokens_per_s: float = 90.0, **changes: Any) -> list[Finding]:
        facts = evaluation(rates or self.RATES, tokens_per_s, platform=GPU, **changes)
        return diagnose(facts)

    def test_a_head_that_is_faster_has_none(self) -> None:
        assert self.find(tokens_per_s=150.0) == []

    def test_a_head_that_costs_too_much_beside_what_verification_takes(self) -> None:
        found = self.find()
        assert (
            found[0].symptom
            == "AL is 2.200, but tokens/s at one request at a time are 0.90 times those without speculation"
        )
        assert found[0].cause == "drafting costs too much"
        assert "takes 2.44 steps of plain decoding, of which verification takes 0.00" in found[0].evidence

    def test_without_an_arm_that_drafts_by_look_up_the_two_are_not_told_apart(self) -> None:
        facts = evaluation(self.RATES, 90.0, platform=GPU)
        del facts["arms"]["ngram"]
        assert diagnose(facts)[0].cause == "drafting and verification costs too much"

    def test_verification(self) -> None:
        facts = evaluation(self.RATES, 90.0, platform=GPU)
        facts["arms"]["ngram"] = arm_facts("ngram", 3, [0.3, 0.2, 0.1], 65.0)  # 1.6 tokens a step, 2.46 plain steps
        found = causes(diagnose(facts))
        assert "verifying several tokens costs much more than a step with one" in found
        assert "drafting costs too much" not in found

    def test_few_steps_with_a_proposal(self) -> None:
        found = self.find(coverage=0.3, tokens_per_step=1.36, tokens_per_s=100.0)
        assert "many steps had none" in found[0].cause
        assert "30% of the target's steps" in found[0].evidence

    def test_a_small_target(self) -> None:
        found = diagnose(
            evaluation(self.RATES, 90.0, platform=GPU), target=target_facts(), head=HEAD, vocabulary=VOCABULARY
        )
        [small] = [finding for finding in found if "the target is small" in finding.cause]
        assert "the head computes with 13 M parameters, the target with 134 M (10%)" in small.evidence

    def test_a_cpu(self) -> None:
        found = diagnose(evaluation(self.RATES, 90.0, platform=GPU | {"device": "cpu"}))
        assert any("a CPU has no idle arithmetic" in cause for cause in causes(found))

    def test_a_k_that_its_last_positions_do_not_pay_for(self) -> None:
        found = self.find(rates=[0.6, 0.3, 0.02, 0.0, 0.0, 0.0, 0.0], tokens_per_s=85.0)
        [large] = [finding for finding in found if "K is too large" in finding.cause]
        assert large.next_step == "serve with evaluate.num_speculative_tokens 2"

    @pytest.mark.parametrize(("cost", "k"), [(1.0, 3), (1.3, 3), (2.5, 1)])
    def test_the_best_k_falls_with_what_a_draft_costs(self, cost: float, k: int) -> None:
        assert best_k([0.6, 0.4, 0.2], cost, 3) == k


class TestLostUnderLoad:
    def find(self, speed: dict[str, Any], **facts: Any) -> list[Finding]:
        return diagnose(evaluation_facts(), speed=speed, **facts)

    def test_a_target_bound_by_arithmetic(self) -> None:
        found = only(self.find(speed_facts(plain=(100.0, 500.0), by_k={3: (180.0, 450.0)})))
        assert found.symptom == "chat: the gain of candidate at K=3 is +80% at concurrency 1 and -10% at 16"
        assert "no longer free" in found.cause
        assert "1 -> 16 requests at once (16.0 times) give 5.00 times the tokens/s (100 -> 500)" in found.evidence

    def test_a_smaller_k_that_still_gains(self) -> None:
        found = only(self.find(speed_facts(plain=(100.0, 1000.0), by_k={1: (130.0, 1100.0), 3: (180.0, 950.0)})))
        assert "K is too large for this load" in found.cause
        assert "K=1 gives 1100 tokens/s, K=3 950" in found.evidence

    def test_preemptions(self) -> None:
        speed = speed_facts(plain=(100.0, 1000.0), by_k={3: (180.0, 950.0)})
        assert "K is too large" not in str(found := self.find(speed))
        speed["arms"]["candidate"]["by_k"]["3"] |= {"preemptions": 40, "kv_capacity_tokens": 5000}
        found = self.find(speed)
        assert [cause.split(":")[0] for cause in causes(found)] == [
            "requests are preempted",
            "head and drafts take room that the KV cache had",
        ]
        assert "40 preemptions, 4 without speculation; KV capacity 5000 tokens" in found[0].evidence
        assert "KV capacity 5000 tokens, 100000 without speculation (-95%)" in found[1].evidence

    def test_requests_that_wait_for_a_place(self) -> None:
        speed = speed_facts(plain=(100.0, 1000.0), by_k={3: (180.0, 950.0)})
        speed["arms"] = {}
        found = only(self.find(speed, max_num_seqs=8))
        assert "wait for a place" in found.cause
        assert found.evidence == "max_num_seqs 8, concurrency 16; first tokens take 20 ms (p95)"

    def test_no_known_cause_names_the_recommendation(self) -> None:
        speed = speed_facts(plain=(100.0, 1000.0), by_k={3: (180.0, 950.0)})
        speed["arms"] = {}
        assert only(self.find(speed)).next_step == "follow the recommended K: off at this load"

    def test_one_load_or_none_says_nothing(self) -> None:
        one = {"points": [point("none", None, 1, 100.0), point("candidate", 3, 1, 180.0)], "arms": {}}
        assert self.find(one) == []
        assert self.find({"left_out": True, "points": [], "arms": {}, "recommended": {}}) == []
