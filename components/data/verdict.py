"""Why a row that its workers did not survive is lost: the reason that manifests and logs count by, and what was found."""

from typing import NamedTuple

ERROR, STALLED = "worker_error", "worker_stalled"


class Verdict(NamedTuple):
    reason: str
    detail: str


SILENT_DEATH = Verdict("worker_died", "the worker's process ended without a word")
