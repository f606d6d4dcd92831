"""Trying arms on a cluster's endpoint is for one command at a time: an experiment's arms are no others' to replace, nor the A/B stage's.

A cluster has one endpoint, so the claim is a lease named after the cluster. It lies in the storage: commands that share a cluster share that too. What
an operator does by hand (`pipelines/publish.py`, `pipelines/serve.py`) needs no claim: whoever is on call must always be able to move the traffic.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from components.lease import Lease, LeaseHeld, describe_holder, live_holder
from components.section import ConfigError
from components.serving.listing import cluster_name
from components.storage import Location

FOLDER = "endpoints"
"""Of a storage: a folder for each Ray cluster."""
LEASE = "_lease.json"
WORK = "work"


@contextmanager
def claimed_endpoint(work: str, storage: Location, ttl_s: float) -> Iterator[Lease]:
    """The endpoint of this cluster is this command's to try arms on, until the block ends.

    Args:
        work: What others are told that it is claimed for.
        storage: Of the run.
        ttl_s: See `Lease`.

    Raises:
        ConfigError: another live command has it; nothing has changed.
    """
    with ExitStack() as stack:
        try:
            claim = stack.enter_context(Lease(_place(storage), ttl_s, note={WORK: work}))
        except LeaseHeld as error:
            check_unclaimed(storage, ttl_s)
            raise ConfigError("ab.port", str(error), "repeat the command") from None  # it ended between our two looks
        yield claim


def check_unclaimed(storage: Location, ttl_s: float) -> None:
    """Raises ConfigError while another live command tries arms on the endpoint of this cluster."""
    holder = live_holder(_place(storage), ttl_s)
    if holder is not None:
        raise _taken(holder)


def _taken(holder: Mapping[str, Any]) -> ConfigError:
    return ConfigError(
        "ab.port",
        f"the endpoint of this Ray cluster is in use by {holder['note'].get(WORK)} ({describe_holder(holder)}), whose arms would be replaced",
        "wait for its end or interrupt it, then repeat the command: it goes on; or use another Ray cluster and another port. "
        "Training and evaluation need no endpoint: --until evaluation",
    )


def _place(storage: Location) -> Location:
    return storage.join(FOLDER, cluster_name(), LEASE)
