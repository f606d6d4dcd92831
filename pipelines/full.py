#!/usr/bin/env python
"""From prompts to a verdict: train a draft head on the target's own answers, measure it, A/B test it, promote it."""

from collections.abc import Sequence

from components.config import Settings
from components.data.stages import features_stage, prompts_stage, responses_stage, vocabulary_stage
from components.evaluation.stages import evaluation_stage, preflight_stage
from components.publishing.stages import drafts_stage, incumbent_stage, publish_stage
from components.publishing.summary import print_summary
from components.serving.claim import claimed_endpoint
from components.serving.stages import ab_stage
from components.speed.stages import speed_stage
from components.stage import Stage
from components.storage import Location
from components.target.stages import target_stage
from components.training.stages import head_stage
from pipelines.cli import guarded, pipeline_app
from pipelines.serve import move_endpoint


def define_stages(settings: Settings) -> Sequence[Stage]:
    """The table of contents; every stage reads outputs of stages above it."""

    def serve_alone(version: int | None) -> bool:
        with claimed_endpoint(
            "the publication of another job", Location(settings.storage.uri), settings.storage.lease_ttl_s
        ):
            return move_endpoint(settings, version, allow_gap=False)

    return [
        target_stage(settings),  # the model being served
        prompts_stage(settings),  # prompts, split by family and by hash
        responses_stage(settings),  # the target's own answers, by vLLM replicas
        features_stage(settings),  # hidden states of those answers
        vocabulary_stage(settings),  # the tokens the head may draft
        head_stage(settings),  # the P-EAGLE head, in vLLM's layout
        preflight_stage(settings),  # vLLM drafts what we draft
        incumbent_stage(settings),  # the champion that this head must beat
        drafts_stage(settings),  # what the other arms draft with
        evaluation_stage(settings),  # every arm on held-out prompts
        speed_stage(settings),  # tokens/s and latency of every arm, K and load, on plain servers
        ab_stage(settings),  # challenger and incumbent behind one endpoint
        publish_stage(
            settings, serve_alone
        ),  # the gate, the bundle, the registry, all traffic to the winner, the report
    ]


app = pipeline_app(__doc__ or "", define_stages, done=print_summary)

if __name__ == "__main__":
    guarded(app)
