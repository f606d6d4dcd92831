"""Time and memory of a whole training step on a GPU, and of the same step by speculators in a process of its own.

    python -m components.training.benchmark --json result.json

A 4-layer head shaped for Qwen3-8B, one document of random features with every token supervised, K = 8, bf16 over fp32
weights, AdamW over all parameters. A step is all that the trainer does: batch from host memory to the optimiser's end.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from components.config import TrainConfig
from components.draft.batch import Document, PackedBatch
from components.draft.head import DraftHead
from components.draft.head_config import HeadConfig
from components.draft.losses import Teacher
from components.training.order import Entry
from components.training.trainer import Trainer
from kernels.chain_attention.benchmark import COD, K, Lengths, Result, Sampling, require_gpu, write_result

HEAD = HeadConfig(
    hidden_size=4096, target_hidden_size=4096, aux_layers=(2, 18, 33), num_layers=4, num_heads=32, num_kv_heads=8,
    head_dim=128, intermediate_size=12288, vocab_size=151936, draft_vocab_size=32000, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6}, max_position_embeddings=1 << 20, mask_token_id=151935,
)  # fmt: skip
PRODUCT_TFLOPS = 779.0
"""A large dense bf16 product on the H200 measured: the floor counts the step's products at this rate."""
WARMUP = 40
"""Steps before those that count, where chains are drawn: cuDNN plans each block's shape when it first occurs, in 0.1 s."""
GROUPS = {
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
    "attention, cuDNN": ("cudnn", "sdpa"),
    "attention, Triton": ("_forward_kernel", "_delta_kernel", "_dq_kernel", "_dkv_kernel", "_band_kernel"),
    "loss": ("_loss_kernel",),
    "between products, compiled": ("triton_",),
    "optimiser": ("adam", "norm_", "multi_tensor"),
}


def random_document(n: int) -> Document:
    """n tokens, all of one answer, in host memory: reading ahead and copying are part of a step."""
    generator = torch.Generator("cuda").manual_seed(0)

    def features(width: int) -> torch.Tensor:
        return torch.randn(n, width, generator=generator, device="cuda", dtype=torch.bfloat16).cpu()

    ids = torch.randint(0, HEAD.vocab_size - 1, (n,), generator=generator, device="cuda").cpu()
    width = HEAD.target_hidden_size
    return Document(ids, torch.ones_like(ids, dtype=torch.bool), features(HEAD.num_aux_layers * width), features(width))


class Recipe(NamedTuple):
    """What of the settings a step's time depends on."""

    rows_per_part: int | None = None
    checkpointing: bool | None = None
    train_lm_head: bool = True
    sparse: bool = False
    """Embeddings by SparseAdam."""


