"""What the earlier stages found, gathered once for the card, the report, MLflow and the summary."""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from components.config import Settings
from components.evaluation.arms import head_arm
from components.evaluation.gate import Verdict
from components.evaluation.metrics import metrics_of_evaluation, with_chosen
from components.speed.metrics import metrics_of_speed
from components.stage import Artifact
from components.target.resolve import BUNDLED_PREFIX
from components.versions import vllm_of

CANDIDATE = "candidate"


@dataclass(frozen=True)
class Evidence:
    settings: Settings
    artifacts: Mapping[str, Artifact]
    """The finished outputs, by stage."""
    verdict: Verdict

    @property
    def evaluation(self) -> Mapping[str, Any]:
        return self.artifacts["evaluation"].facts

    @property
    def ab(self) -> Mapping[str, Any]:
        return self.artifacts["ab"].facts

    @property
    def speed(self) -> Mapping[str, Any] | None:
        """Of the speed pass; None where there was none."""
        facts = self.artifacts["speed"].facts if "speed" in self.artifacts else {}
        return facts if facts.get("points") else None

    @property
    def target(self) -> Mapping[str, Any]:
        return self.artifacts["target"].facts

    @property
    def candidate(self) -> Mapping[str, Any]:
        """The new head's figures."""
        return self.evaluation["arms"][self.evaluation["candidate"]["arm"]]

    @property
    def num_speculative_tokens(self) -> int:
        return self.evaluation["candidate"]["num_speculative_tokens"]

    @property
    def head_digest(self) -> str:
        return self.evaluation["candidate"]["head_digest"]

    @cached_property
    def differences(self) -> Mapping[str, list[Mapping[str, Any]]]:
        """First differences from plain decoding, by arm."""
        return json.loads(self.artifacts["evaluation"].join("evaluation.json").read_bytes())["differences"]

    @cached_property
    def curves(self) -> list[dict[str, Any]]:
        """Rows of curves.jsonl: `step`, `epoch` and figures by name."""
        return training_curves(self.artifacts["head"])

    @property
    def vllm_version(self) -> str:
        return vllm_of(self.artifacts["evaluation"].manifest["versions"]) or "unknown"

    def row_accounts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(stage, row account) of the data stages."""
        for name, artifact in self.artifacts.items():
            if artifact.manifest["rows"]:
                yield name, artifact.manifest["rows"]

    @property
    def hub_id(self) -> str | None:
        """The target's Hugging Face id; None for a bundled target or a folder."""
        model = self.target["model"]
        local = model.startswith(BUNDLED_PREFIX) or Path(model).is_dir()
        return None if local else model

    def serve_command(self, head: str) -> str:
        """The command that serves the target with the head in the folder `head`."""
        target = self.settings.target
        served = f"{self.hub_id} --revision {self.target['revision']}" if self.hub_id else self.target["path"]
        config = head_arm(CANDIDATE, head, self.num_speculative_tokens).speculative_config()
        command = (
            f"vllm serve {served} --dtype {target.dtype} --max-model-len {target.max_model_len} --tokenizer-mode hf "
        )
        if target.chat_template_kwargs:
            command += f"--default-chat-template-kwargs {shlex.quote(json.dumps(target.chat_template_kwargs))} "
        return command + f"--speculative-config {shlex.quote(json.dumps(config))}"


def training_curves(head: Artifact) -> list[dict[str, Any]]:
    """Rows of the head's curves.jsonl."""
    return [json.loads(line) for line in head.join("curves.jsonl").read_bytes().splitlines()]


def metrics_of(evidence: Evidence) -> dict[str, float | None]:
    """The figures of a finished run in MLflow's vocabulary; what is undefined is None."""
    figures: dict[str, float | None] = {**metrics_of_evaluation(evidence.evaluation)}
    figures["eval/bigram/walked_al"] = evidence.evaluation["bigram_walked_al"]
    chosen = evidence.evaluation["candidate"]["arm"]
    figures[f"eval/{chosen}/walked_al"] = evidence.evaluation["walked"]["al"]
    figures |= metrics_of_speed(evidence.speed)
    figures = with_chosen(figures, chosen)
    for name, arm in evidence.ab["arms"].items():
        figures |= {f"ab/{name}/{key}": arm[key] for key in ("al", "requests", "errors")}
    for stage, rows in evidence.row_accounts():
        lost = sum(rows["dropped"].values()) + sum(rows["failed"].values())
        counts = {"rows_in": rows["rows_in"], "kept": rows["kept"], "truncated": rows["truncated"], "lost": lost}
        figures |= {f"data/{stage}/{key}": count for key, count in counts.items()}
    return figures


def curves_of(evidence: Evidence) -> Iterator[tuple[int, dict[str, float | None]]]:
    """(step, figures) of the training, in MLflow's vocabulary."""
    for row in evidence.curves:
        yield int(row["step"]), {name: value for name, value in row.items() if "/" in name}


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {"promote": verdict.promote, "reasons": [asdict(reason) for reason in verdict.reasons]}
