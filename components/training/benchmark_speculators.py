"""The peer of `benchmark.py`: speculators 0.9's own P-EAGLE step, measured as it is, in a process of its own.

    python -m components.training.benchmark_speculators --keep 0.7 --floor 0.2

It needs `speculators==0.9.*` (pip install --no-deps) and a GPU. Nothing of the step is written here: arguments come from its `TrainConfig`,
the model from its `build_draft_model`, the steps from its `Trainer.train_epoch`. What differs from `speculators train`:

- the batch already lies on the GPU and nothing is logged, both in its favour;
- AdamW instead of the command line's Muon, and no cap on chain starts (`max_anchors` is 512 by default): the step that ours is compared with;
- `--attention full` instead of its window of 2,048, and `--loss-implementation eager` where its fused loss does not compile.

Its master weights are fp32 and its forward runs under bf16 autocast, compiled; embeddings, fc, layers, norm and mask_hidden train, lm_head does not.
With fewer than all rows their number changes from step to step and torch.compile builds its graphs anew, with dynamic shapes: one batch with
a prompt brings that about during the warm-up, which lasts until two steps in a row compile nothing. The last line printed is JSON.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import types
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import typer
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

MOST_WARMUP = 18
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def stand_in(*names: str) -> None:
    """Empty modules for absent packages that speculators imports for its data preparation; the step calls nothing of them."""
    absent = {name for name in names if importlib.util.find_spec(name.split(".")[0]) is None}
    for name in sorted(absent):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        module.__getattr__ = _any_class  # type: ignore[method-assign]
        sys.modules[name] = module


def _any_class(name: str) -> type:
    """What is imported from a stand-in; not a module's own facts, which `inspect` asks every module for."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Exception,), {})