def make_trainer(document: Document, keep: tuple[float, float], recipe: Recipe = Recipe()) -> Trainer:
    """A trainer whose every step sees the same document, with fresh chains."""
    config = TrainConfig(
        epochs=1 << 20, num_depths=K, chain_rate=keep[0], chain_floor=keep[1], documents_per_step=1,
        rows_per_part=recipe.rows_per_part or "auto",
        activation_checkpointing="auto" if recipe.checkpointing is None else recipe.checkpointing,
        train_lm_head=recipe.train_lm_head, embedding_updates="sparse" if recipe.sparse else "dense",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        head = DraftHead(HEAD, torch.arange(HEAD.draft_vocab_size) * 4)
        lm_head_UT = torch.randn(HEAD.draft_vocab_size, HEAD.target_hidden_size, dtype=torch.bfloat16) / 64
        head.lm_head.requires_grad_(config.train_lm_head)
        head.embed_tokens.sparse = recipe.sparse
        teacher = Teacher(torch.ones(HEAD.target_hidden_size), HEAD.rms_norm_eps, lm_head_UT)
    for parameter in head.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(0.02 / parameter.data.std())
    return Trainer(head, teacher, [Entry("", 0, 0)], lambda entries: (document for _ in entries), config, device="cuda")


def floor_ms(num_elements: int, num_positions: int, num_chain_rows: int, train_lm_head: bool = True) -> float:
    """The step's matrix products outside attention at `PRODUCT_TFLOPS`; layer 0 of a chain row is a constant."""
    heads = (HEAD.num_heads + 2 * HEAD.num_kv_heads) * HEAD.head_dim
    layer = HEAD.hidden_size * (heads + HEAD.num_heads * HEAD.head_dim + 3 * HEAD.intermediate_size)
    lm_head = HEAD.draft_vocab_size * HEAD.hidden_size
    trained = num_elements * HEAD.num_layers * layer - num_chain_rows * HEAD.hidden_size * heads
    first = num_positions * HEAD.hidden_size * (heads + HEAD.num_aux_layers * HEAD.target_hidden_size)
    output = (6 if train_lm_head else 4) * num_elements * lm_head + 2 * num_positions * lm_head
    return (6 * (trained + first) + output) / PRODUCT_TFLOPS / 1e9


def timed_ms(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def measure(n: int, sampling: str, repeats: int, recipe: Recipe, profiled: bool = False) -> dict[str, Any]:
    """Median time of a step and what it held above parameters and optimiser state."""
    gc.collect()  # an earlier case's trainer, which its own thread refers to
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    document = random_document(n)
    trainer = make_trainer(document, COD[sampling], recipe)
    for _ in range(1 if repeats == 1 else WARMUP if COD[sampling][0] < 1 else 3):
        sums = trainer.step()
    state = sum(p.numel() * p.element_size() for p in trainer.head.parameters())
    moments = [x for s in trainer.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    state += sum(x.numel() * x.element_size() for x in moments)
    torch.cuda.reset_peak_memory_stats()
    times = [timed_ms(trainer.step) for _ in range(repeats)]
    options = trainer.options_for(PackedBatch.pack([document], "cuda"))
    elements = int(sums.count)
    floor = floor_ms(elements, int(sums.count_D[0]), elements - int(sums.count_D[0]), recipe.train_lm_head)
    ms = statistics.median(times)
    row = {
        "side": "aerie", "n": n, "sampling": sampling, "rows": elements, "ms": ms, "tokens_per_s": n / ms * 1e3,
        "floor_ms": floor, "share_of_floor": floor / ms, "rows_per_part": options.rows_per_part,
        "recompute_prefix": options.recompute_prefix, "train_lm_head": recipe.train_lm_head,
        "embedding_updates": "sparse" if recipe.sparse else "dense", "state_gib": state / 2**30,
        "above_state_gib": (torch.cuda.max_memory_allocated() - before - state) / 2**30,
    }  # fmt: skip
    if profiled:
        row["profile_ms"] = profile_ms(trainer)
    return row


def profile_ms(trainer: Trainer) -> dict[str, float]:
    """GPU time of one step by kind of kernel; `idle` is the rest of the wall clock."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        wall = timed_ms(trainer.step)
    found: dict[str, float] = {}
    other: dict[str, float] = {}
    for event in profiler.events():
        if event.device_type != DeviceType.CUDA:
            continue
        name = event.name
        kind = next((k for k, keys in GROUPS.items() if any(key in name.lower() for key in keys)), "other")
        found[kind] = found.get(kind, 0.0) + event.device_time / 1e3
        if kind in ("other", "between products, compiled"):
            other[name[:90]] = other.get(name[:90], 0.0) + event.device_time / 1e3
    found["idle"] = wall - sum(found.values())
    largest = sorted(other.items(), key=lambda item: -item[1])[:12]
    return {k: round(v, 2) for k, v in [*sorted(found.items(), key=lambda item: -item[1]), *largest]}


def peer(n: int, sampling: str, repeats: int, attention: str, loss: str) -> dict[str, Any]:
    """The same step by speculators, in a process of its own; with full attention, like ours, or its default window of 2048.

    Raises:
        SystemExit: it did not run; its own words are above.
    """
    keep, floor = COD[sampling]
    command = [
        sys.executable,
        "-m",
        "components.training.benchmark_speculators",
        "--n",
        str(n),
        "--attention",
        attention,
    ]
    command += ["--keep", str(keep), "--floor", str(floor), "--repeats", str(repeats)]
    command += ["--loss-implementation", loss]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"speculators' step failed ({done.returncode}); leave it out with --no-peer")
    found = json.loads(done.stdout.splitlines()[-1])
    return {"side": f"speculators, {attention}", "sampling": sampling, **found}


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table("side", "n", "chains", "rows", "ms", "tokens/s", "of the floor", "GiB above state", "rows a part")
    for row in rows:
        share, part = row.get("share_of_floor"), row.get("rows_per_part", "")
        table.add_row(
            row["side"], str(row["n"]), row["sampling"], str(row["rows"]), f"{row['ms']:.0f}",
            f"{row['tokens_per_s']:.0f}", f"{share:.0%}" if share else "", f"{row['above_state_gib']:.1f}", str(part),
        )  # fmt: skip
    Console(width=140).print(table)


def main(
    lengths: Lengths = [8192],
    sampling: Sampling = list(COD),
    rows_per_part: Annotated[int | None, typer.Option(help="Elements of a part; by default as memory allows.")] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(help="Compute the prefix pass again in the backward; by default when memory asks for it."),
    ] = None,
    train_lm_head: Annotated[bool, typer.Option(help="Train the output layer; speculators does not.")] = True,
    sparse: Annotated[
        bool, typer.Option("--sparse/--dense", help="train.embedding_updates; speculators' are dense.")
    ] = False,
    compare: Annotated[bool, typer.Option("--peer/--no-peer", help="Measure speculators beside it.")] = True,
    peer_loss: Annotated[
        str,
        typer.Option(help="speculators' loss: fused (its default, which did not compile with torch 2.11) or eager."),
    ] = "eager",
    profiled: Annotated[bool, typer.Option("--profile", help="Where the step's time goes, by kind of kernel.")] = False,
    repeats: Annotated[int, typer.Option(help="Steps that count; 1 also means a single step to warm up.")] = 10,
    result: Result = None,
) -> None:
    """Time a training step of a head for Qwen3-8B on this GPU, against speculators'."""
    require_gpu()
    rows = []
    recipe = Recipe(rows_per_part, checkpointing, train_lm_head, sparse)
    for n in lengths:
        for name in sampling:
            rows.append(measure(n, name, repeats, recipe, profiled))
            print(json.dumps(rows[-1]), flush=True)
            for attention in ("full", "sliding") if compare else ():
                rows.append(peer(n, name, repeats, attention, peer_loss))
                print(json.dumps(rows[-1]), flush=True)
            write_result(result, rows)  # after every case: a later one may not fit
    print_table(rows)


if __name__ == "__main__":
    typer.run(main)
