"""What follows from a decision: traffic, then the alias in a real registry; and pairs that cannot be compared."""

import uuid

import pytest
from mlflow.tracking import MlflowClient

from components.config import ExperimentConfig
from components.experiment.journal import Plan, open_journal
from components.experiment.policy import Action
from components.experiment.run import act, check_pair, roll_back
from components.experiment.watch import Alarm
from components.publishing import registry
from components.publishing.promotion import ChampionChanged
from components.publishing.registry import Registry
from components.section import ConfigError
from components.serving.stages import CHALLENGER, CHAMPION
from components.stage import Artifact
from components.storage import Location

ALARMS = [Alarm("acceptance length", "2.1", "2.5")]


def add_version(client, name, alias):
    run_id = client.create_run("0").info.run_id
    version = client.create_model_version(name, f"runs:/{run_id}/bundle", run_id)
    client.set_registered_model_alias(name, alias, version.version)


@pytest.fixture
def heads(mlflow_server, tmp_path):
    """Version 1 is the champion, version 2 the challenger."""
    client = MlflowClient(mlflow_server, mlflow_server)
    name = f"heads-{uuid.uuid4().hex}"
    client.create_registered_model(name)
    for alias in (CHAMPION, CHALLENGER):
        add_version(client, name, alias)
    return Registry(client, name, Location(str(tmp_path / "_lease.json")), 60.0)


@pytest.fixture
def journal(tmp_path):
    return open_journal(Location(str(tmp_path)), Plan("heads", 2, 1, "d" * 64, ExperimentConfig().model_dump(), 0.0))


def champion(heads):
    return int(registry.champion(heads.client, heads.name).version)


@pytest.mark.parametrize("action", [Action.STOP_HARM, Action.STOP_FUTILE])
def test_a_stop_gives_all_traffic_back_and_moves_no_alias(heads, journal, action):
    served = []
    act(action, journal, served.append, heads)
    assert served == [{CHALLENGER: 0.0, CHAMPION: 1.0}]
    assert champion(heads) == 1


def test_a_promotion_moves_traffic_and_alias_and_may_be_repeated(heads, journal):
    served = []
    for _ in range(2):
        act(Action.PROMOTE, journal, served.append, heads)
        assert champion(heads) == 2
    assert served == [{CHALLENGER: 1.0, CHAMPION: 0.0}] * 2
    roll_back(journal, served.append, heads, ALARMS)
    assert served[-1] == {CHALLENGER: 0.0, CHAMPION: 1.0}
    assert champion(heads) == 1


def test_somebody_elses_champion_is_left_alone(heads, journal):
    add_version(heads.client, heads.name, CHAMPION)
    served = []
    with pytest.raises(ChampionChanged):
        act(Action.PROMOTE, journal, served.append, heads)
    roll_back(journal, served.append, heads, ALARMS)
    assert (served, champion(heads)) == ([], 3)


def pair(**changes):
    facts = {"version": 1, "head_digest": "a", "num_speculative_tokens": 3, "target_digest": "t"}
    both = {CHAMPION: facts, CHALLENGER: facts | {"version": 2, "head_digest": "b"} | changes}
    return {name: Artifact(name, Location("/none"), name, {"facts": facts}) for name, facts in both.items()}


def test_heads_that_can_be_compared_pass():
    check_pair(pair())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"head_digest": "a"}, "is the champion"),
        ({"num_speculative_tokens": 5}, "a larger K alone"),
        ({"target_digest": "u"}, "different targets"),
    ],
)
def test_a_difference_that_would_say_nothing_is_refused(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        check_pair(pair(**changes))