def make_verifier(folder: Path, hidden: int, mlp: int, vocab: int, n: int) -> Path:
    """A target of Qwen3-8B's shape with only what speculators loads: config, embeddings (tied, so lm_head too) and final norm."""
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=36, rms_norm_eps=1e-6,
        max_position_embeddings=max(40960, n + 1), tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **HEADS,
    )  # fmt: skip
    config.save_pretrained(folder)
    embed = torch.empty(vocab, hidden, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02)
    tensors = {"model.embed_tokens.weight": embed.cpu(), "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_batch(n: int, hidden: int, vocab: int, num_aux: int) -> dict[str, Any]:
    """One document of which n positions train (its `shift_batch` drops a token), collated by its own collator."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    sample = {
        "hidden_states": torch.randn(n + 1, num_aux * hidden, dtype=torch.bfloat16),
        "input_ids": torch.randint(0, vocab, (n + 1,)),
        "verifier_last_hidden_states": torch.randn(n + 1, hidden, dtype=torch.bfloat16),
        "loss_mask": torch.ones(n + 1, dtype=torch.long),
        "lengths": torch.tensor([n + 1]),
        "position_ids": torch.arange(n + 1),
    }
    collate = CollateFn(n, hidden, num_target_layers=num_aux, dtype=torch.bfloat16, preprocess=shift_batch)
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in collate([sample]).items()}


@dataclass
class Steps:
    """What its trainer takes for a data loader, and the clock that its step callback reads."""

    batch: dict[str, Any]
    odd: dict[str, Any] | None
    """Another batch for the second step."""
    repeats: int
    times_s: list[float] = field(default_factory=list)
    warm_graphs: list[int] = field(default_factory=list)
    batch_sampler: None = None

    def __len__(self) -> int:
        return MOST_WARMUP + self.repeats

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.started_s = time.perf_counter()
        while len(self.times_s) < self.repeats:
            yield dict(self.odd if self.odd and len(self.warm_graphs) == 1 else self.batch)

    @property
    def is_warm(self) -> bool:
        graphs = self.warm_graphs
        return len(graphs) >= MOST_WARMUP or (len(graphs) >= 3 and graphs[-1] == graphs[-3])

    def after_step(self) -> None:
        synchronize()
        took_s = time.perf_counter() - self.started_s
        if self.is_warm:
            self.times_s.append(took_s)
        else:
            self.warm_graphs.append(num_graphs())
            if self.is_warm and CUDA:
                torch.cuda.reset_peak_memory_stats()
        print(f"step {took_s:.3f} s, {num_graphs()} graphs", file=sys.stderr, flush=True)
        self.started_s = time.perf_counter()


def make_model(flags: dict[str, Any], vocab: int, draft_vocab: int) -> tuple[Any, Any]:
    """Model and trainer settings, as its command line makes them."""
    from speculators import SpeculatorModel
    from speculators.train.cli import build_draft_model, set_seed
    from speculators.train.config import TrainConfig
    from speculators.train.trainer import TrainerConfig
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    args = Namespace(**TrainConfig.from_sources(cli=flags, argv=[]).flatten())
    set_seed(args.seed, args.deterministic_cuda)
    frequencies = {i: vocab - i for i in torch.randperm(vocab)[:draft_vocab].tolist()}
    d2t, t2d = build_vocab_mappings_from_distribution(frequencies, draft_vocab, vocab)
    kind = SpeculatorModel.registry["peagle"]
    model = build_draft_model(args, kind, t2d, d2t, draft_vocab)
    train_kwargs, val_kwargs = kind.get_trainer_kwargs(**vars(args))
    settings = TrainerConfig(
        num_epochs=args.epochs, save_path=args.save_path, lr=args.lr, optimizer=args.optimizer, weight_decay=args.weight_decay,
        train_call_kwargs=train_kwargs, val_call_kwargs=val_kwargs, scheduler_type=args.scheduler_type,
        hidden_states_dtype=getattr(torch, args.hidden_states_dtype), log_freq=args.log_freq,
    )  # fmt: skip
    return model, settings


def run_steps(model: Any, settings: Any, steps: Steps) -> tuple[Any, dict[str, Tensor]]:
    """Its own epoch over `steps`; its trainer, and the metrics of the last step."""
    import speculators.train.trainer as module

    if not CUDA:  # it knows accelerators only
        module.get_local_rank = lambda: "cpu"
    trainer = module.Trainer(model, settings, steps)
    trainer.device_type = DEVICE
    trainer.global_step = 1  # so that no step is a logged one
    seen: dict[str, Tensor] = {}
    model.register_forward_hook(lambda _module, _inputs, output: seen.update(output[2]))
    with contextlib.redirect_stdout(sys.stderr):  # its progress bar; stdout is for the line of JSON
        trainer.train_epoch(0, step_callback=steps.after_step)
    return trainer, seen


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()


CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def main(
    n: Annotated[int, typer.Option(help="Positions of the document that train.")] = 8192,
    keep: Annotated[float, typer.Option(help="COD's r; 1: all rows.")] = 1.0,
    floor: Annotated[float, typer.Option(help="COD's smallest share.")] = 0.0,
    repeats: Annotated[int, typer.Option(help="Steps that count.")] = 10,
    attention: Annotated[str, typer.Option(help="full, or sliding (its default: a window of 2,048).")] = "full",
    loss_implementation: Annotated[str, typer.Option(help="eager, or fused (its default).")] = "eager",
    hidden: Annotated[int, typer.Option(help="Width; smaller to try this without a GPU, as the three below.")] = 4096,
    mlp: Annotated[int, typer.Option(help="Width of the MLP.")] = 12288,
    vocab: Annotated[int, typer.Option(help="Vocabulary.")] = 151936,
    draft_vocab: Annotated[int, typer.Option(help="Draft vocabulary.")] = 32000,
) -> None:
    """Time a training step of speculators' P-EAGLE head for Qwen3-8B (4 layers, K = 8)."""
    # transformers looks for `datasets` itself, so this comes after its import.
    stand_in("datasets", "httpx", "openai", "openai.types", "openai.types.chat", "openai.types.completion")
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "speculator_type": "peagle", "num_layers": 4, "num_depths": 8, "draft_vocab_size": draft_vocab,
            "verifier_name_or_path": str(make_verifier(Path(folder), hidden, mlp, vocab, n)), "mask_token_id": vocab - 1,
            "draft_attn_impl": "simple_flex_attention" if CUDA else "sdpa",  # flex has no backward on a CPU
            "total_seq_len": n, "max_anchors": n, "down_sample_ratio": keep, "down_sample_ratio_min": floor,
            "loss_fn": "kl_div", "loss_implementation": loss_implementation, "optimizer": "adamw",
            "log_freq": 10**9, "save_path": str(Path(folder) / "unused"),
        }  # fmt: skip
        if attention == "full":
            flags["full_attention_indices"] = list(range(4))
        model, settings = make_model(flags, vocab, draft_vocab)
        batch = make_batch(n, hidden, vocab, len(model.target_layer_ids))
        odd = None
        if keep < 1:
            odd = batch | {"loss_mask": batch["loss_mask"].clone()}
            odd["loss_mask"][:, : n // 16] = 0
        steps = Steps(batch, odd, repeats)
        trainer, seen = run_steps(model, settings, steps)
    state = [x for o in trainer.optimizers for s in o.state.values() for x in s.values() if isinstance(x, Tensor)]
    held = num_bytes(model.parameters()) + num_bytes(state)
    ms = statistics.median(steps.times_s) * 1e3
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    found = {
        "n": n, "rows": int(seen["full_acc_total"]), "ms": ms, "tokens_per_s": n / ms * 1e3, "attention": attention,
        "loss_implementation": loss_implementation, "state_gib": held / 2**30, "above_state_gib": (peak - held) / 2**30,
        "graphs_compiled_while_timed": num_graphs() - steps.warm_graphs[-1], "speculators": version("speculators"),
    }  # fmt: skip
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    typer.run(main)
