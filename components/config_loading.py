"""Reads the run's settings: YAML, overlaid by a cluster's YAML, overlaid by `a.b=c`; a wrong one is named by its dotted path."""

import difflib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from components.config import Settings
from components.section import ConfigError


def load_settings(config: Path | None, cluster: Path | None = None, overrides: list[str] | None = None) -> Settings:
    """Settings from `config`, overlaid by `cluster`, overlaid by `a.b=c` overrides.

    Raises:
        ConfigError: a file that cannot be read, an unknown key or a bad value, with its dotted path.
    """
    tree: dict[str, Any] = {}
    for flag, path in (("--config", config), ("--cluster", cluster)):
        if path is not None:
            tree = _merge(tree, _read_yaml(flag, path))
    for override in overrides or []:
        tree = _merge(tree, _parse_override(override))
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise _explain(error) from None


def _read_yaml(flag: str, path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(), _UniqueKeys)
    except OSError as error:
        raise ConfigError(flag, f"cannot read {path} ({error.strerror})", "name an existing YAML file") from None
    except yaml.YAMLError as error:
        raise ConfigError(flag, f"{path} is not YAML ({' '.join(str(error).split())})", "mend the file") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(flag, f"{path} holds a {type(tree).__name__}", "write a mapping of sections")
    return tree


class _UniqueKeys(yaml.SafeLoader):
    """YAML lets the second of two equal keys win in silence; a section written twice would lose its first half."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key_node.value} appears twice", problem_mark=key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _parse_override(override: str) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError("--set", f"{override!r} has no value", "write --set section.key=value")
    try:
        value: Any = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def _merge(base: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overlay.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _explain(error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"]) or "settings"
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        return ConfigError(
            path, "unknown setting", f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
        )
    if first["type"] == "value_error":
        problem, _, fix = first["msg"].removeprefix("Value error, ").partition(": ")
        return ConfigError(path, problem, fix or "see docs/configuration.md")
    return ConfigError(path, f"{first['input']!r} is not usable", first["msg"][0].lower() + first["msg"][1:])


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: Any = Settings
    for part in loc:
        if hasattr(model, "model_fields"):
            field = model.model_fields.get(part)
            model = field.annotation if field else None
        else:  # an item of a list or a value of a mapping
            model = get_args(model)[-1] if get_args(model) else None
    return list(getattr(model, "model_fields", {}))
