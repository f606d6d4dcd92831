"""The registry by hand on a real MLflow server: what is listed, what verification finds, what may be promoted and by whom."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from components.pipeline import Pipeline, Selection
from components.publishing import registry
from components.publishing.bundle import BundleError
from components.publishing.promotion import rollback
from components.publishing.registry import Registry
from components.publishing.stages import registry_of
from components.publishing.versions import find, list_versions, promote_by_hand, verify
from components.section import ConfigError
from tests.components.publishing.rehearsal import rehearse
from tests.conftest import project_environment

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, mlflow_server: str) -> Pipeline:
    """The pipeline that published version 1, the champion, and version 2, which was refused. No test changes either."""
    folder, name = tmp_path_factory.mktemp("versions"), f"publish.name=head-{uuid4().hex[:8]}"
    for quality in (0.6, 0.3):
        done = rehearse(folder, mlflow_server, name, quality=quality)
        done.run(Selection())
    return done


@pytest.fixture
def heads(published: Pipeline) -> Registry:
    """A registered model of the test's own with all that was published: the versions, their tags and bundles, and the aliases."""
    theirs = registry_of(published.settings, published.storage)
    client, ours = theirs.client, replace(theirs, name=f"head-{uuid4().hex[:8]}")
    model = client.get_registered_model(theirs.name)
    client.create_registered_model(ours.name, dict(model.tags), model.description)
    for number in ("1", "2"):
        made = client.get_model_version(theirs.name, number)
        client.create_model_version(ours.name, made.source, made.run_id, dict(made.tags), description=made.description)
    for alias, version in model.aliases.items():
        client.set_registered_model_alias(ours.name, alias, version)
    return ours


def test_the_list_says_what_each_version_is(published: Pipeline) -> None:
    heads = registry_of(published.settings, published.storage)
    refused, promoted = list_versions(heads.client, heads.name, "0.32.0")
    assert (refused.version, refused.verdict, refused.aliases) == (2, "refuse", ("challenger",))
    assert (promoted.version, promoted.verdict, promoted.aliases) == (1, "promote", ("champion",))
    assert promoted.al is not None
    assert refused.al is not None
    assert promoted.al > refused.al > 1
    measured_on = promoted.vllm
    stale = {vllm: list_versions(heads.client, heads.name, vllm)[0].is_stale for vllm in (measured_on, "9.9", None)}
    assert stale == {measured_on: False, "9.9": True, None: True}
    assert list_versions(heads.client, "nothing-here", None) == []


def test_a_refused_head_is_promoted_only_with_a_reason_and_rolled_back(heads: Registry) -> None:
    with pytest.raises(ConfigError, match=r"VERSION: .* version 2: the gate refused it\. Fix: say why with --override"):
        promote_by_hand(heads, "challenger", None)
    promotion = promote_by_hand(heads, "challenger", "a canary for one hour")
    assert (promotion.version, promotion.replaced, promotion.moved) == (2, 1, True)
    tags = heads.client.get_model_version(heads.name, "2").tags
    assert tags[registry.OVERRIDE_TAG] == "a canary for one hour"
    assert promote_by_hand(heads, "2", "again").moved is False
    assert rollback(heads).version == 1
    assert promote_by_hand(heads, "1", None).moved is False


def test_what_is_no_measured_head_of_this_target_is_not_promoted(heads: Registry) -> None:
    client = heads.client
    first = client.get_model_version(heads.name, "1")
    foreign = client.create_model_version(heads.name, first.source, first.run_id)
    with pytest.raises(ConfigError, match="no gate has seen it"):
        promote_by_hand(heads, foreign.version, None)
    with pytest.raises(ConfigError, match="another target than the champion, version 1"):
        promote_by_hand(heads, foreign.version, "because")
    with pytest.raises(ConfigError, match=r"has no version or alias '77'\. Fix: use one of 1, 2, 3"):
        find(client, heads.name, "77")
    client.set_model_version_tag(heads.name, "2", registry.AL_TAG, "nan")
    client.set_model_version_tag(heads.name, "2", registry.VERDICT_TAG, "promote")
    with pytest.raises(ConfigError, match="has no measured acceptance length"):
        promote_by_hand(heads, "2", None)


def test_a_version_whose_digest_is_another_is_found_and_never_promoted(heads: Registry) -> None:
    verify(heads.client, find(heads.client, heads.name, "champion"))
    heads.client.set_model_version_tag(heads.name, "2", registry.HEAD_DIGEST_TAG, "0" * 64)
    with pytest.raises(BundleError, match=r"version 2: aerie\.head_digest is 0000"):
        verify(heads.client, find(heads.client, heads.name, "2"))
    with pytest.raises(BundleError):
        promote_by_hand(heads, "2", "whatever")
    assert registry.champion(heads.client, heads.name).version == "1"


def test_the_command_line_lists_and_refuses_in_one_line(heads: Registry, mlflow_server: str, tmp_path: Path) -> None:
    shared = [f"mlflow.tracking_uri={mlflow_server}", f"publish.name={heads.name}", f"storage.uri={tmp_path}/s"]
    options = [part for setting in shared for part in ("--set", setting)]
    listed = _publish(*options, "list")
    assert listed.returncode == 0
    assert "champion" in listed.stdout
    assert "refuse" in listed.stdout
    refused = _publish(*options, "promote", "2")
    assert refused.returncode == 2
    assert refused.stderr.strip().splitlines()[-1].startswith("error: VERSION: ")
    assert "Traceback" not in refused.stderr
    nothing = _publish(*options, "rollback")
    assert nothing.returncode == 1
    assert "has no earlier champion" in nothing.stderr


def _publish(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "pipelines" / "publish.py"), *arguments]
    return subprocess.run(command, env=project_environment() | {"COLUMNS": "200"}, capture_output=True, text=True)
