"""Causes of an acceptance length near 1: head and server disagree, the head cannot draft the answers, or it has not learnt to."""

from collections.abc import Iterator

from components.evaluation.causes.finding import GOOD_AL, Evidence, Finding, listed

MISMATCH_SHARE = 0.005
"""Drafted tokens that differ by more than rounding; equal code has none."""
FAR_BELOW = 0.85
"""An AL this much below what the same head had elsewhere is no chance."""
DEAD = 0.1
"""A position that is reached and accepted in less than this share of the rounds before it does not work."""
LEARNT = 0.2
"""Accuracy from which training has learnt a depth."""
COVERAGE = 0.93
"""Share of the answers' tokens in the draft vocabulary: without 7% of them a chain of three loses a fifth."""
STILL_RISING = 0.02
"""Share of AL - 1 gained in the last quarter of training from which more of it would help."""
NO_PROGRESS = 0.95
"""Last loss over first loss."""
OVERFITTED = 0.15
"""Difference in accuracy between training and validation texts."""


def find_low_acceptance(found: Evidence) -> Iterator[Finding]:
    """Nothing when the candidate's AL is good and beats a bigram table's."""
    al, bigram = found.candidate["al"], found.evaluation["bigram_walked_al"]
    if al is not None and al >= GOOD_AL and (bigram is None or al > bigram):
        return
    shown = "undefined (nothing was proposed)" if al is None else f"{al:.3f}"
    symptom = f"AL is {shown} at K={found.k}" + ("" if bigram is None else f", a bigram table's {bigram:.3f}")
    causes = [
        _invalid_answers(found),
        _other_target(found),
        _preflight(found),
        _server_disagrees(found),
        _features_differ(found),
        _labels(found),
        _deeper_than_trained(found),
        _deep_positions_dead(found),
        _vocabulary(found),
        _not_learning(found),
        _too_short(found),
        _overfitted(found),
        _unlike_training(found),
        _long_prompts(found),
    ]
    named = [Finding(symptom, *cause) for cause in causes if cause is not None]
    yield from named or [Finding(symptom, *_UNKNOWN)]


Cause = tuple[str, str, str] | None
"""(cause, evidence, next step)."""
_UNKNOWN = (
    "none of the known ones",
    "preflight, walk, positions, vocabulary and curves (where they exist) look sound",
    "train on more answers of the serving traffic, with a deeper head (draft.num_layers) and for longer (train.epochs)",
)


def _invalid_answers(found: Evidence) -> Cause:
    if not found.candidate["problems"]:
        return None
    return (
        "the arm's answers are not valid",
        "; ".join(found.candidate["problems"]),
        "mend these first: no figure of this arm counts",
    )


def _other_target(found: Evidence) -> Cause:
    measured = found.candidate["platform"].get("target")
    wanted = found.target["digest"] if found.target else found.plain["platform"].get("target")
    if measured == wanted:
        return None
    return (
        "the head was measured on another target than the one it was trained for",
        f"target digest {str(measured)[:12]} in the evaluation, {str(wanted)[:12]} in training",
        "evaluate on the target that answered the prompts and gave the features",
    )


def _preflight(found: Evidence) -> Cause:
    if not found.preflight or not found.preflight["compared"]:
        return None
    wrong, compared = sum(found.preflight["mismatches_at"]), found.preflight["compared"]
    if wrong / compared <= MISMATCH_SHARE:
        return None
    return (
        f"vLLM drafts other tokens than our own code: {found.preflight['cause'] or 'cause unknown'}",
        f"preflight: {wrong} of {compared} drafted tokens differ, by depth {list(found.preflight['mismatches_at'])}",
        "mend the head's files (config.json: aux layers, rope, mask token; d2t) and run again with --force preflight",
    )


def _server_disagrees(found: Evidence) -> Cause:
    walked = found.evaluation["walked"]
    if walked["agrees"] is not False:
        return None
    return (
        "head and server do not compute the same: the served head reads other features (a norm before the head, aux layers, positions), "
        "another mask token, or another text (chat template, tokenizer)",
        f"our walk along the same answers gives AL {walked['al']:.3f}, vLLM {walked['vllm_al_within_answers']:.3f} "
        f"({walked['relative_difference']:+.1%}, at most 3% is rounding)",
        "read preflight.json (which depth differs first, and the named cause); compare vLLM's version with the tested ones",
    )


def _features_differ(found: Evidence) -> Cause:
    trained, walked = _held_out_walk(found), found.evaluation["walked"]["al"]
    if trained is None or walked is None or walked - 1 >= FAR_BELOW * (trained - 1):
        return None
    return (
        "held-out texts look otherwise to the evaluation than to training: another chat template, thinking switch, tokenizer or dtype, or "
        "features of another extractor",
        f"walked AL on held-out answers {trained:.3f} in training, {walked:.3f} in the evaluation",
        "use the same target.chat_template_kwargs, target.dtype and data.extractor throughout; answer the prompts again (--force responses)",
    )


def _labels(found: Evidence) -> Cause:
    accuracy, walked = found.last("validation/accuracy_depth_0"), found.last("validation/walked_al_1")
    if accuracy is None or walked is None or accuracy < LEARNT or walked - 1 >= accuracy / 2:
        return None
    return (
        "training predicts another token than serving asks for (labels shifted, features after the final norm, or a wrong d2t)",
        f"accuracy at depth 0 is {accuracy:.0%} in training, but a walk with one draft accepts {walked - 1:.0%}",
        "compare a stored row's input_ids, loss_mask and features with what the head reads (pipelines/data.py --verify)",
    )


