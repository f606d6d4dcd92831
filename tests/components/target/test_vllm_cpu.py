import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.sample import rejection_sampler

from components.target.vllm_cpu import expand_batch_to_tokens
from tests.engines import cpu_engine

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="mends vLLM's CPU build only")

ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_every_token_has_the_value_of_its_request(dtype: torch.dtype) -> None:
    values = torch.tensor([3, 7, 0], dtype=dtype)
    assert expand_batch_to_tokens(values, ENDS, 5, 0, 1).tolist() == [3, 3, 1, 1, 1]
    assert expand_batch_to_tokens(values, ENDS, 5).dtype == dtype


def test_vllm_loads_the_mend() -> None:
    load_general_plugins()
    temperature = torch.tensor([0.7, 0.2, 1.5])
    expanded = rejection_sampler.expand_batch_to_tokens(temperature, ENDS, 5, 0, 1)
    assert expanded.tolist() == pytest.approx([0.7, 0.7, 1.5, 1.5, 1.5])


def test_a_fresh_process_has_it_too() -> None:
    """As an engine's own process has: nothing but vLLM's plugin loading."""
    code = (
        "import torch; from vllm.plugins import load_general_plugins; load_general_plugins();"
        "from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens as f;"
        "assert f(torch.tensor([0.5]), torch.tensor([3], dtype=torch.int32), 3, 0, 1).tolist() == [0.5] * 3"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_sampling_with_speculation_at_a_low_temperature_is_greedy(permutation_target: tuple[Path, list[int]]) -> None:
    """The limit that a temperature of whatever the memory held does not have."""
    path, cycle = permutation_target
    prompt = {"prompt_token_ids": cycle + cycle[:9]}
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    with cpu_engine(path, speculative_config=speculation, disable_log_stats=False) as llm:
        greedy, cold = (
            llm.generate([prompt] * 4, SamplingParams(temperature=t, max_tokens=40, ignore_eos=True), use_tqdm=False)
            for t in (0.0, 0.05)
        )
        accepted = next(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    assert [o.outputs[0].token_ids for o in cold] == [o.outputs[0].token_ids for o in greedy]
    assert accepted > 0
