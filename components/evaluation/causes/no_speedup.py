"""Causes of a good acceptance length that makes nothing faster: what a round costs, and who pays for it.

A round gives `tokens_per_step` tokens. Where it takes as long as `cost` steps of plain decoding, the speed-up is tokens_per_step / cost; the
arms measured at one request at a time give both.
"""

from collections.abc import Iterator

from components.evaluation.causes.finding import GAIN, GOOD_AL, NONE, Evidence, Finding, listed
from components.forecast import head_parameters, target_parameters

Cause = tuple[str, str, str]
"""(cause, evidence, next step)."""

DEAR = 0.2
"""Steps of plain decoding that drafting or verification may add to a round before it is worth a word."""
LARGE_HEAD = 0.15
"""Parameters that the head computes with over those of the target; four layers on an 8B target are 12%."""
SMALL_TARGET = 5e8
"""Parameters below which a step is so short that what a draft costs whatever its size (launches, scheduling) weighs in."""
COVERED = 0.8
"""Share of the target's steps that have a proposal to verify."""
CHEAP_METHODS = ("ngram", "suffix")
"""Drafting by look-up: what a round of theirs costs more than a plain step is verification."""


def find_no_speedup(found: Evidence) -> Iterator[Finding]:
    """Nothing where AL is low already, where speed was not measured, or where the head is faster."""
    al, gain = found.candidate["al"], _gain(found, found.candidate_name)
    if al is None or al < GOOD_AL or gain is None or gain >= GAIN:
        return
    symptom = f"AL is {al:.3f}, but tokens/s at one request at a time are {gain:.2f} times those without speculation"
    cost = _round_cost(found, found.candidate_name)
    verification = _verification_cost(found)
    causes = [
        _coverage(found),
        _drafting(found, cost, verification),
        _small_target(found),
        _verification(found, verification),
        _processor(found, cost),
        _large_k(found, cost),
    ]
    named = [Finding(symptom, *cause) for cause in causes if cause is not None]
    yield from named or [Finding(symptom, *_unknown(found, cost))]


def best_k(accepted_at: list[float], cost: float, k: int) -> int:
    """The K with the most tokens a unit of time, if a round costs 1 and the same for each draft token.

    Args:
        accepted_at: Share of rounds that accept at least 1 ... k tokens.
        cost: Of a round of k draft tokens, in steps of plain decoding.
        k: The K that was measured.
    """
    each = max(cost - 1, 0.0) / k
    return max(range(1, k + 1), key=lambda n: (1 + sum(accepted_at[:n])) / (1 + each * n))


def _gain(found: Evidence, name: str) -> float | None:
    ours, plain = (found.evaluation["arms"][arm]["tokens_per_s_c1"] for arm in (name, NONE))
    return ours / plain if ours and plain else None


def _round_cost(found: Evidence, name: str) -> float | None:
    """Of one step of the arm, in steps of plain decoding."""
    gain, tokens = _gain(found, name), found.evaluation["arms"][name]["tokens_per_step"]
    return tokens / gain if gain and tokens else None


def _verification_cost(found: Evidence) -> float | None:
    """What verifying adds to a step, by an arm that drafts by look-up; its steps without a proposal cost nothing more."""
    for name, arm in found.evaluation["arms"].items():
        cost = _round_cost(found, name) if arm["method"] in CHEAP_METHODS else None
        if cost is not None and arm["coverage"]:
            return max(0.0, cost - 1) / arm["coverage"]
    return None


def _coverage(found: Evidence) -> Cause | None:
    coverage, steps = found.candidate["coverage"], found.candidate["tokens_per_step"]
    if coverage is None or steps is None or coverage >= COVERED:
        return None
    return (
        "AL counts only rounds with a proposal, and many steps had none",
        f"{coverage:.0%} of the target's steps had a proposal; over all steps it is {steps:.3f} tokens a step, not {found.candidate['al']:.3f}",
        "compare arms by tokens/step; look for answers near target.max_model_len, where vLLM stops drafting",
    )


def _drafting(found: Evidence, cost: float | None, verification: float | None) -> Cause | None:
    if cost is None:
        return None
    drafting = cost - 1 - (verification or 0.0)
    if drafting < DEAR:
        return None
    beside = (
        ""
        if verification is None
        else f", of which verification takes {verification:.2f} (by the arm that drafts by look-up)"
    )
    what = "drafting" if verification is not None else "drafting and verification"
    return (
        f"{what} costs too much",
        f"a round gives {found.candidate['tokens_per_step']:.2f} tokens and takes {cost:.2f} steps of plain decoding{beside}: "
        f"{drafting:.2f} are {what}",
        "use a head of fewer layers or a smaller draft vocabulary (draft.num_layers, draft.vocab_size), CUDA graphs instead of enforce_eager, "
        "or a smaller K",
    )


def _small_target(found: Evidence) -> Cause | None:
    if not (found.target and found.head and found.vocabulary):
        return None
    shape = found.head["num_layers"], found.vocabulary["size"], len(found.head["aux_layers"])
    head, target = head_parameters(found.target, *shape), target_parameters(found.target)
    if head / target < LARGE_HEAD and target > SMALL_TARGET:
        return None
    return (
        "the target is small: its steps are short beside what a draft costs",
        f"the head computes with {head / 1e6:.0f} M parameters, the target with {target / 1e6:.0f} M ({head / target:.0%})",
        "expect gains on larger targets; here use fewer layers and a smaller draft vocabulary, or n-gram drafts",
    )


def _verification(found: Evidence, verification: float | None) -> Cause | None:
    if verification is None or verification < DEAR:
        return None
    return (
        "verifying several tokens costs much more than a step with one",
        f"a step that verifies up to K={found.k} drafts takes {1 + verification:.2f} plain steps, by the arm that drafts by look-up",
        "lower K; on a GPU see that the target runs with CUDA graphs for K + 1 tokens a request",
    )


def _processor(found: Evidence, cost: float | None) -> Cause | None:
    if found.candidate["platform"].get("device") != "cpu":
        return None
    shown = "" if cost is None else f", where a round of K={found.k} takes {cost:.2f} plain steps"
    return (
        "a CPU has no idle arithmetic for drafts: it computes K + 1 tokens at nearly K + 1 times the cost of one",
        f"device cpu{shown}",
        "judge speed on the GPU that will serve; AL and losslessness hold on both",
    )


def _large_k(found: Evidence, cost: float | None) -> Cause | None:
    if cost is None:
        return None
    best = best_k(list(found.accepted_at), cost, found.k)
    if best >= found.k:
        return None
    return (
        "K is too large for what its last positions accept",
        f"accepted by position {listed(found.accepted_at)}; at this round's cost K={best} gives the most tokens",
        f"serve with evaluate.num_speculative_tokens {best}",
    )


def _unknown(found: Evidence, cost: float | None) -> Cause:
    shown = "unknown" if cost is None else f"{cost:.2f} plain steps"
    return (
        "none of the known ones",
        f"a round takes {shown} and gives {found.candidate['tokens_per_step']} tokens",
        "measure more prompts and longer answers (evaluate.speed_prompts, evaluate.speed_tokens), with nothing else on the machine",
    )
