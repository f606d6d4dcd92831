import pytest

from components.config import ArmConfig
from components.evaluation.arms import Arm, baseline_arms, head_arm


def test_a_head_is_served_as_eagle3_with_parallel_drafting() -> None:
    assert head_arm("candidate", "/heads/1", 3).speculative_config() == {
        "method": "eagle3",
        "model": "/heads/1",
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }


def test_baselines_come_with_plain_decoding_first() -> None:
    arms = baseline_arms(
        {
            "ngram": ArmConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4),
            "none": ArmConfig(method="none"),
        }
    )

    assert [arm.name for arm in arms] == ["none", "ngram"]
    assert arms[0].speculative_config() is None
    assert arms[1].speculative_config() == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"method": "p_eagle", "num_speculative_tokens": 3}, "head"),
        ({"method": "ngram", "num_speculative_tokens": 3, "head": "/x"}, "head"),
        ({"method": "ngram"}, "num_speculative_tokens"),
    ],
)
def test_an_arm_that_cannot_be_served_is_refused(arguments: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        Arm("arm", **arguments)
