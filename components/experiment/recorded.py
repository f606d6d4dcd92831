"""What the registry says of a head that serves."""

import logging

import requests
from mlflow.exceptions import MlflowException

from components.experiment.acceptance import Recorded
from components.publishing import registry
from components.publishing.registry import Registry, find_version
from components.publishing.versions import recorded_al
from components.serving.stages import registered_label

log = logging.getLogger("aerie")


def recorded_acceptance(heads: Registry, head: str) -> Recorded | None:
    """The AL with which a head was registered.

    Args:
        heads: The registered model.
        head: As the endpoint names it.

    Returns:
        None for a head that is no version of this model, a version whose AL or K is not known, and while MLflow does not answer.
    """
    named = registered_label(head)
    if named is None:
        return None
    number, digest = named
    try:
        version = find_version(heads.client, heads.name, number)
    except (MlflowException, requests.RequestException) as error:
        log.warning(
            "watch: MLflow does not say what AL was recorded of %s: %s", head, " ".join(str(error).split())[:300]
        )
        return None
    if version is None or not version.tags.get(registry.HEAD_DIGEST_TAG, "").startswith(digest):
        return None
    al, k = recorded_al(version), version.tags.get(registry.NUM_SPECULATIVE_TOKENS_TAG, "")
    return Recorded(f"what version {number} was registered with (K={k})", al, int(k)) if al and k.isdecimal() else None
