"""The deployment of one arm: ray.serve.llm's server, taking and giving plain JSON.

Only this module imports vLLM. The router and the driver name it by its import path, so they start in seconds.
"""

from collections.abc import AsyncIterator
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from ray.llm._internal.common.callbacks.base import CallbackBase
from ray.serve import Application
from ray.serve.llm import LLMConfig, LLMServer, build_llm_deployment
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest

from components.serving.delivery import Delivering
from components.serving.protocol import error_body

REQUEST_TYPES = {"chat": ChatCompletionRequest, "completions": CompletionRequest}
MAX_ONGOING_REQUESTS = 1000
"""vLLM queues by itself; Serve's default of 5 would keep it from batching."""
HEALTH_TIMEOUT_S = 60.0
"""A dead engine says so at once; a slow answer on a busy CPU is no reason to restart it."""
START_ATTEMPTS = 1
"""An engine that does not start once does not start twice: say why at once."""


class ArmArgs(BaseModel):
    """What `build_arm` is given in the declarative configuration."""

    model_config = ConfigDict(extra="forbid")

    model: str
    """Name that requests use."""
    target: str
    """Folder of the target."""
    engine: dict[str, Any]
    """vLLM's engine arguments."""
    env: dict[str, str]
    bundles: list[dict[str, float]]
    """Ray resources: one bundle a worker of the engine."""
    replicas: int = 1
    revision: str = ""
    """Code and attempt: Serve takes a configuration without a change for done, even where the last try failed."""


class LocalModel(CallbackBase):
    """The target is a folder on this machine: skips the task that would look for it on a hub."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False


class ArmServer(Delivering, LLMServer):
    """ray.serve.llm's server that delivers to the router, and without the usage report (a process of its own, 400 MB)."""

    async def _start_engine(self) -> None:
        await self.engine.start()

    async def answer(self, route: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | str]:
        """Answers a JSON request of the OpenAI API.

        Args:
            route: `chat` or `completions`.
            body: the request.

        Yields:
            One dict, the response; or, for a stream, strings of ready server-sent events. An error is a dict with the
            key `error` and comes first and alone, unless it happens in the middle of a stream.
        """
        try:
            request = REQUEST_TYPES[route].model_validate(body)
        except Exception as error:  # vLLM's own validators stumble over some malformed bodies
            yield error_body(400, _describe(error))
            return
        if route == "chat":  # as validated, lists of content parts are iterators, which cannot be copied
            request.messages = body["messages"]
        async for item in await getattr(self, route)(request):
            for part in item if isinstance(item, list) else [item]:
                yield part if isinstance(part, str) else part.model_dump(mode="json")


def arm_config(args: ArmArgs) -> LLMConfig:
    """What the replicas of an arm read."""
    return LLMConfig(
        model_loading_config={"model_id": args.model, "model_source": args.target},
        engine_kwargs=args.engine,
        placement_group_config={"bundles": args.bundles},
        runtime_env={"env_vars": args.env},
        # tokens leave when they are there; by default they wait for each other for 50 ms
        experimental_configs={"stream_batching_interval_ms": 0},
        log_engine_metrics=False,
        callback_config={"callback_class": LocalModel},
        deployment_config={
            "num_replicas": args.replicas,
            "max_ongoing_requests": MAX_ONGOING_REQUESTS,
            "max_constructor_retry_count": START_ATTEMPTS,
            "health_check_timeout_s": HEALTH_TIMEOUT_S,
            "ray_actor_options": {"num_cpus": 0},  # the bundles count them
        },
    )


def build_arm(args: ArmArgs) -> Application:
    """The Serve application of one arm."""
    return build_llm_deployment(arm_config(args), name_prefix="arm:", deployment_cls=ArmServer)


def _describe(error: Exception) -> str:
    """Where and what, without the input: it may hold a user's text."""
    if not isinstance(error, ValidationError):
        return f"the request is malformed ({type(error).__name__})"
    first = error.errors(include_input=False, include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    return f"{path}: {first['msg']}" if path else first["msg"]
