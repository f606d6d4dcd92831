"""Running the pipelines as a user does: another process, a config file, an exit code and what it printed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from components.serving.recording import MARKS
from components.storage import Location

ROOT = Path(__file__).resolve().parent.parent.parent

FAMILIES = ("ask", "tell", "count", "list")
HELD_OUT = ("plan", "name")
PROMPTS_PER_FAMILY = 8


@dataclass(frozen=True)
class Project:
    """A config file and its prompts in one folder, and a storage."""

    folder: Path
    environment: dict[str, str]
    port: int
    storage: Location

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def registered_name(self) -> str:
        return f"head-{self.folder.name}"

    def command(self, *arguments: str, pipeline: str = "full") -> list[str]:
        return [sys.executable, f"pipelines/{pipeline}.py", "--config", str(self.config), *arguments]

    def run(self, *arguments: str, pipeline: str = "full", timeout_s: float = 1400) -> subprocess.CompletedProcess[str]:
        """Run to the end; stdout and stderr come back together in `stdout`."""
        return subprocess.run(
            self.command(*arguments, pipeline=pipeline),
            cwd=ROOT,
            env=os.environ | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )

    def run_and_kill(self, when: Callable[[str], bool], *arguments: str, timeout_s: float = 600) -> str:
        """Run, and kill -9 the driver as soon as `when(what it printed)` holds; what it printed comes back."""
        log_path = self.folder / "killed.log"
        with log_path.open("w") as log:
            process = subprocess.Popen(
                self.command(*arguments), cwd=ROOT, env=os.environ | self.environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + timeout_s
        while not when(log_path.read_text(errors="replace")):  # a letter may be half written
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"the moment to kill never came:\n{log_path.read_text(errors='replace')[-4000:]}")
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return log_path.read_text(errors="replace")

    def arms(self) -> dict[str, dict[str, Any]] | None:
        """What the endpoint says of its arms; None where nothing answers."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False, timeout=30).json()["arms"]
        except httpx.TransportError:
            return None

    def manifests(self, stage: str) -> list[dict[str, Any]]:
        """The stage's finished outputs, oldest first."""
        outputs = [self.storage.join(stage, name, "_manifest.json") for name in self.storage.join(stage).folders()]
        found = [json.loads(manifest.read_bytes()) for manifest in outputs if manifest.exists()]
        return sorted(found, key=lambda manifest: manifest["finished_at"])

    def output(self, stage: str, number: int = -1) -> Location:
        return self.storage.join(stage, self.manifests(stage)[number]["fingerprint"])

    def snapshot(self) -> dict[str, tuple[int, int]]:
        """Every file of the storage with its size and the time of its last change, but for what a live endpoint writes by itself."""
        unfinished = {path: (size, 0) for path, size in self.storage.sizes_bytes().items()}
        written = (unfinished | self.storage.stamps()).items()
        return {path: stamp for path, stamp in written if not Path(path).parent.name.endswith(MARKS)}


def make_project(
    folder: Path,
    target: Path,
    environment: dict[str, str],
    mlflow: str,
    port: int,
    storage: str | None = None,
    **changes: Any,
) -> Project:
    """A small run on `target`: 48 short prompts in 6 families, two of them held out. Its storage is in `folder`, unless it is told."""
    storage = storage or str(folder / "storage")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in make_prompts()))
    settings: dict[str, Any] = {
        "target": {"model": str(target), "dtype": "float32", "max_model_len": 256},
        "data": {
            "prompts": str(prompts),
            "held_out_families": list(HELD_OUT),
            "validation_fraction": 0.1,
            "max_new_tokens": 40,
            "rows_per_shard": 8,
        },
        "draft": {"num_layers": 1, "vocab_size": 300},
        "train": {
            "epochs": 4,
            "num_depths": 4,
            "chain_rate": 1.0,
            "learning_rate": 0.01,
            "dtype": "float32",
            "documents_per_step": 1,
        },
        "evaluate": {
            "num_speculative_tokens": 3,
            "num_prompts": 8,
            "max_new_tokens": 40,
            "concurrency": 4,
            "speed_prompts": 6,
            "speed_tokens": 48,
        },
        "ab": {"requests": 12, "concurrency": 2, "max_new_tokens": 24, "port": port, "keep_serving": False},
        "publish": {"name": f"head-{folder.name}"},
        "storage": {"uri": storage},
        "mlflow": {"tracking_uri": mlflow, "experiment": f"test-{folder.name}"},
    }
    for section, values in changes.items():
        settings[section] = settings.get(section, {}) | values
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return Project(folder, environment, port, Location(storage))


def make_prompts() -> list[dict[str, Any]]:
    rows = []
    for family in (*FAMILIES, *HELD_OUT):
        for number in range(PROMPTS_PER_FAMILY):
            turns = [{"role": "user", "content": f"{family} {number} things"}]
            if number == 0:  # a conversation: the target answers both turns
                turns.append({"role": "user", "content": f"and {number + 1} more"})
            rows.append({"family": family, "messages": turns})
    return rows
