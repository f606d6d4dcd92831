"""What is served, as Serve's declarative configuration: one application an arm, and the router in front of them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.config import Settings
from components.evaluation.arms import Arm, refuse_synthetic
from components.section import ConfigError
from components.serving.access import read_secrets
from components.serving.listing import PREFIX, ROUTER, with_routing
from components.serving.routing import ArmState, RoutedArm, Routing
from components.storage import Location
from components.target.engine import engine_env, engine_kwargs, has_gpu

ARM_PREFIX = f"{PREFIX}arm-"
NO_HEAD = "none"
IDENTITY_SHOWN = 8
"""Characters of an identity in an application's name."""
SERVED_CODE = (
    "access",
    "api",
    "arm_server",
    "assignment",
    "calls",
    "dealing",
    "delivery",
    "ejection",
    "exchange",
    "gateway",
    "listing",
    "meter",
    "metrics",
    "protocol",
    "recording",
    "records",
    "router",
    "routing",
    "upstream",
)
"""Modules of this folder that run inside Serve."""


@dataclass(frozen=True)
class ServedArm:
    arm: Arm
    weight: float
    """Its share of the sessions is weight / sum of the weights; 0 keeps it up without traffic."""
    head: str = NO_HEAD
    """Digest (and version) of its head, named in every response."""
    state: ArmState = ArmState.SERVING

    @property
    def name(self) -> str:
        return self.arm.name

    @property
    def head_digest(self) -> str:
        """Of its head, without the version; `none`."""
        return self.head.rpartition("-")[2]


@dataclass(frozen=True)
class Service:
    """Everything behind one endpoint."""

    settings: Settings
    target: Path
    """The target's Hugging Face folder."""
    arms: Sequence[ServedArm]
    records: Location | None = None
    """Where the records of live requests go; None: nowhere."""

    @property
    def model(self) -> str:
        return model_name(self.settings)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Ray resources of one replica of an arm: a bundle a GPU, so that tensor parallelism can spread, or one of CPUs."""
        resources = self.settings.resources.ab
        if not has_gpu(resources):
            return [{"CPU": resources.num_cpus}]
        workers = max(1, int(resources.num_gpus))
        return [{"GPU": resources.num_gpus / workers, "CPU": resources.num_cpus / workers}] * workers

    @property
    def address(self) -> str:
        return f"http://{self.settings.ab.host}:{self.settings.ab.port}"


def model_name(settings: Settings) -> str:
    """The name that requests use: the last part of `target.model`."""
    name = settings.target.model.rstrip("/").removeprefix("bundled:")
    return Path(name).name if Path(name).is_absolute() or name.startswith((".", "~")) else name


def arm_application(
    service: Service,
    served: ServedArm,
    runtime_env: Mapping[str, Any],
    cores: Mapping[str, str],
    attempt: int = 0,
) -> dict[str, Any]:
    """The application of one arm; without a route, so only the router reaches it.

    Args:
        service: Its settings and target.
        served: The arm.
        runtime_env: The code that the replicas run.
        cores: Variable that binds the engine to cores.
        attempt: Another one makes Serve try again what failed.
    """
    return {
        "name": application_name(service, served),
        "route_prefix": None,
        "import_path": "components.serving.arm_server:build_arm",
        "runtime_env": dict(runtime_env),
        "args": {
            "model": service.model,
            "target": str(service.target),
            "engine": _engine(service, served.arm),
            "env": engine_env(service.settings.resources.ab) | dict(cores),
            "bundles": service.bundles,
            "replicas": service.settings.resources.ab.replicas,
            "revision": f"{code_revision()}+{attempt}" if attempt else code_revision(),
        },
    }


def application_name(service: Service, served: ServedArm) -> str:
    """Names what is served, not the arm: another head, target, setting or code is another application, which can start beside the old
    one, and a challenger that becomes the champion keeps its engine."""
    resources = service.settings.resources.ab
    engine = _engine(service, served.arm)
    if served.arm.model and served.head != NO_HEAD:  # the digest says which files, wherever they lie
        engine["speculative_config"] = engine["speculative_config"] | {"model": served.head_digest}
    identity = [service.model, str(service.target), engine, engine_env(resources), service.bundles]
    text = json.dumps([*identity, resources.replicas, code_revision()], sort_keys=True)
    what = served.arm.method if served.head == NO_HEAD else served.head_digest
    return f"{ARM_PREFIX}{what}-{hashlib.sha256(text.encode()).hexdigest()[:IDENTITY_SHOWN]}"


def make_routing(service: Service, arms: Sequence[ServedArm]) -> Routing:
    """Traffic to `arms` only, in no epoch yet; the first arm is the control.

    Raises:
        ConfigError: a file of secrets that cannot be read or is empty.
        SyntheticArm: an arm that accepts by chance; users would get its text.
    """
    refuse_synthetic((arm.name for arm in arms if arm.arm.is_synthetic), "the router")
    ab = service.settings.ab
    return Routing(
        model=service.model,
        salt=ab.salt,
        arms={
            arm.name: RoutedArm(app=application_name(service, arm), weight=arm.weight, head=arm.head, state=arm.state)
            for arm in arms
        },
        control=service.arms[0].name if service.arms else None,
        first_item_timeout_s=ab.first_item_timeout_s,
        drain_timeout_s=ab.drain_timeout_s,
        max_body_bytes=ab.max_body_bytes,
        api_keys_file=_secret_file("ab.api_keys_file", ab.api_keys_file),
        admin_token_file=_secret_file("ab.admin_token_file", ab.admin_token_file),
        records=service.records.uri if service.records else None,
        records_retention_days=ab.records_retention_days,
    )


def router_application(routing: Routing, revision: str, runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """The application of the endpoint; the traffic is its `user_config`, so it changes live."""
    application = {
        "name": ROUTER,
        "route_prefix": "/",
        "import_path": "components.serving.router:build_router",
        "runtime_env": dict(runtime_env),
        "args": {"revision": revision},
    }
    return with_routing(application, routing)


def code_revision() -> str:
    """Changes with the code that runs inside Serve, which takes a configuration without a change for done."""
    digest = hashlib.sha256()
    for name in SERVED_CODE:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]


def _secret_file(path: str, file: Path | None) -> str | None:
    """The absolute path of a file with secrets, which the router reads itself."""
    if file is None:
        return None
    place = file.expanduser().absolute()
    try:
        found = read_secrets(place)
    except OSError as error:
        raise ConfigError(
            path, f"cannot read {place} ({error.strerror})", "name a file with one secret a line"
        ) from None
    if not found:
        raise ConfigError(path, f"{place} holds no secret", "write one secret a line, or leave the setting out")
    return str(place)


def _engine(service: Service, arm: Arm) -> dict[str, Any]:
    kwargs = engine_kwargs(service.settings, service.settings.resources.ab, service.target)
    kwargs.pop("model")  # the deployment names it
    if switches := service.settings.target.chat_template_kwargs:  # a request's own switches go before these
        kwargs["default_chat_template_kwargs"] = dict(switches)
    if arm.speculates:  # without speculation vLLM refuses to measure it
        kwargs |= {"speculative_config": arm.speculative_config(), "per_request_spec_decode_metrics": "summary"}
    return kwargs
