import pytest

from components.config import Settings
from components.section import ConfigError
from components.stage import Artifact
from components.storage import Location
from pipelines.cli import make_pipeline
from pipelines.serve import define_experiment, define_stages, watch_champion


def test_a_watch_reads_the_live_records() -> None:
    pipeline = make_pipeline([], Settings.model_validate({"ab": {"record_requests": False}}))
    pipeline.artifacts["champion"] = Artifact("champion", Location("/none"), "", {})
    with pytest.raises(ConfigError, match=r"ab\.record_requests"):
        watch_champion(pipeline, allow_gap=False)


def test_an_experiment_fetches_the_challenger_as_well() -> None:
    serving, experiment = (
        [stage.name for stage in define(Settings())] for define in (define_stages, define_experiment)
    )
    assert experiment == [*serving, "challenger"]
