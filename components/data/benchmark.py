"""What recording features costs beyond the target's own forward pass, and what Ray Data adds to every row.

    python -m components.data.benchmark --json result.json

The features stage's worker, from answers on disk to a shard on disk, and the bare forward pass of the same target
(inference mode, no cache, no lm_head) over the same batches in the same dtype take turns in one process. A ratio is the
median of the turns' ratios. The worker's own steps are timed one after another; in the worker they run beside the next
batch's forward pass, on cores that are free.
"""

import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from components.data.answers import read_answers, write_answers
from components.data.benchmark_ray import measure_ray
from components.data.capturing import CaptureWorker, stored_document
from components.data.documents import Turns, merge_turns
from components.data.extractors.interface import ExtractorSpec
from components.data.extractors.with_transformers import pack
from components.data.part_worker import PartTask, Piece
from components.data.parts import PartAccount, part_name
from components.data.shards import feature_row, write_shard
from components.storage import Location
from components.target.aux_layers import default_aux_layers
from components.target.layers import Captured, capture, load_target
from components.target.resolve import resolve_target

TASK = PartTask(0)
PART = part_name(TASK.number)


@dataclass(frozen=True)
class Setup:
    """Both sides, and what they read."""

    worker: CaptureWorker
    model: PreTrainedModel
    aux_layers: list[int]
    documents: list[Turns]
    batches: list[list[Sequence[int]]]
    """Ids of the same documents."""
    features: Location

    @property
    def num_tokens(self) -> int:
        return sum(len(turns.input_ids) for turns in self.documents)


def make_setup(
    path: str,
    dtype: str,
    folder: Location,
    num_documents: int,
    lengths: tuple[int, int],
    batch_tokens: int,
    threads: int,
) -> Setup:
    """The target at `path` twice, and documents of random ids with `lengths[0]` to `lengths[1]` tokens."""
    responses, features = folder.join("responses"), folder.join("features")
    model = load_target(path, getattr(torch, dtype), "cuda" if torch.cuda.is_available() else "cpu")
    _write_answers(responses.join(PART), num_documents, lengths, model.config.vocab_size)
    aux_layers = default_aux_layers(len(model.get_decoder().layers))
    spec = ExtractorSpec(
        "transformers", path, tuple(aux_layers), len(model.get_decoder().layers), dtype, batch_tokens, threads
    )
    worker = CaptureWorker(features, lambda done: None, responses, spec)
    documents = list(merge_turns(read_answers(responses.join(PART))))
    return Setup(worker, model, aux_layers, documents, _packs(documents, batch_tokens), features)


def measure_capture(setup: Setup, rounds: int) -> dict[str, Any]:
    """Tokens a second of both sides, their ratio, and what the worker does beside the forward pass.

    Args:
        setup: From `make_setup`.
        rounds: Turns that count, after one that does not.

    Returns:
        Figures; times in milliseconds for 1,000 tokens, medians over the turns.
    """
    turns = [_turn(setup, worker_first=index % 2 == 0) for index in range(rounds + 1)][1:]

    def ms(call: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(call, turns)) * 1e6 / setup.num_tokens

    ratios = [turn["bare"] / turn["worker"] for turn in turns]
    return {
        "bare_tokens_per_s": 1e6 / ms(lambda t: t["bare"]),
        "worker_tokens_per_s": 1e6 / ms(lambda t: t["worker"]),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "ms_per_1000_tokens": {
            "bare forward pass": ms(lambda t: t["bare"]),
            "the worker, all in all": ms(lambda t: t["worker"]),
            "keeping the states": ms(lambda t: t["capture"] - t["bare"]),
            "checks and bytes": ms(lambda t: t["rows"] - t["checksum"]),
            "checksums": ms(lambda t: t["checksum"]),
            "writing": ms(lambda t: t["write"]),
        },
    }


def packing(batches: Sequence[Sequence[Sequence[int]]], batch_tokens: int) -> dict[str, float]:
    """How full the batches are, and the share of the attention's pairs that lie within one document."""
    sizes = [[len(ids) for ids in batch] for batch in batches]
    tokens = sum(map(sum, sizes))
    return {
        "documents": sum(map(len, sizes)),
        "tokens": tokens,
        "batches": len(sizes),
        "padding_tokens": 0,  # documents stand one after another
        "fill": tokens / (len(sizes) * batch_tokens),
        "attention_within_documents": sum(n * n for s in sizes for n in s) / sum(sum(s) ** 2 for s in sizes),
    }


def _turn(setup: Setup, worker_first: bool) -> dict[str, float]:
    """Seconds of both sides and of the worker's own steps, all over the same documents."""
    sides = {
        "bare": lambda: _bare_forward(setup.model, setup.batches),
        "worker": lambda: setup.worker.make([Piece(TASK, setup.features.join(PART))]),
    }
    times = {side: _seconds(sides[side])[0] for side in sorted(sides, reverse=worker_first)}
    times["capture"], captured = _seconds(lambda: _capture(setup.model, setup.aux_layers, setup.batches))
    times["rows"], rows = _seconds(lambda: _make_rows(setup.documents, captured))
    times["checksum"], _ = _seconds(lambda: [zlib.crc32(r["aux_hidden"], zlib.crc32(r["last_hidden"])) for r in rows])
    times["write"], _ = _seconds(lambda: write_shard(setup.features.join("again"), rows, PartAccount()))
    return times


