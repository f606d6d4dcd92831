"""The tables of a run, as text cells: the model card prints them in Markdown, the report in HTML, the summary in the terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.evaluation.gate import Verdict
from components.publishing.evidence import Evidence

UNDEFINED = "–"
KEY_SHOWN = 12
"""Characters of a row key or digest."""


@dataclass(frozen=True)
class Table:
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def verdict_table(verdict: Verdict) -> Table:
    rows = [("pass" if r.passed else "FAIL", r.check, r.measured, r.required) for r in verdict.reasons]
    return Table("Reasons", ("", "check", "measured", "required"), rows)


def arms_table(evaluation: Mapping[str, Any]) -> Table:
    """Every arm's figures, and the bigram table's walked AL as the floor that any head must beat."""
    rows: list[Sequence[str]] = [
        (
            name,
            number(arm["num_speculative_tokens"], 0),
            with_interval(arm["al"], intervals_of(arm)["al"]),
            percent(arm["acceptance_rate"]),
            number(arm["tokens_per_step"]),
            percent(arm["coverage"]),
            number(arm["tokens_per_s_c1"], 1),
            number(arm["first_token_s"]),
            str(arm["errors"]),
        )
        for name, arm in evaluation["arms"].items()
    ]
    k = number(evaluation["candidate"]["num_speculative_tokens"], 0)
    rows.append(("bigram table (walked)", k, number(evaluation["bigram_walked_al"]), *[UNDEFINED] * 6))
    return Table(
        f"Held-out prompts, greedy ({evaluation['num_prompts']} prompts)",
        ("arm", "K", "AL", "accepted", "tokens/step", "coverage", "tokens/s c=1", "first token s", "errors"),
        rows,
        "AL = 1 + accepted draft tokens / rounds that had a proposal [95% interval over prompts]; tokens/step = output tokens after each answer's first / "
        "target steps; coverage = rounds with a proposal / target steps. An arm that seldom proposes has a high AL and few "
        "tokens a step: compare it by tokens/step. "
        "What the gate compares was timed twice, the second time in reverse order after the last arm; the faster pass is shown and counts. "
        f"Plain decoding was {estimate(evaluation['plain_again'])} times as fast the second time.",
    )


def position_table(evaluation: Mapping[str, Any]) -> Table:
    arms = {name: arm for name, arm in evaluation["arms"].items() if arm["accepted_at"]}
    width = max((len(arm["accepted_at"]) for arm in arms.values()), default=0)
    rows = []
    for name, arm in arms.items():
        rates = arm["accepted_at"]
        bounds = intervals_of(arm)["accepted_at"] or [None] * len(rates)
        shown = [with_interval(rate, interval, percent) for rate, interval in zip(rates, bounds, strict=True)]
        rows.append((name, *shown, *[UNDEFINED] * (width - len(rates))))
    return Table(
        "Accepted by position",
        ("arm", *[f"≥ {i + 1}" for i in range(width)]),
        rows,
        "Share of rounds that accepted at least so many draft tokens [95% interval over prompts].",
    )


def family_table(evaluation: Mapping[str, Any]) -> Table:
    arms = {name: arm["family_al"] for name, arm in evaluation["arms"].items() if arm["accepted_at"]}
    families = sorted({family for values in arms.values() for family in values})
    rows = [(family, *[number(values.get(family)) for values in arms.values()]) for family in families]
    return Table("AL by family", ("family", *arms), rows)


def lossless_table(evaluation: Mapping[str, Any]) -> Table:
    rows = [
        (name, *[str(arm["lossless"][key]) for key in ("compared", "equal", "ties", "faults")])
        for name, arm in evaluation["arms"].items()
        if arm["lossless"]
    ]
    return Table(
        "Greedy answers against plain decoding",
        ("arm", "compared", "equal", "ties", "faults"),
        rows,
        "A tie: at the first difference plain decoding's own logits were closer than rounding. Anything else is a fault.",
    )


def engines_table(evaluation: Mapping[str, Any]) -> Table:
    """What the arms' engines had room for, and what their answers looked like; no rows where it was not measured."""
    keys = ("kv_capacity_tokens", "preemptions", "looped")
    rows = [
        (name, text(arm.get("kv_capacity_tokens")), text(arm.get("preemptions")), percent(arm.get("looped")))
        for name, arm in evaluation["arms"].items()
        if any(arm.get(key) is not None for key in keys)
    ]
    return Table(
        "Engines",
        ("arm", "KV capacity (tokens)", "preemptions", "looped answers"),
        rows,
        "Preempted requests were put back for want of room in the KV cache. A looped answer repeats itself until it is cut off: easy to "
        "draft, so its AL flatters.",
    )


