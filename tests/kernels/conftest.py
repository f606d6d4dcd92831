"""Triton reads TRITON_INTERPRET when it is imported, and vLLM does not start with it: so the tests of the kernels run in a process
of their own (test_interpreter.py), or alone: `TRITON_INTERPRET=1 python -m pytest tests/kernels`."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore = ["test_interpreter.py"] if INTERPRETED else ["test_fused.py", "test_distillation.py"]
