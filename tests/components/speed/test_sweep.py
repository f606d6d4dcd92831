"""Which servers and points a sweep has, and the published benchmark's preset."""

from pathlib import Path

import pytest

from components.arm_config import ArmConfig
from components.config_loading import load_settings
from components.evaluation.arms import Arm, baseline_arms, head_arm
from components.section import ConfigError
from components.speed import sweep
from components.speed.sweep import Point, num_requests, num_servers, points, servers
from components.speed_config import SpeedConfig

ROOT = Path(__file__).resolve().parents[3]
PRESET = Path(sweep.__file__).with_name("published.yaml")
BASELINES = {
    "none": ArmConfig(method="none"),
    "ngram": ArmConfig(method="ngram", num_speculative_tokens=3),
    "scheduled": ArmConfig(
        method="ngram", num_speculative_tokens=4, num_speculative_tokens_per_batch_size=[(1, 4, 4), (5, 8, 1)]
    ),
    "chance": ArmConfig(
        method="ngram", num_speculative_tokens=3, rejection_sample_method="synthetic", synthetic_acceptance_length=2
    ),
}


def test_every_arm_is_served_at_every_k_but_for_those_that_have_one_way_only() -> None:
    arms: list[Arm] = [*baseline_arms(BASELINES), head_arm("candidate", "/heads/new", 5)]

    swept = servers(arms, [1, 5])

    assert [served.label for served in swept] == [
        "none",
        "ngram-k1",
        "ngram-k3",
        "ngram-k5",
        "scheduled-k4",
        "chance-k3",
        "candidate-k1",
        "candidate-k5",
    ]
    assert num_servers(list(BASELINES.values()), [5], [1, 5]) == len(swept)
    assert swept[3].arm.speculative_config() == {"method": "ngram", "num_speculative_tokens": 5}


def test_the_limited_rate_is_one_more_point_a_task_at_the_largest_concurrency() -> None:
    speed = SpeedConfig(concurrencies=[1, 8], request_rate=0.5)

    found = points(["code", "chat"], speed)

    assert found == [
        Point("code", 1),
        Point("code", 8),
        Point("chat", 1),
        Point("chat", 8),
        Point("code", 8, 0.5),
        Point("chat", 8, 0.5),
    ]
    assert len({point.label for point in found}) == 6
    assert [num_requests(point, 5) for point in found[:2]] == [5, 8]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("speed.concurrencies=[8, 1]", r"speed: concurrencies \[8, 1\] is not in rising order\. Fix: sort it"),
        ("speed.num_speculative_tokens=[3, 3]", r"speed: num_speculative_tokens \[3, 3\] is not in rising order"),
        ("speed.num_speculative_tokens=[]", r"speed\.num_speculative_tokens: \[\] is not usable"),
        (
            "speed={concurrencies: [16], max_num_seqs: 8}",
            r"max_num_seqs 8 is below the largest concurrency 16\. Fix: raise",
        ),
        ("speed.prompts={a/b: x.jsonl}", r"speed\.prompts"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(None, None, [override])


def test_the_published_benchmark_is_a_valid_configuration_under_a_clusters_overlay() -> None:
    settings = load_settings(PRESET, ROOT / "clusters" / "h200.yaml")

    speed = settings.speed
    assert (speed.concurrencies, speed.num_speculative_tokens) == ([1, 2, 4, 8, 16, 32, 64], [3, 5, 7])
    assert (speed.output_tokens, speed.num_prompts, list(speed.prompts)) == (2048, None, ["mt_bench", "humaneval"])
    assert settings.target.max_model_len > speed.output_tokens
    assert len(points(list(speed.prompts), speed)) == 2 * (7 + 1)  # and a finite rate
