"""What runs of a service, and what of it a change keeps: arms and router as they run, new ones beside them."""

from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from components.serving.apps import (
    ARM_PREFIX,
    Service,
    application_name,
    arm_application,
    code_revision,
    router_application,
)
from components.serving.cores import BIND_CORES, own_cores
from components.serving.listing import (
    ROUTER,
    Application,
    Applications,
    DeploymentFailed,
    routing_of,
    with_routing,
)
from components.serving.routing import ArmState, Routing

FAILED = ("DEPLOY_FAILED", "UNHEALTHY")
ROUTER_TIMEOUT_S = 60.0


def routing_now(live: Mapping[str, Any]) -> Routing | None:
    return routing_of(live.get(ROUTER, {}).get("deployed_app_config"))


def answers(routing: Routing | None, live: Mapping[str, Any]) -> bool:
    """Whether users get answers now."""
    if routing is None or not runs(live, ROUTER):
        return False
    taking = {name for name, weight in routing.weights.items() if weight > 0}
    taking |= {name for name, arm in routing.arms.items() if arm.state == ArmState.DRAINING}
    return any(runs(live, routing.arms[name].app) for name in taking)


def runs(live: Mapping[str, Any], name: str) -> bool:
    return bool(live.get(name, {}).get("status") == "RUNNING")


def can_compare(live: Mapping[str, Any]) -> bool:
    """Whether a router runs that has this very code, and so `replace_traffic`; another one gives way to it anyway."""
    return runs(live, ROUTER) and has_this_code(live[ROUTER])


def has_this_code(router: Mapping[str, Any]) -> bool:
    """Whether a router, as Serve tells of it, was declared with the code of this process."""
    config = router.get("deployed_app_config")
    return config is not None and _revision(config) == code_revision()


def replace_traffic(routing: Routing) -> Routing:
    """Asks the running router to deal by `routing` if that was made from what is live; what is live then.

    The router is the one process that owns the weights, so of two commands that saw the same epoch one wins.

    Raises:
        DeploymentFailed: it does not answer.
    """
    try:
        handle = serve.get_app_handle(ROUTER)
        told = handle.replace_traffic.remote(routing.model_dump(mode="json")).result(timeout_s=ROUTER_TIMEOUT_S)
    except (TimeoutError, RayServeException, RayError) as error:
        problem = (
            f"the router does not answer ({type(error).__name__}), so the traffic was not changed: repeat the command"
        )
        raise DeploymentFailed(problem) from error
    return Routing.model_validate(told)


def arms_beside(service: Service, live: Mapping[str, Any]) -> Applications:
    """The arms' applications: those that run as they run, with their code and cores; new ones on cores of their own."""
    names = {application_name(service, arm): arm for arm in service.arms}
    running = {name: app["deployed_app_config"] for name, app in live.items() if name.startswith(ARM_PREFIX)}
    arms = {name: running[name] for name in names if name in running and live[name]["status"] not in FAILED}
    leaving = [_cores(config) for name, config in running.items() if name not in names]
    for name, served in names.items():
        if name not in arms:
            cores = own_cores(service.settings.resources.ab, [_cores(config) for config in arms.values()], leaving)
            attempt = _attempt(running[name]) + 1 if name in running else 0
            arms[name] = arm_application(service, served, _job_files(), cores, attempt)
    return arms


def router_as_it_runs(routing: Routing, live: Mapping[str, Any]) -> Applications:
    """The router as it runs, with this traffic; a new one where its code changed or its last start failed."""
    application = router_application(routing, code_revision(), _job_files())
    there = live.get(ROUTER, {})
    if config := there.get("deployed_app_config"):
        if there["status"] in FAILED:
            return {ROUTER: router_application(routing, f"{code_revision()}+{_attempt(config) + 1}", _job_files())}
        if _revision(config) == code_revision():
            return {ROUTER: with_routing(config, routing)}
    return {ROUTER: application}


def rerouted(live: Mapping[str, Any], routing: Routing) -> Applications:
    """The running router, if there is one, with this traffic."""
    if not runs(live, ROUTER):
        return {}
    return {ROUTER: with_routing(live[ROUTER]["deployed_app_config"], routing)}


def _cores(application: Application) -> str:
    return str(application["args"]["env"].get(BIND_CORES, ""))


def _revision(application: Application) -> str:
    """Of its code."""
    return str(application["args"]["revision"]).partition("+")[0]


def _attempt(application: Application) -> int:
    return int(str(application["args"]["revision"]).partition("+")[2] or 0)


def _job_files() -> dict[str, Any]:
    """The code that this job uploaded, for the replicas too; without an upload they import the installed project."""
    runtime_env = ray.get_runtime_context().runtime_env
    return {name: runtime_env[name] for name in ("working_dir", "py_modules") if runtime_env.get(name)}
