"""Time and memory of one layer's P-EAGLE attention on a GPU, against FlexAttention over the flat N x K mask.

    python -m kernels.chain_attention.benchmark --json result.json

Every figure is a median over repetitions in which both sides take turns in one process; a ratio is the median of the turns'
ratios. Useful FLOPs count the pairs that may see each other: 4 * D * H a pair forward, 2.5 times that backward.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.chain_attention import RowLayout, chain_attention, document_attention

K = 8
SHAPES = {"32/8 D=128": (32, 8, 128), "64/8 D=64": (64, 8, 64)}
COD = {"all rows": (1.0, 0.0), "COD .7/.2": (0.7, 0.2), "COD .8": (0.8, 0.0)}
BACKWARD = 2.5
PEAK_TFLOPS = 989.0
"""Dense bf16 of an H100 or H200 (data sheet); a large matrix product reached 779 on the H200 measured."""


Forward = Callable[[], Sequence[Tensor]]

# Options of every benchmark of heads.
Lengths = Annotated[list[int], typer.Option("--n", help="Tokens of the document. Repeatable.")]
Sampling = Annotated[list[str], typer.Option(help=f"Which chains: {', '.join(COD)}. Repeatable.")]
Result = Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")]


@dataclass(frozen=True)
class Case:
    """One document of n tokens, its chains, and tensors of one layer."""

    name: str
    heads: tuple[int, int, int]
    layout: RowLayout
    depth_R: Tensor
    prefix: tuple[Tensor, Tensor, Tensor]
    chain: tuple[Tensor, Tensor, Tensor]

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs that see each other: of the prefix pass, and of the chains."""
        n = self.layout.num_prefix
        return n * (n + 1) // 2, int((self.layout.anchor_R + 1 + self.depth_R).sum())


def make_case(name: str, n: int, heads: tuple[int, int, int], keep: tuple[float, float]) -> Case:
    """Chains of random length, P(length >= d) = max(r ** d, r_min), over all anchors of one document of n tokens."""
    num_heads, num_groups, head_dim = heads
    shares = np.array([max(keep[0] ** depth, keep[1]) for depth in range(1, K)])
    length = torch.from_numpy((np.random.default_rng(0).random(n)[:, None] < shares).sum(1)).cuda()
    anchor_R = torch.repeat_interleave(torch.arange(n, device="cuda"), length)
    end_N = length.cumsum(0)
    first_R = (end_N - length)[anchor_R]
    layout = RowLayout.of_chains(anchor_R, first_R, torch.zeros_like(anchor_R), K - 1, n)
    depth_R = torch.arange(len(anchor_R), device="cuda") - first_R + 1
    generator = torch.Generator("cuda").manual_seed(0)

    def random(rows: int, count: int) -> Tensor:
        x = torch.randn(rows, count, head_dim, generator=generator, device="cuda", dtype=torch.bfloat16)
        return x.requires_grad_()

    prefix = (random(n, num_heads), random(n, num_groups), random(n, num_groups))
    rows = len(anchor_R)
    return Case(
        name,
        heads,
        layout,
        depth_R,
        prefix,
        (random(rows, num_heads), random(rows, num_groups), random(rows, num_groups)),
    )


def ours(case: Case) -> Forward:
    """Prefix pass and chains."""
    buffers = tuple(torch.zeros_like(x, dtype=torch.float32) for x in case.prefix[1:])
    q, k, v = case.prefix

    def call() -> Sequence[Tensor]:
        chains = chain_attention(case.chain[0], k, v, *case.chain[1:], case.layout, prefix_grads=buffers)
        return document_attention(q, k, v, [case.layout.num_prefix]), chains

    return call


def chains_alone(case: Case) -> Forward:
    buffers = tuple(torch.zeros_like(x, dtype=torch.float32) for x in case.prefix[1:])
    _, k, v = case.prefix
    return lambda: [chain_attention(case.chain[0], k, v, *case.chain[1:], case.layout, prefix_grads=buffers)]


def first_layer(case: Case) -> Forward:
    """The chains alone where rows of one place (anchor + depth) have equal queries, as in a head's first layer."""
    buffers = tuple(torch.zeros_like(x, dtype=torch.float32) for x in case.prefix[1:])
    _, k, v = case.prefix
    place_R = case.layout.anchor_R + case.depth_R
    q = case.chain[0].detach()[place_R % case.layout.num_rows].requires_grad_()
    return lambda: [chain_attention(q, k, v, *case.chain[1:], case.layout, prefix_grads=buffers, equal_queries=True)]


