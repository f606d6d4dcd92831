"""ray_config.yaml and the overlays load, and the first says the defaults that the code has."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from components.arm_config import ArmConfig
from components.config import Settings
from components.config_loading import load_settings

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "ray_config.yaml"
OVERLAYS = ["laptop.yaml", "h200.yaml"]


def dotted(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}; an empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat


def test_the_config_file_names_every_setting_with_its_default() -> None:
    written = dotted(yaml.safe_load(CONFIG.read_text()))
    defaults = dotted(Settings().model_dump())
    unused = {
        path
        for path, value in defaults.items()
        if path.startswith("evaluate.baselines.") and value == ArmConfig.model_fields[path.rsplit(".", 1)[1]].default
    }
    assert written == {path: value for path, value in defaults.items() if path not in unused}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_loads_over_the_config(overlay: str) -> None:
    path = ROOT / "clusters" / overlay
    settings = dotted(load_settings(CONFIG, path).model_dump())
    for setting, value in dotted(yaml.safe_load(path.read_text())).items():
        assert settings[setting] == value


def test_the_laptop_overlay_changes_no_result() -> None:
    outside = set(yaml.safe_load((ROOT / "clusters" / "laptop.yaml").read_text())) - {"resources"}
    assert not outside


@pytest.mark.parametrize("overlay", [None, *OVERLAYS])
def test_training_is_deeper_than_serving_drafts(overlay: str | None) -> None:
    settings = load_settings(CONFIG, ROOT / "clusters" / overlay if overlay else None)
    assert settings.train.num_depths > settings.evaluate.num_speculative_tokens
