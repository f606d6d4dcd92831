"""Runs one generated program where it can do no harm; `sandbox.run_program` starts this file in a process of its own.

Standard library only, and no import of the project: the process sees neither its packages nor its settings. The program comes on standard
input. Where it runs to its end, `<token> passed` is written to what was standard output. In the order below it loses its standard streams,
gets its limits, loses the file system (Landlock, kernel 5.13) and, by Python's audit events, sockets, processes and `ctypes`.
"""

import ctypes
import json
import os
import resource
import sys
import sysconfig
from typing import Any

LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
"""System call numbers, the same on every architecture (linux/landlock.h)."""
RULE_PATH_BENEATH = 1
READ_FILE, READ_DIR = 1 << 2, 1 << 3
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Landlock ABI -> how many file rights it knows (each one bit, from the lowest); later ones know at least the last."""
NET_RIGHTS, SCOPES = 0b11, 0b11
"""TCP bind and connect (ABI 4); abstract Unix sockets and signals to others (ABI 6)."""
PR_SET_NO_NEW_PRIVS = 38
READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/urandom")
"""Beside Python's own library; for reading only, nothing may be run from there."""
MAX_FILE_BYTES, MAX_OPEN_FILES, MAX_PROCESSES = 1 << 16, 32, 8

REFUSED_EVENTS = (
    "socket.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "subprocess.", "pty.", "ctypes.",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "resource.",
)  # fmt: skip
"""Prefixes of Python's audit events (docs.python.org, "Audit events table") that a program has no use for."""
REFUSED_MODULES = ("_posixsubprocess", "multiprocessing")
"""These start processes without an event."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    limits = json.loads(sys.argv.pop())
    program = sys.stdin.buffer.read().decode()
    result = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    limit_resources(limits)
    if limits["landlock"]:
        lose_files()
    code = compile(program, "<answer>", "exec")
    sys.addaudithook(refuse)
    exec(code, {"__name__": "answer"})
    os.write(result, f"{limits['token']} passed".encode())
    os._exit(0)  # threads that the program left behind end here


def limit_resources(limits: dict[str, Any]) -> None:
    """Caps that hold whatever the kernel offers besides."""
    caps = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if limits["namespaces"]:  # elsewhere the user's other processes count as well
        caps[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for kind, cap in caps.items():
        resource.setrlimit(kind, (cap, cap))


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0 where it has none."""
    return max(0, ctypes.CDLL(None).syscall(LANDLOCK_CREATE_RULESET, None, 0, 1))


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("folder", ctypes.c_int32))


def lose_files() -> None:
    """Nothing can be written, made, removed or run any more, and nothing read but Python's library; no TCP where the kernel can say so.

    Raises:
        OSError: the kernel refuses.
    """
    libc, abi = ctypes.CDLL(None, use_errno=True), landlock_abi()
    files = (1 << FILE_RIGHTS[min(abi, max(FILE_RIGHTS))]) - 1
    attributes = _Ruleset(files, NET_RIGHTS if abi >= 4 else 0, SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _checked(libc.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(attributes), size, 0))
    for path in (sysconfig.get_path("stdlib"), os.path.join(sys.base_prefix, "lib"), *READABLE):
        if os.path.exists(path):
            place = os.open(path, os.O_PATH)
            rule = _PathBeneath(READ_FILE | (READ_DIR if os.path.isdir(path) else 0), place)
            _checked(libc.syscall(LANDLOCK_ADD_RULE, ruleset, RULE_PATH_BENEATH, ctypes.byref(rule), 0))
            os.close(place)
    _checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: raises PermissionError where a program reaches for more than it needs."""
    is_write = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & WRITES)
    is_refused_module = event == "import" and arguments[0] in REFUSED_MODULES
    if is_write or is_refused_module or event.startswith(REFUSED_EVENTS):
        raise PermissionError(event)


def _checked(value: int) -> int:
    if value < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value


if __name__ == "__main__":
    main()
