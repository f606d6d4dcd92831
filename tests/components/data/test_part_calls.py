"""How parts are handed to workers, and what the driver says when they stop; no Ray is needed."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.part_map import PARTS_PER_CALL, _calls, _check
from components.data.part_worker import PartTask
from components.data.parts import CorruptPart, UnknownFormat
from components.data.progress import Stop, WorkersFailed
from components.lease import LeaseLost
from components.section import ConfigError
from components.storage import Location
from tests.components.data.counting import counting_job

SHARD = Location("s3://bucket/responses/0123456789abcdef/part-00003.parquet")


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 8))
def test_a_worker_holds_a_few_whole_parts_or_one_in_pieces(in_pieces: list[bool], replicas: int) -> None:
    tasks = [PartTask(number, in_pieces=is_cut) for number, is_cut in enumerate(in_pieces)]
    calls = [call["tasks"] for call in _calls(counting_job(Location("/nowhere"), replicas=replicas), tasks)]
    assert sorted(task["number"] for call in calls for task in call) == list(range(len(tasks)))
    whole = [call for call in calls if not any(task["in_pieces"] for task in call)]
    assert all(len(call) == 1 for call in calls if call not in whole)
    assert all(len(call) <= PARTS_PER_CALL for call in whole)
    # as few calls as that allows, but enough for every worker to have one
    num_whole = in_pieces.count(False)
    assert len(whole) <= max(-(-num_whole // PARTS_PER_CALL), min(replicas, num_whole))


@pytest.mark.parametrize(
    "error", [CorruptPart(SHARD, 2, "its checksum is not its own"), UnknownFormat(SHARD, None, "it has format 1")]
)
def test_a_damaged_input_ends_the_job_with_its_own_fix(error: CorruptPart) -> None:
    words = f"Traceback (most recent call last):\n  ...\n{type(error).__module__}.{type(error).__name__}: {error}\n"
    with pytest.raises(WorkersFailed) as raised:
        _check(counting_job(Location("/nowhere")), Stop("damaged", words))
    assert str(raised.value) == f"counting: {error}"


def test_a_lost_lease_ends_the_job_as_what_it_is() -> None:
    error = LeaseLost("s3://bucket/_lease.json was taken over by process 1 on elsewhere")
    with pytest.raises(LeaseLost) as raised:
        _check(
            counting_job(Location("/nowhere")),
            Stop("lost", f"Traceback:\n  ...\ncomponents.lease.LeaseLost: {error}\n"),
        )
    assert str(raised.value) == str(error)


def test_other_ends_of_a_job_are_told_apart(tmp_path: Path) -> None:
    job = counting_job(Location(str(tmp_path)))
    _check(job, None)
    with pytest.raises(OSError, match="No space"):
        _check(job, Stop("full", "OSError: [Errno 28] No space left on device"))
    with pytest.raises(ConfigError, match=r"storage\.uri: it cannot be read or written \(OSError: away\)"):
        _check(job, Stop("storage", "OSError: away"))
    with pytest.raises(WorkersFailed, match=r"workers die of whatever they are given; (.|\n)*CUDA"):
        _check(job, Stop("rows", "CUDA error"))
