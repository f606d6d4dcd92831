"""What the head depends on, and what its plan says that streaming takes."""

from typing import Any

from components.config_loading import load_settings
from components.data.stages import features_stage
from components.stage import Artifact, Stage
from components.storage import Location
from components.training.stages import head_stage

FACTS = {"supervised_tokens": 4_000, "streamed_tokens": 10_000, "bytes_per_token": 50_000}


def stage(make: Any, *overrides: str) -> Stage:
    return make(load_settings(None, None, list(overrides)))


def test_a_streamed_head_depends_on_what_captures_for_it() -> None:
    """The features of its training documents are in no input's digest."""
    stream = "data.mode=stream"
    streamed = stage(head_stage, stream).config
    for override in ("data.extractor=vllm", "target.dtype=float32", "draft.aux_layers=[1,2]"):
        assert stage(head_stage, stream, override).config != streamed
        assert stage(head_stage, override).config == stage(head_stage).config
    for override in ("data.stream.cache_gb=1", "data.stream.documents_in_flight=2"):
        assert stage(head_stage, stream, override).config == streamed
        assert stage(features_stage, stream, override).config == stage(features_stage, stream).config


def test_features_depend_on_the_extractor_and_on_what_is_kept() -> None:
    configs = [stage(features_stage, *o).config for o in ((), ("data.extractor=vllm",), ("data.mode=stream",))]
    assert all(config not in configs[:i] for i, config in enumerate(configs))


def test_plan_says_what_further_epochs_capture_again() -> None:
    features = Artifact("features", Location("/nowhere"), "", {"facts": FACTS})
    sizes = ["data.stream.documents_in_flight=8", "resources.train.replicas=2", "target.max_model_len=1000"]
    stream = ["data.mode=stream", "resources.features.replicas=3", *sizes]
    line = stage(head_stage, *stream).plan({"features": features})
    assert "3 capture workers beside training, 16 documents in flight (at most 0.80 GB)" in line
    assert "10,000 tokens captured, 10,000 again in every further epoch" in line
    cached = stage(head_stage, *stream, "data.stream.cache_gb=0.1")
    assert "10,000 tokens captured, 4,000 again in every further epoch" in cached.plan({"features": features})
    assert "every further epoch captures all but 0.3 GB again" in cached.plan({})
    assert "captur" not in stage(head_stage).plan({"features": features})


def test_plan_says_what_documents_take_in_a_workers_memory() -> None:
    features = Artifact("features", Location("/nowhere"), "", {"facts": FACTS})
    sizes = ["train.documents_per_step=60", "resources.train.replicas=3", "target.max_model_len=1000"]
    for mode, most in (("store", "3.0 GB"), ("stream", "2.0 GB")):  # 20 documents and their batch, and 1 GB that stay
        plan = stage(head_stage, f"data.mode={mode}", *sizes).plan({"features": features})
        assert f"at most {most} of documents in a worker's memory" in plan