def _packs(documents: Sequence[Turns], batch_tokens: int) -> list[list[Sequence[int]]]:
    return list(pack([turns.input_ids for turns in documents], batch_tokens))


def _bare_forward(model: PreTrainedModel, batches: Sequence[Sequence[Sequence[int]]]) -> None:
    decoder = model.get_decoder()
    for batch in batches:
        positions = torch.cat([torch.arange(len(ids), device=model.device) for ids in batch])[None]
        with torch.inference_mode():
            decoder(input_ids=_packed(batch, model.device), position_ids=positions, use_cache=False)


def _capture(
    model: PreTrainedModel, aux_layers: list[int], batches: Sequence[Sequence[Sequence[int]]]
) -> list[Captured]:
    """The same with the states kept and brought to the CPU, a document each."""
    found: list[Captured] = []
    for batch in batches:
        lengths = [len(ids) for ids in batch]
        captured = capture(model, _packed(batch, model.device), aux_layers, lengths)
        pieces = [states.to("cpu", torch.bfloat16).split(lengths) for states in captured]
        found += [Captured(*states) for states in zip(*pieces, strict=True)]
    return found


def _packed(batch: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor([[i for ids in batch for i in ids]], device=device)


def _make_rows(documents: Sequence[Turns], captured: Sequence[Captured]) -> list[dict[str, Any]]:
    stored = [stored_document(turns, states, PartAccount()) for turns, states in zip(documents, captured, strict=True)]
    return [feature_row(document, document.key, "train") for document in stored if document is not None]


def _seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """How long it takes, with what a GPU still has to do, and what it returns."""
    started = time.perf_counter()
    found = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def _write_answers(part: Location, num_documents: int, lengths: tuple[int, int], vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    names = {"family": "random", "split": "train", "turn": 0, "finish_reason": "stop"}
    rows = []
    for index, length in enumerate(torch.randint(lengths[0], lengths[1] + 1, (num_documents,), generator=generator)):
        ids = torch.randint(0, vocab_size, (int(length),), generator=generator).tolist()
        half = len(ids) // 2
        key = {"key": f"{index}:0", "prompt_key": str(index)}
        rows.append(names | key | {"prompt_ids": ids[:half], "output_ids": ids[half:]})
    write_answers(part, rows, PartAccount(kept=len(rows)))


def print_tables(capture: dict[str, Any], ray_data: dict[str, float] | None) -> None:
    table = Table("capture", "ms for 1,000 tokens", "of the forward pass")
    parts = capture["ms_per_1000_tokens"]
    for name, ms in parts.items():
        table.add_row(name, f"{ms:.1f}", f"{ms / parts['bare forward pass']:.1%}")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"bare {capture['bare_tokens_per_s']:.0f} tokens/s, worker {capture['worker_tokens_per_s']:.0f}: "
        f"{capture['ratio']:.1%} ({min(capture['ratios']):.1%} to {max(capture['ratios']):.1%})\n"
        f"{capture['tokens']} tokens of {capture['documents']} documents in {capture['batches']} batches, "
        f"{capture['fill']:.0%} full, no padding; {capture['attention_within_documents']:.0%} of the attention is "
        f"within documents"
    )
    if ray_data:
        console.print(
            f"Ray Data adds {ray_data['ms_per_row']:.3f} ms a row ({ray_data['ms_per_part']:.1f} ms a part of "
            f"{ray_data['rows_per_part']} rows), and {ray_data['start_and_end_s']:.1f} s a job"
        )


def main(
    target: Annotated[str, typer.Option(help="bundled:NAME, a folder or an id.")] = "bundled:smollm2-135m-instruct",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    documents: Annotated[int, typer.Option(help="Documents of random tokens.")] = 8,
    min_tokens: Annotated[int, typer.Option(help="Of the shortest document.")] = 64,
    max_tokens: Annotated[int, typer.Option(help="Of the longest document.")] = 512,
    batch_tokens: Annotated[int, typer.Option(help="As data.batch_tokens.")] = 1024,
    rounds: Annotated[int, typer.Option(help="Turns of both sides; one more warms up.")] = 5,
    threads: Annotated[int, typer.Option(help="Of torch on a CPU, as resources.features.num_cpus.")] = 1,
    with_ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Measure Ray Data, in a Ray of its own.")] = True,
    rows_per_part: Annotated[int, typer.Option(help="Of Ray Data's parts, as data.rows_per_shard.")] = 64,
    result: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
) -> None:
    """Time the features stage's worker against the target's bare forward pass, and Ray Data's share of a row."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, lengths = Location(temporary), (min_tokens, max_tokens)
        path = resolve_target(target, None, Path(temporary) / "target").path
        setup = make_setup(path, dtype, folder, documents, lengths, batch_tokens, threads)
        capture = packing(setup.batches, batch_tokens) | measure_capture(setup, rounds)
        ray_data = measure_ray(rows_per_part, folder.join("idle")) if with_ray else None
    print_tables(capture, ray_data)
    if result:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        about = {"target": target, "dtype": dtype, "device": device, "threads": threads, "torch": torch.__version__}
        result.write_text(json.dumps(about | {"capture": capture, "ray_data": ray_data}, indent=1))


if __name__ == "__main__":
    typer.run(main)