def _deeper_than_trained(found: Evidence) -> Cause:
    depths = found.head.get("num_depths") if found.head else None
    if depths is None or found.k <= depths:
        return None
    return (
        "it is served with a larger K than it was trained with",
        f"train.num_depths {depths}, evaluate.num_speculative_tokens {found.k}; accepted by position {listed(found.accepted_at)}",
        f"serve with K of at most {depths}, or train with train.num_depths {found.k} or more",
    )


def _deep_positions_dead(found: Evidence) -> Cause:
    rates = found.accepted_at
    if len(rates) < 2 or rates[0] < LEARNT or rates[1] >= DEAD * rates[0]:
        return None
    learnt = found.last("validation/accuracy_depth_1")
    evidence = f"accepted by position {listed(rates)}"
    if learnt is not None and learnt >= LEARNT:
        return (
            "the mask token: tokens after a round's first one are drafted from another mask embedding or mask_hidden than trained",
            f"{evidence}, though accuracy at depth 1 is {learnt:.0%} in training",
            "compare mask_token_id, ptd_token_id and pard_token in the head's config.json, and its mask_hidden tensor, with training's",
        )
    return (
        "only the first token of a round was learnt",
        evidence + ("" if learnt is None else f", accuracy at depth 1 is {learnt:.0%} in training"),
        "train for longer, keep more chains (train.chain_rate) and give the head more layers (draft.num_layers)",
    )


def _vocabulary(found: Evidence) -> Cause:
    coverage = found.vocabulary.get("coverage_held_out") if found.vocabulary else None
    if coverage is None or coverage >= COVERAGE:
        return None
    assert found.vocabulary is not None
    return (
        "the draft vocabulary lacks tokens that the target answers with",
        f"{coverage:.1%} of held-out answer tokens are among its {found.vocabulary['size']} of {found.vocabulary['target_size']} ids "
        f"(training answers: {_share(found.vocabulary.get('coverage_train'))})",
        "raise draft.vocab_size, or train on answers to prompts like these",
    )


def _not_learning(found: Evidence) -> Cause:
    losses = found.curve("train/loss")
    if len(losses) < 2 or losses[-1] < NO_PROGRESS * losses[0]:
        return None
    return (
        "training does not learn",
        f"train/loss went from {losses[0]:.3f} to {losses[-1]:.3f} in {found.curves[-1]['step']:.0f} steps",
        "lower train.learning_rate, and see that answer tokens are supervised (rows of the features stage, pipelines/data.py --verify)",
    )


def _too_short(found: Evidence) -> Cause:
    depths = found.head.get("num_depths", found.k) if found.head else found.k
    lengths = found.curve(f"validation/walked_al_{min(found.k, depths)}")
    if len(lengths) < 2:
        return None
    before = lengths[-1 - max(1, len(lengths) // 4)]
    if lengths[-1] - before < STILL_RISING * max(lengths[-1] - 1, 0.01):
        return None
    return (
        "training ended too early",
        f"walked AL on validation answers still rose from {before:.3f} to {lengths[-1]:.3f} in the last quarter of "
        f"{found.curves[-1]['step']:.0f} steps",
        "raise train.epochs, or answer more prompts (data.max_prompts, data.max_new_tokens)",
    )


def _overfitted(found: Evidence) -> Cause:
    training, validation = found.last("train/accuracy_depth_0"), found.last("validation/accuracy_depth_0")
    if training is None or validation is None or training - validation < OVERFITTED:
        return None
    return (
        "it learnt its training answers by heart",
        f"accuracy at depth 0 is {training:.0%} on training answers, {validation:.0%} on validation answers",
        "answer more prompts, or train for fewer epochs",
    )


def _unlike_training(found: Evidence) -> Cause:
    """Validation comes from the families of training, the evaluation from others."""
    validation, held_out = found.last(f"validation/walked_al_{found.k}"), found.evaluation["walked"]["al"]
    if validation is None or held_out is None or held_out - 1 >= FAR_BELOW * (validation - 1):
        return None
    families = ", ".join(f"{name} {al:.2f}" for name, al in found.candidate["family_al"].items() if al is not None)
    return (
        "the evaluation's prompts are unlike the training ones",
        f"walked AL {validation:.3f} on validation answers, {held_out:.3f} on the evaluation's; AL by family: {families}",
        "add prompts of these kinds, from the serving traffic, to data.prompts",
    )


def _long_prompts(found: Evidence) -> Cause:
    for task, facts in found.evaluation.get("tasks", {}).items():
        groups = (facts["arms"].get(found.candidate_name) or {}).get("by_prompt_length") or {}
        lengths = {bucket: group["al"]["estimate"] for bucket, group in groups.items() if group["al"]}
        if len(lengths) < 2:
            continue
        (short, first), *_, (long, last) = lengths.items()
        if last - 1 < FAR_BELOW * (first - 1):
            return (
                "prompts are longer than those that the head was trained on",
                f"task {task}: AL {first:.3f} for prompts of {short} tokens, {last:.3f} for {long}",
                "train on prompts as long as those served",
            )
    return None


def _held_out_walk(found: Evidence) -> float | None:
    figures = found.head.get("held_out", {}) if found.head else {}
    return figures.get(f"held_out/walked_al_{found.k}")


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
