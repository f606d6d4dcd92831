"""The options that every pipeline takes, each declared once: a command asks for them together, as one `RunOptions`."""

import os
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from components.config import BenchmarkConfig, PromptSource, Settings
from components.config_loading import load_settings
from components.data.sources import BUILTIN
from components.pipeline import Selection
from components.section import ConfigError

HasPath = TypeVar("HasPath", PromptSource, BenchmarkConfig)

CODE_ROOT = Path(__file__).resolve().parent.parent
RAY_UPLOAD_MARK = "runtime_resources"  # part of the path of a working directory that `ray job submit` uploaded


class RunOptions(NamedTuple):
    config: Annotated[Path, typer.Option("--config", help="YAML file of settings.")] = CODE_ROOT / "ray_config.yaml"
    cluster: Annotated[Path | None, typer.Option("--cluster", help="YAML overlay for a cluster, from clusters/.")] = (
        None
    )
    overrides: Annotated[
        list[str], typer.Option("--set", help="One setting, e.g. --set train.epochs=2. Repeatable.")
    ] = []
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Say what would run, how long it takes and what it writes, and refuse what the disk cannot hold; write nothing.",
        ),
    ] = False
    first: Annotated[str | None, typer.Option("--from", help="First stage to run; earlier ones must be done.")] = None
    until: Annotated[str | None, typer.Option("--until", help="Last stage to run.")] = None
    forced: Annotated[list[str], typer.Option("--force", help="Make this stage again from nothing. Repeatable.")] = []

    @property
    def selection(self) -> Selection:
        return Selection(self.first, self.until, tuple(self.forced))

    def settings(self) -> Settings:
        """The settings that the options name, with absolute places for prompts and outputs."""
        return with_absolute_prompts(with_absolute_storage(load_settings(self.config, self.cluster, self.overrides)))


def with_run_options(until: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a typer command with a parameter `options: RunOptions`: its command line has the run options, before its own.

    `until` is the default of --until.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != "options"]
        shared = dict(signature(RunOptions).parameters)
        shared["until"] = shared["until"].replace(default=until)

        def main(**values: Any) -> Any:
            options = RunOptions(**{name: values.pop(name) for name in RunOptions._fields})
            return command(options=options, **values)

        # typer reads a command's parameters from its signature and its annotations
        parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*shared.values(), *own)]
        main.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        main.__annotations__ = {p.name: p.annotation for p in parameters}
        return main

    return decorate


def with_absolute_storage(settings: Settings) -> Settings:
    """The settings with the place where outputs go: a relative folder starts at the project root, never in a job's throw-away upload."""
    storage = settings.storage.model_copy(update={"uri": _absolute(settings.storage.uri)})
    return settings.model_copy(update={"storage": storage})


def with_absolute_prompts(settings: Settings) -> Settings:
    """The settings with all files of prompts: a relative one starts in the command's folder, also where another process reads it."""
    data, evaluate, speed = settings.data, settings.evaluate, settings.speed
    sources = {name: [_in_place(source) for source in getattr(data, name)] for name in ("prompts", "benchmarks")}
    benchmarks = {name: _in_place(benchmark) for name, benchmark in evaluate.benchmarks.items()}
    tasks = {name: _file_in_place(path) for name, path in speed.prompts.items()}
    return settings.model_copy(
        update={
            "data": data.model_copy(update=sources),
            "evaluate": evaluate.model_copy(update={"benchmarks": benchmarks}),
            "speed": speed.model_copy(update={"prompts": tasks}),
        }
    )


def _in_place(source: HasPath) -> HasPath:
    return source if source.path is None else source.model_copy(update={"path": _file_in_place(source.path)})


def _file_in_place(path: str) -> str:
    return path if path == BUILTIN or "://" in path else str(Path(path).expanduser().absolute())


def _absolute(uri: str) -> str:
    if "://" in uri or Path(uri).expanduser().is_absolute():
        return uri if "://" in uri else str(Path(uri).expanduser())
    root = Path(os.environ.get("AERIE_ROOT", CODE_ROOT))
    if RAY_UPLOAD_MARK in root.parts:
        raise ConfigError(
            "storage.uri",
            f"the relative folder {uri!r} would be thrown away with this job's upload",
            "give an absolute path or s3://bucket/prefix, or start Ray with `make up`",
        )
    return str(root / uri)
