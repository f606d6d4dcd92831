#!/usr/bin/env python3
"""One training step of speculators 0.9's P-EAGLE head, measured as it ships.

The step is not re-implemented here: the model comes from speculators' own
`train.cli.build_draft_model`, the arguments from its own `TrainConfig`, and the
steps are run by its own `Trainer.train_epoch` (forward under autocast,
backward, gradient clipping, optimiser, scheduler); this script feeds one batch
that already lies on the GPU and reads the clock in the trainer's step callback.

Where each choice was read (speculators 0.9.0):
  dtype           train/cli.py leaves the model in fp32 ("Model master weights
                  are always kept in fp32", train/config/schema.py DataArgs);
                  train/trainer.py train_epoch wraps the forward, not the
                  backward, in torch.autocast(dtype=bfloat16).
  torch.compile   models/utils.py conditional_torch_compile, on
                  models/peagle/core.py forward: always when CUDA is there.
  attention       schema.py DraftArgs draft_attn_impl = simple_flex_attention
                  (models/attention.py); train/cli.py
                  create_transformer_layer_config makes every layer
                  sliding_attention (window 2048) unless --full-attention-indices
                  names it: --attention sliding (default here too) or full.
  decoder         schema.py: draft_arch qwen3 for peagle, norm_before_residual
                  True, norm_before_fc / fc_norm / norm_output False.
  what trains     models/peagle/config.py embed_requires_grad = True;
                  model.py _init_vocab / _load_verifier_weights freeze lm_head,
                  verifier_lm_head and verifier_norm. So: embed_tokens, fc,
                  layers, norm, mask_hidden.
  loss            schema.py: kl_div for peagle, loss_implementation fused
                  (losses/fused.py, Triton), mean over rows.
  optimiser       train/optimizers.py build_optimizers; "adamw" is
                  TrainerConfig's default and this script's, plain
                  torch.optim.AdamW(lr 1e-3, weight_decay 0.01); NOTE that the
                  command line's default (schema.py OptimizerArgs) is muon.
  clipping        train/trainer.py: clip_grad_norm_(1.0), every step.
  COD sampling    models/peagle/data.py; schema.py defaults: num_depths 8,
                  down_sample_ratio 0.7, down_sample_ratio_min 0.2,
                  max_anchors 512. With max_anchors 512 only 512 random
                  positions start chains; --max-anchors 0 (default here) means n,
                  which switches that cap off; 512 gives the shipped default.
  data            models/eagle3/data.py shift_batch drops one token, so the
                  document has n + 1 raw tokens and n trained positions;
                  train/data.py CollateFn packs it.
Differences from `speculators train`: no data loader and no host-to-device copy
(the batch is on the GPU), and the trainer's per-step logging is off (log_freq),
both in the peer's favour. One torch.cuda.synchronize a step, as its logging does.

Warm-up: --warmup steps (3), then more until two steps in a row compile nothing.
With --keep < 1 COD's row count moves by one or so between steps, and torch.compile
builds its graphs a second time, with dynamic shapes, when it first sees that.
--shapes dynamic (auto: when --keep < 1) brings this about in the warm-up by one
batch whose first n/16 tokens are not supervised, as a prompt's are; real training
always ends up there, since every batch's loss mask differs. --shapes static (auto:
when --keep is 1) leaves the all-rows case at its one shape.

Stand-ins: where `datasets`, `openai` or `httpx` is not installed, an empty
module of that name is put in sys.modules. speculators imports them at the top
of its data-preparation modules and calls nothing of them on this path.

On a machine with no GPU (debugging only): attention sdpa instead of flex (flex
has no CPU backward), the eager loss instead of the Triton one, no torch.compile
(conditional_torch_compile's own rule), CPU autocast.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

WARMUP = 3
MOST_EXTRA_WARMUP = 15


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    p.add_argument("--n", type=int, default=8192, help="trained positions of the one document")
    p.add_argument(
        "--keep", type=float, default=1.0, help="COD down_sample_ratio r; 1: all rows (speculators' default: 0.7)"
    )
    p.add_argument("--floor", type=float, default=0.2, help="COD down_sample_ratio_min f")
    p.add_argument(
        "--max-anchors", type=int, default=0, help="cap on chain starts; 0: n, no cap (speculators' default: 512)"
    )
    p.add_argument("--depths", type=int, default=8, help="num_depths, K")
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--warmup", type=int, default=WARMUP, help="at least so many; more while steps still compile")
    p.add_argument(
        "--shapes",
        choices=("auto", "static", "dynamic"),
        default="auto",
        help="auto: dynamic when --keep < 1 or --max-anchors caps",
    )
    p.add_argument("--json", type=Path, help="also write the line to FILE")
    p.add_argument(
        "--attention",
        choices=("sliding", "full"),
        default="sliding",
        help="sliding: speculators' default, all layers window 2048; full: --full-attention-indices of all layers",
    )
    p.add_argument("--window", type=int, default=2048)
    p.add_argument(
        "--attn-impl",
        choices=("simple_flex_attention", "sdpa", "eager"),
        help="draft_attn_impl (default: simple_flex_attention; sdpa on CPU)",
    )
    p.add_argument("--loss", default="kl_div")
    p.add_argument("--loss-implementation", choices=("fused", "eager"), help="default: fused; eager on CPU")
    p.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    p.add_argument("--gradient-checkpointing", action="store_true")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--hidden", type=int, default=4096)
    p.add_argument("--heads", type=int, default=32)
    p.add_argument("--kv-heads", type=int, default=8)
    p.add_argument("--head-dim", type=int, default=128)
    p.add_argument("--mlp", type=int, default=12288)
    p.add_argument("--vocab", type=int, default=151936)
    p.add_argument("--draft-vocab", type=int, default=32000)
    p.add_argument("--seed", type=int, default=42)
    p.add_argument("--cpu", action="store_true", help="run on the CPU even where there is a GPU")
    p.add_argument(
        "--workdir",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where the made-up verifier goes (one embedding matrix in bf16, 1.2 GB at full size; reused)",
    )
    return p.parse_args()


ARGS = arguments()
if ARGS.cpu:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402
import transformers  # noqa: E402  (before the stand-ins: it looks for `datasets` itself)
from safetensors.torch import save_file  # noqa: E402
from transformers import Qwen3Config  # noqa: E402


def stand_in(*names: str) -> list[str]:
    """Empty modules for absent packages; every attribute is an empty class."""
    made = []
    for name in names:
        root = name.split(".")[0]
        if root not in made and importlib.util.find_spec(root) is not None:
            continue
        module = types.ModuleType(name, "stand-in of peer.py")
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []

        def attribute(attr: str, name: str = name):
            if attr.startswith("__"):
                raise AttributeError(attr)
            return type(attr, (Exception,), {"__module__": name})

        module.__getattr__ = attribute  # type: ignore[method-assign]
        sys.modules[name] = module
        made.append(name)
    return made


STAND_INS = stand_in("datasets", "httpx", "openai", "openai.types", "openai.types.chat", "openai.types.completion")

import speculators.train.trainer as trainer_module  # noqa: E402
from speculators import SpeculatorModel  # noqa: E402
from speculators.models.eagle3.data import shift_batch  # noqa: E402
from speculators.train.cli import build_draft_model, set_seed  # noqa: E402
from speculators.train.config import TrainConfig  # noqa: E402
from speculators.train.data import CollateFn  # noqa: E402
from speculators.train.trainer import Trainer, TrainerConfig  # noqa: E402
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


def make_verifier(a: argparse.Namespace) -> Path:
    """A local verifier of Qwen3-8B's shape that has only what speculators loads:
    config.json, the embedding (tied, so it is the LM head too) and the final norm."""
    path = a.workdir / f"peer-verifier-{a.hidden}-{a.heads}-{a.kv_heads}-{a.head_dim}-{a.mlp}-{a.vocab}"
    if (path / "model.safetensors").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.mlp, num_hidden_layers=36,
        num_attention_heads=a.heads, num_key_value_heads=a.kv_heads, head_dim=a.head_dim,
        max_position_embeddings=max(40960, a.n + 1), rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(path)
    generator = torch.Generator(DEVICE).manual_seed(0)
    embed = torch.empty(a.vocab, a.hidden, dtype=torch.bfloat16, device=DEVICE).normal_(0, 0.02, generator=generator)
    partial = path / f"partial-{os.getpid()}"
    save_file(
        {"model.embed_tokens.weight": embed.cpu(), "model.norm.weight": torch.ones(a.hidden, dtype=torch.bfloat16)},
        partial,
    )
    partial.rename(path / "model.safetensors")
    return path


def make_batch(a: argparse.Namespace, num_aux: int) -> dict:
    """The collated batch of one document, as train/data.py makes it."""
    raw = a.n + 1  # shift_batch drops one token
    cpu = torch.Generator().manual_seed(a.seed)
    sample = {
        "hidden_states": torch.empty(raw, num_aux * a.hidden, dtype=torch.bfloat16).normal_(generator=cpu),
        "input_ids": torch.randint(0, a.vocab, (raw,), generator=cpu),
        "verifier_last_hidden_states": torch.empty(raw, a.hidden, dtype=torch.bfloat16).normal_(generator=cpu),
        "loss_mask": torch.ones(raw, dtype=torch.long),  # data_generation/preprocessing.py: long
        "lengths": torch.tensor([raw]),
        "position_ids": torch.arange(raw),
    }
    collate = CollateFn(a.n, a.hidden, num_target_layers=num_aux, dtype=torch.bfloat16, preprocess=shift_batch)
    batch = collate([sample])
    return {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


class Batches:
    """What Trainer uses of a DataLoader: its length, its items, its batch_sampler.
    Gives `batch` until `stop` is set, and `odd`, if any, at the second step."""

    batch_sampler = None

    def __init__(self, batch: dict, odd: dict | None, length: int):
        self.batch, self.odd, self.length, self.stop = batch, odd, length, False

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        step = 0
        while not self.stop:
            step += 1
            yield dict(self.odd if self.odd and step == 2 else self.batch)


def nbytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def measure(a: argparse.Namespace) -> dict:
    attn_impl = a.attn_impl or ("simple_flex_attention" if CUDA else "sdpa")
    loss_impl = a.loss_implementation or ("fused" if CUDA else "eager")
    verifier = make_verifier(a)
    save_path = a.workdir / f"peer-no-checkpoints-{os.getpid()}"  # Trainer only looks whether it is there

    # The flags of `speculators train`, resolved by its own code.
    flags = {
        "speculator_type": "peagle",
        "verifier_name_or_path": str(verifier),
        "num_layers": a.layers,
        "draft_vocab_size": a.draft_vocab,
        "mask_token_id": a.vocab - 1,  # else it is looked up in the tokenizer
        "sliding_window": a.window,
        "draft_attn_impl": attn_impl,
        "total_seq_len": a.n,
        "max_anchors": a.max_anchors or a.n,
        "num_depths": a.depths,
        "down_sample_ratio": a.keep,
        "down_sample_ratio_min": a.floor,
        "loss_fn": a.loss,
        "loss_implementation": loss_impl,
        "optimizer": a.optimizer,
        "gradient_checkpointing": a.gradient_checkpointing,
        "log_freq": 10**9,
        "save_path": str(save_path),
        "seed": a.seed,
    }
    if a.attention == "full":
        flags["full_attention_indices"] = list(range(a.layers))
    args = argparse.Namespace(**TrainConfig.from_sources(cli=flags, argv=sys.argv).flatten())

    # From here on as train/cli.py main(), without data loaders and loggers.
    set_seed(args.seed, args.deterministic_cuda)
    if a.draft_vocab < a.vocab:
        frequencies = {i: a.vocab - i for i in torch.randperm(a.vocab)[: a.draft_vocab].tolist()}
        d2t, t2d = build_vocab_mappings_from_distribution(frequencies, a.draft_vocab, a.vocab)
    else:
        d2t = t2d = None
    model_class = SpeculatorModel.registry["peagle"]
    model = build_draft_model(args, model_class, t2d, d2t, a.draft_vocab)
    train_kwargs, val_kwargs = model_class.get_trainer_kwargs(**vars(args))
    config = TrainerConfig(
        num_epochs=args.epochs, save_path=args.save_path, lr=args.lr,
        train_call_kwargs=train_kwargs, val_call_kwargs=val_kwargs,
        optimizer=args.optimizer, weight_decay=args.weight_decay,
        muon_lr=args.muon_lr, muon_momentum=args.muon_momentum,
        muon_weight_decay=args.muon_weight_decay, muon_ns_steps=args.muon_ns_steps,
        muon_adjust_lr_fn=args.muon_adjust_lr_fn, scheduler_type=args.scheduler_type,
        hidden_states_dtype=getattr(torch, args.hidden_states_dtype),
        log_freq=args.log_freq, gradient_checkpointing=args.gradient_checkpointing,
    )  # fmt: skip
    if not CUDA:  # Trainer knows accelerators only
        trainer_module.get_local_rank = lambda: "cpu"
    batch = make_batch(a, len(model.target_layer_ids))
    # max_anchors draws from all positions, so its row counts are as they fall
    shapes = a.shapes if a.shapes != "auto" else "dynamic" if a.keep < 1 or 0 < a.max_anchors < a.n else "static"
    odd = None
    if shapes == "dynamic":
        odd = dict(batch, loss_mask=batch["loss_mask"].clone())
        odd["loss_mask"][:, : max(1, a.n // 16)] = 0
    batches = Batches(batch, odd, a.warmup + a.repeats)
    trainer = Trainer(model, config, batches)
    if not CUDA:
        trainer.device_type = "cpu"
    trainer.global_step = 1  # so that no step is a logged one (global_step % log_freq)

    seen: dict[str, torch.Tensor] = {}

    def keep_metrics(_module, _inputs, output):
        seen.update(output[2])

    model.register_forward_hook(keep_metrics)

    intervals: list[float] = []  # of the timed steps
    rows: list[int] = []
    compiled: list[int] = []  # graphs known after each step
    warm: dict[str, float] = {}
    clock: dict[str, float] = {}

    def after_step():
        if CUDA:
            torch.cuda.synchronize()
        now = time.perf_counter()
        took = now - clock["start"]
        compiled.append(graphs())
        if not warm:
            warm_steps = len(compiled)
            warm_first.setdefault("s", took)
            settled = warm_steps > 2 and compiled[-1] == compiled[-3]
            if warm_steps >= a.warmup and (settled or warm_steps >= a.warmup + MOST_EXTRA_WARMUP):
                warm.update(steps=warm_steps, graphs=compiled[-1])
                if CUDA:
                    warm["peak"] = torch.cuda.max_memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
        else:
            intervals.append(took)
            rows.append(int(seen["full_acc_total"].item()))  # every row is supervised
            batches.stop = len(intervals) == a.repeats
        print(
            f"peer: {'timed' if intervals else 'warm-up'} step {took:.3f} s, {int(seen['full_acc_total'].item())} supervised"
            f" rows, {compiled[-1]} graphs",
            file=sys.stderr,
            flush=True,
        )
        if CUDA:
            torch.cuda.synchronize()
        clock["start"] = time.perf_counter()

    warm_first: dict[str, float] = {}
    clock["start"] = time.perf_counter()
    # tqdm.rich draws on stdout, which is for the one line of JSON
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train_epoch(0, step_callback=after_step)

    params = list(model.parameters())
    trainable = [p for p in params if p.requires_grad]
    states = [
        t for o in trainer.optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)
    ]
    held = nbytes(params) + nbytes(states)
    peak = torch.cuda.max_memory_allocated() if CUDA else 0
    ms = statistics.median(intervals) * 1e3
    dtypes: dict[str, dict[str, int]] = {}
    for name, p in model.named_parameters():
        group = dtypes.setdefault(name.split(".")[0], {})
        key = f"{str(p.dtype).removeprefix('torch.')}{'' if p.requires_grad else ' frozen'}"
        group[key] = group.get(key, 0) + p.numel()
    return {
        "ms": round(ms, 3),
        "tokens_per_s": round(a.n / (ms / 1e3), 1),
        "rows": int(statistics.median(rows)),
        "rows_per_s": round(statistics.median(rows) / (ms / 1e3), 1),
        "rows_min_max": [min(rows), max(rows)],
        "rows_by_depth": [int(seen[f"position_{d}_acc_total"].item()) for d in range(a.depths)],
        "step_ms": [round(x * 1e3, 3) for x in intervals],
        "warmup_steps": warm["steps"],
        "first_step_s": round(warm_first["s"], 1),
        "shapes": shapes,
        "graphs_compiled_while_timed": graphs() - warm["graphs"],
        "loss": float(seen["loss_sum"].item()),
        "param_bytes": nbytes(params),
        "trainable_param_bytes": nbytes(trainable),
        "trainable_params": sum(p.numel() for p in trainable),
        "optimizer_state_bytes": nbytes(states),
        "batch_bytes": nbytes(v for v in batch.values() if isinstance(v, torch.Tensor)),
        "peak_bytes": peak,
        "peak_above_params_and_state_bytes": peak - held if CUDA else None,
        "peak_bytes_warmup": warm.get("peak"),
        "reserved_bytes": torch.cuda.max_memory_reserved() if CUDA else None,
        "params": dtypes,
        "n": a.n, "depths": a.depths, "keep": a.keep, "floor": a.floor,
        "max_anchors": flags["max_anchors"], "attention": a.attention,
        "window": a.window if a.attention == "sliding" else None,
        "attn_impl": attn_impl, "loss_fn": a.loss, "loss_implementation": loss_impl,
        "optimizer": a.optimizer, "gradient_checkpointing": a.gradient_checkpointing,
        "layers": a.layers, "hidden": a.hidden, "heads": [a.heads, a.kv_heads, a.head_dim],
        "mlp": a.mlp, "vocab": a.vocab, "draft_vocab": a.draft_vocab,
    }  # fmt: skip


def flex_autocast() -> bool:
    """Whether this torch casts flex_attention's q, k, v to the autocast dtype. If
    not, Qwen3's q_norm/k_norm (fp32 weights) hand it fp32 q and k, which is slow."""
    from torch._C import DispatchKey

    return DispatchKey.AutocastCUDA in torch.ops.higher_order.flex_attention.py_kernels


def main() -> int:
    warnings.filterwarnings("ignore", category=UserWarning, module="speculators")
    about = {
        "peer": "speculators P-EAGLE",
        "speculators": importlib.metadata.version("speculators"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(0) if CUDA else "cpu",
        "compiled": CUDA and os.environ.get("TORCH_COMPILE_DISABLE", "0") != "1",
        "flex_autocast": flex_autocast(),
        "stand_ins": STAND_INS,
        "argv": sys.argv[1:],
    }
    code = 0
    try:
        result = {**measure(ARGS), **about}
    except torch.OutOfMemoryError as error:
        result = {"error": f"out of memory: {error}".split(". ")[0], "n": ARGS.n, "keep": ARGS.keep,
                  "floor": ARGS.floor, "peak_bytes": torch.cuda.max_memory_allocated(), **about}  # fmt: skip
        code = 3
    line = json.dumps(result)
    print(line, flush=True)
    if ARGS.json:
        ARGS.json.parent.mkdir(parents=True, exist_ok=True)
        ARGS.json.write_text(line + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
