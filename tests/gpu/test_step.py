"""A whole step's gradients on a real GPU (Triton, cuDNN, compiled functions, bf16 products), against the step in fp64.

Without the project's other requirements: `python -m pytest --noconftest tests/gpu`.
"""

from collections.abc import Iterator

import pytest
import torch

from components.draft.batch import Document, PackedBatch
from components.draft.chains import ChainRecipe, sample_chains
from components.draft.head import DraftHead
from components.draft.head_config import HeadConfig
from components.draft.losses import Teacher
from components.draft.schedule import StepOptions, StepSums, accumulate_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

NUM_DEPTHS = 5
CONFIG = HeadConfig(
    hidden_size=256, target_hidden_size=256, aux_layers=(2, 5, 8), num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64,
    intermediate_size=512, vocab_size=700, draft_vocab_size=500, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=4096, mask_token_id=699,
)  # fmt: skip


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def documents(dtype: torch.dtype) -> list[Document]:
    """Two long enough for cuDNN's blocks and two that are not; prompts of different lengths."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for n, prompt in ((900, 20), (2, 1), (61, 30), (700, 1)):
        features = torch.randn(n, 4 * 256, generator=generator).bfloat16().to(dtype)
        ids = torch.randint(0, 699, (n,), generator=generator)
        found.append(Document(ids, torch.arange(n) >= prompt, features[:, :768], features[:, 768:]))
    return found


def gradients(dtype: torch.dtype, options: StepOptions) -> tuple[StepSums, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    head = DraftHead(CONFIG, torch.randperm(699)[:500])
    lm_head_UT = (torch.randn(500, 256) / 8).bfloat16()
    head.to("cuda", dtype)
    teacher = Teacher(torch.ones(256, dtype=dtype, device="cuda"), 1e-6, lm_head_UT.to("cuda", dtype))
    batch = PackedBatch.pack(documents(dtype), "cuda")
    chains = sample_chains(batch, ChainRecipe(NUM_DEPTHS, 0.8), [(0, i) for i in range(4)])
    sums = accumulate_gradients(head, batch, chains, teacher, options)
    return sums, {name: p.grad.double() for name, p in head.named_parameters()}


@pytest.fixture(scope="module")
def exact() -> tuple[StepSums, dict[str, torch.Tensor]]:
    return gradients(torch.float64, StepOptions(NUM_DEPTHS, 1 << 20))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows_per_part", [1 << 20, 1000])
@pytest.mark.parametrize(("autocast", "tolerance"), [(None, 2e-5), (torch.bfloat16, 3e-2)])
def test_equals_fp64(
    exact: tuple[StepSums, dict[str, torch.Tensor]],
    autocast: torch.dtype | None,
    tolerance: float,
    rows_per_part: int,
    recompute: bool,
) -> None:
    sums, grads = gradients(torch.float32, StepOptions(NUM_DEPTHS, rows_per_part, "kl", autocast, recompute))
    assert torch.equal(sums.count_D, exact[0].count_D)
    assert abs(float(sums.loss / exact[0].loss) - 1) < tolerance / 10
    off = {name: float((grads[name] - true).norm() / true.norm()) for name, true in exact[1].items()}
    assert max(off.values()) < tolerance, off
