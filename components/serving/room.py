"""Whether a further copy of the target fits beside those that run."""

from collections.abc import Sequence

from ray.util.placement_group import placement_group, remove_placement_group

ROOM_TIMEOUT_S = 10.0
"""Ray grants free resources within a second; what was given back a moment ago takes a little longer."""


def has_room(bundles: Sequence[dict[str, float]]) -> bool:
    """Whether these bundles of resources are free now, on whatever nodes; nothing stays reserved."""
    group = placement_group(list(bundles))
    try:
        return group.wait(ROOM_TIMEOUT_S)
    finally:
        remove_placement_group(group)
