#!/usr/bin/env python
"""Print docs/configuration.md: every setting with its type, default and meaning, read from components/config.py, components/arm_config.py and components/speed_config.py."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from components.arm_config import KEYS, ArmConfig
from components.config import BenchmarkConfig, PromptSource, ResourcesConfig, Settings, StageResources

HEAD = """# Configuration

*Written by `make docs` from `components/config.py`, `components/arm_config.py` and `components/speed_config.py`; a test fails when the two differ.*

Settings come from three places, the later one winning: the file given with `--config` (by default `ray_config.yaml`, which has
every setting with its default), the file given with `--cluster` (an overlay with only what differs), and any number of
`--set section.key=value`, whose value is read as YAML (`--set train.epochs=2`, `--set 'data.prompts=[a.jsonl, b.jsonl]'`,
`--set data.max_prompts=null`). An unknown key or a value out of range ends with exit code 2 and one line that names the dotted path
and the fix.
"""

SIGNS = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}


def page() -> str:
    sections = [section(name, field) for name, field in Settings.model_fields.items()]
    arm = "\n".join(["## Arms (`evaluate.baselines.<name>`)", "", *table("", ArmConfig)])
    source = "\n".join(["## Sources (`data.prompts`, `data.benchmarks`)", "", *table("", PromptSource)])
    benchmark = "\n".join(["## Benchmarks (`evaluate.benchmarks.<name>`)", "", *table("", BenchmarkConfig)])
    return "\n\n".join([HEAD.rstrip(), *sections, source, benchmark, arm, keys_by_method()]) + "\n"


def keys_by_method() -> str:
    """Which of the arm's keys each method takes, in the order of the table above."""
    fields = list(ArmConfig.model_fields)
    lines = [
        f"| `{method}` | {', '.join(f'`{key}`' for key in fields if key in keys) or 'nothing else'} |"
        for method, keys in KEYS.items()
    ]
    return "\n".join(["| method | takes |", "| --- | --- |", *lines])


def section(name: str, field: FieldInfo) -> str:
    if model_of(field) is ResourcesConfig:  # one table for all stages
        stages = ", ".join(f"`{stage}`" for stage in ResourcesConfig.model_fields)
        return "\n".join([f"## `{name}`", "", f"Stages: {stages}.", "", *table(f"{name}.<stage>.", StageResources)])
    return "\n".join([f"## `{name}`", "", *table(f"{name}.", model_of(field))])


def table(prefix: str, model: type[BaseModel]) -> list[str]:
    return ["| setting | type | default | meaning |", "| --- | --- | --- | --- |", *rows(prefix, model)]


def rows(prefix: str, model: type[BaseModel]) -> list[str]:
    lines = []
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            lines += rows(f"{prefix}{name}.", model_of(field))
        else:
            cells = (
                f"`{prefix}{name}`",
                type_name(field),
                default_of(field),
                " ".join((field.description or "").split()),
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def model_of(field: FieldInfo) -> type[BaseModel]:
    assert isinstance(field.annotation, type)
    assert issubclass(field.annotation, BaseModel)
    return field.annotation


def type_name(field: FieldInfo) -> str:
    return with_limits(readable(field.annotation), field.metadata)


def with_limits(name: str, metadata: list[Any]) -> str:
    """`float`, [Gt(0), Le(1)] -> `float, > 0 and ≤ 1`."""
    limits = [f"{SIGNS[type(m)]} {getattr(m, type(m).__name__.lower())}" for m in metadata if type(m) in SIGNS]
    return f"{name}, {' and '.join(limits)}" if limits else name


def readable(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return with_limits(readable(arguments[0]), [m for part in arguments[1:] for m in part.metadata])
    if origin is Literal:
        return " or ".join(f"`{argument}`" for argument in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(readable(argument) for argument in arguments)
    if arguments == (PromptSource,):
        return "path, source or list of both"
    if origin in (list, dict):
        return f"{origin.__name__} of {readable(arguments[-1])}"
    if annotation is types.NoneType:
        return "null"
    return {Any: "anything", ArmConfig: "arm"}.get(annotation) or annotation.__name__


def default_of(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "`null`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, dict):
        return f"`{', '.join(value)}`" if value else "`{}`"
    if isinstance(value, list):
        items = ", ".join(str(item.path) if isinstance(item, PromptSource) else str(item) for item in value)
        return f"`[{items}]`" if len(value) != 1 or not isinstance(value[0], PromptSource) else f"`{items}`"
    return f"`{value}`"


if __name__ == "__main__":
    print(page(), end="")
