"""Which CPU cores an arm's engine runs on; by default vLLM binds every engine to the first ones."""

import os
from collections.abc import Collection, Mapping

from components.config import StageResources
from components.target.engine import has_gpu

BIND_CORES = "VLLM_CPU_OMP_THREADS_BIND"


def own_cores(resources: StageResources, staying: Collection[str], leaving: Collection[str] = ()) -> Mapping[str, str]:
    """The variable that gives an engine cores of its own, as far as there are any; empty on a GPU or where the user chose.

    Args:
        resources: Of an arm.
        staying: Cores of the arms beside it, as the variable names them; these are shared last.
        leaving: Cores of arms that will be gone soon.
    """
    if has_gpu(resources) or BIND_CORES in resources.env:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    width = min(max(1, int(resources.num_cpus)), len(cores))
    slots = [",".join(map(str, cores[i : i + width])) for i in range(0, len(cores) - width + 1, width)]

    def crowd(slot: str) -> tuple[int, int]:
        return list(staying).count(slot), list(leaving).count(slot)

    return {BIND_CORES: min(slots, key=crowd)}
