from typer.testing import CliRunner

from components.config import Settings
from components.section import ConfigError
from pipelines.serve import app, define_experiment, define_stages


def test_there_is_nothing_to_watch_without_an_experiment() -> None:
    result = CliRunner().invoke(app, ["--watch"])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.path == "--watch"


def test_an_experiment_fetches_the_challenger_as_well() -> None:
    serving, experiment = (
        [stage.name for stage in define(Settings())] for define in (define_stages, define_experiment)
    )
    assert experiment == [*serving, "challenger"]
