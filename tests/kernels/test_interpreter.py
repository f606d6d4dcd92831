import os
import subprocess
import sys
from pathlib import Path

FUSED = Path(__file__).parent / "test_fused.py"


def test_the_fused_attention_in_tritons_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FUSED)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