def differences_table(evidence: Evidence) -> Table:
    rows = [
        (
            arm,
            d["key"][:KEY_SHOWN],
            str(d["position"]),
            text(d["plain_token"]),
            text(d["arm_token"]),
            number(d["top2_gap"], 4),
            d["kind"],
        )
        for arm, found in evidence.differences.items()
        for d in found
    ]
    return Table("First differences", ("arm", "prompt", "position", "plain", "arm", "top-2 gap", "kind"), rows)


def ab_table(ab: Mapping[str, Any]) -> Table:
    rows = [
        (
            name,
            text(arm["head"]),
            percent(arm["weight"]),
            str(arm["sessions"]),
            str(arm["requests"]),
            str(arm["errors"]),
            str(arm["output_tokens"]),
            with_interval(arm["al"], intervals_of(arm)["al"]),
            percent(arm["acceptance_rate"]),
        )
        for name, arm in ab["arms"].items()
    ]
    headers = ("arm", "head", "weight", "sessions", "requests", "errors", "output tokens", "AL", "accepted")
    note = (
        "Live answers keep serving's sampling settings; sessions stay with the arm that their key drew. AL [95% interval over sessions]. "
        "Weights are those of the test, and end with it."
    )
    return Table("A/B traffic", headers, rows, note)


def training_table(evidence: Evidence) -> Table:
    facts = evidence.artifacts["head"].facts
    rows = [
        ("steps", text(facts.get("steps"))),
        ("training seconds", number(facts.get("train_seconds"), 0)),
        ("answer tokens/s", number(facts.get("tokens_per_s"), 0)),
        ("parameters", text(facts.get("num_parameters"))),
    ]
    for split in ("validation", "held_out"):
        rows += [(name, number(value)) for name, value in sorted(facts.get(split, {}).items())]
    walked = evidence.evaluation["walked"]
    rows.append(("walked AL on the evaluated answers", number(walked["al"])))
    rows.append(("vLLM's AL on the same answers", number(walked["vllm_al"])))
    return Table("Training", ("figure", "value"), rows)


def rows_table(evidence: Evidence) -> Table:
    rows = [
        (
            stage,
            str(account["rows_in"]),
            str(account["kept"]),
            str(account["truncated"]),
            ", ".join(_reasons(account)) or "none",
        )
        for stage, account in evidence.row_accounts()
    ]
    return Table("Rows", ("stage", "in", "kept", "truncated", "lost"), rows, "in = kept + truncated + lost")


def stages_table(evidence: Evidence) -> Table:
    rows = [
        (
            name,
            artifact.fingerprint,
            artifact.digest[:KEY_SHOWN],
            (artifact.manifest["git"] or UNDEFINED)[:KEY_SHOWN],
            artifact.manifest["finished_at"],
            number(artifact.manifest["duration_s"], 0),
        )
        for name, artifact in evidence.artifacts.items()
    ]
    return Table("Provenance", ("stage", "fingerprint", "digest", "git", "finished", "seconds"), rows)


def headline(evidence: Evidence) -> list[tuple[str, str]]:
    """The few figures that say how the head does."""
    arms = evidence.evaluation["arms"]
    ours = evidence.candidate
    return [
        (f"AL at K={evidence.num_speculative_tokens}", number(ours["al"])),
        ("bigram table's walked AL", number(evidence.evaluation["bigram_walked_al"])),
        *[(f"{name}: tokens/step", number(arm["tokens_per_step"])) for name, arm in arms.items()],
        *[(f"{name}: tokens/s", number(arm["tokens_per_s_c1"], 1)) for name, arm in arms.items()],
    ]


def number(value: float | None, digits: int = 3) -> str:
    return UNDEFINED if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:.1%}"


def with_interval(
    value: float | None, interval: Mapping[str, float | None] | None, show: Callable[[float | None], str] = number
) -> str:
    """`2.345 [2.101, 2.612]`; the value alone where there are too few prompts for bounds."""
    if interval is None or interval["low"] is None:
        return show(value)
    return f"{show(value)} [{show(interval['low'])}, {show(interval['high'])}]"


def estimate(found: Mapping[str, float | None] | None, show: Callable[[float | None], str] = number) -> str:
    """The same from a figure that holds its own bounds."""
    return UNDEFINED if found is None else with_interval(found["estimate"], found, show)


def intervals_of(arm: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of an arm's AL and positions; empty for an arm that was measured before there were any."""
    return arm.get("intervals") or {"al": None, "accepted_at": []}


def text(value: object) -> str:
    return UNDEFINED if value is None else str(value)


def _reasons(account: Mapping[str, Any]) -> Iterator[str]:
    for kind in ("dropped", "failed"):
        for reason, count in sorted(account[kind].items()):
            yield f"{kind}[{reason}] {count}"