def flat(case: Case) -> Forward:
    """FlexAttention over depth-0 rows followed by the chain rows by depth, with the predicate of design.md as its mask."""
    n = case.layout.num_prefix
    order_R = torch.argsort(case.depth_R, stable=True)
    anchor = torch.cat([torch.arange(n, device="cuda"), case.layout.anchor_R[order_R]]).int()
    depth = torch.cat([torch.zeros(n, device="cuda", dtype=torch.int64), case.depth_R[order_R]]).int()

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        prefix = (depth[k] == 0) & (anchor[k] <= anchor[q])
        return prefix | ((anchor[k] == anchor[q]) & (depth[k] <= depth[q]))

    mask = torch.compile(create_block_mask)(sees, None, None, len(anchor), len(anchor), device="cuda")
    attention = torch.compile(flex_attention)
    q, k, v = (
        torch.cat([p, c[order_R]]).detach().transpose(0, 1)[None].contiguous().requires_grad_()
        for p, c in zip(case.prefix, case.chain, strict=True)
    )
    return lambda: [attention(q, k, v, block_mask=mask, enable_gqa=True)]


def time_ms(call: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def with_backward(forward: Forward) -> Callable[[], None]:
    douts = [torch.randn_like(out) for out in forward()]
    return lambda: torch.autograd.backward(list(forward()), douts)


def peak_gib(call: Callable[[], Any]) -> float:
    """Most memory that the call held above what was there before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(case: Case, peer: bool, repeats: int) -> list[dict[str, Any]]:
    """Forward and forward+backward of the whole attention and of the chains alone; FlexAttention's beside the whole.

    Useful TFLOP/s of the first layer count what its rows see, as for the others: it computes much less.
    """
    prefix_pairs, chain_pairs = case.pairs
    flops = 4 * case.heads[0] * case.heads[2]
    sides: dict[str, tuple[Forward, int]] = {
        "whole": (ours(case), prefix_pairs + chain_pairs),
        "chains": (chains_alone(case), chain_pairs),
        "chains, first layer": (first_layer(case), chain_pairs),
    }
    if peer:
        sides["flex"] = (flat(case), prefix_pairs + chain_pairs)
    found = []
    for direction, factor in (("fwd", 1.0), ("fwd+bwd", 1.0 + BACKWARD)):
        calls = {name: side[0] if factor == 1 else with_backward(side[0]) for name, side in sides.items()}
        memory = {}
        for name, call in calls.items():
            call()  # compiles, plans
            call()
            memory[name] = peak_gib(call)
        turns = [{name: time_ms(call) for name, call in calls.items()} for _ in range(repeats)]
        for name in calls:
            ms = statistics.median(turn[name] for turn in turns)
            row = {
                "case": case.name, "n": case.layout.num_prefix, "rows": case.layout.num_prefix + case.layout.num_rows,
                "side": name, "direction": direction, "ms": ms, "peak_gib": memory[name],
                "useful_tflops": flops * sides[name][1] * factor / ms / 1e9,
            }  # fmt: skip
            if peer and name == "whole":
                row["flex_over_ours"] = statistics.median(turn["flex"] / turn["whole"] for turn in turns)
            found.append(row)
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "case", "n", "rows", "side", "direction", "ms", "useful TFLOP/s", "of peak", "peak GiB", "flex / ours"
    )
    for row in rows:
        ratio = row.get("flex_over_ours")
        table.add_row(
            row["case"], str(row["n"]), str(row["rows"]), row["side"], row["direction"], f"{row['ms']:.2f}",
            f"{row['useful_tflops']:.0f}", f"{row['useful_tflops'] / PEAK_TFLOPS:.0%}", f"{row['peak_gib']:.2f}",
            f"{ratio:.2f}" if ratio else "",
        )  # fmt: skip
    Console(width=140).print(table)


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: this benchmark measures CUDA kernels")


def write_result(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """The figures and what they depend on; nothing without a path."""
    if path:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
        path.write_text(json.dumps(about | {"rows": rows}, indent=1))


def main(
    lengths: Lengths = [2048, 8192, 20480, 65536],
    sampling: Sampling = list(COD),
    shapes: Annotated[list[str], typer.Option(help=f"Heads: {', '.join(SHAPES)}. Repeatable.")] = list(SHAPES),
    flex: Annotated[bool, typer.Option(help="Measure FlexAttention beside it.")] = True,
    repeats: Annotated[int, typer.Option(help="Turns; fewer for long documents.")] = 20,
    result: Result = None,
) -> None:
    """Time one layer's P-EAGLE attention (K = 8) on this GPU against FlexAttention."""
    require_gpu()
    rows = []
    for n in lengths:
        for heads in shapes:
            for keep in sampling:
                case = make_case(f"{heads}, {keep}", n, SHAPES[heads], COD[keep])
                rows += measure(case, flex, max(3, min(repeats, repeats * 8192 // n)))
                write_result(result, rows)  # after every case: a later one may not fit
                torch.cuda.empty_cache()
    print_table(rows)


if __name__ == "__main__":
    typer.run(main)
