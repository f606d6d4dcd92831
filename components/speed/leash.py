"""Run a command in a process group that ends when standard input closes: with whoever holds the other end, however that one dies.

python leash.py COMMAND ARGUMENT ...       (in a session of its own)
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_S = 20.0


def main(command: list[str]) -> None:
    # A handler and not SIG_IGN, which the command would inherit: the group's signal is meant for the others.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_input, args=(process,), daemon=True).start()
    process.wait()
    os.killpg(0, signal.SIGKILL)  # what the command left behind, and this process


def _end_with_input(process: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    finally:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
