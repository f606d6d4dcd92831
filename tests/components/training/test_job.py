"""Which checkpoints of a run become heads."""

from pathlib import Path
from typing import Any

from ray.train import Checkpoint

from components.config_loading import load_settings
from components.training.job import Best
from components.training.produce import best_checkpoints
from components.training.stages import head_stage

FIGURE = "validation/walked_al_3"


def checkpoint(folder: Path, step: int, walked_al: float | None) -> tuple[Checkpoint, dict[str, Any]]:
    path = folder / str(step)
    path.mkdir()
    return Checkpoint.from_directory(path), {"step": step} | ({} if walked_al is None else {FIGURE: walked_al})


def test_the_best_by_walked_al_come_first_and_one_without_a_figure_last(tmp_path: Path) -> None:
    found = [checkpoint(tmp_path, step, al) for step, al in ((10, 1.2), (20, 1.4), (30, 1.3), (35, None), (40, 1.4))]

    assert [Path(kept.path).name for kept in Best(3, FIGURE).choose(found)] == ["40", "20", "30"]
    assert [Path(kept.path).name for kept in Best(9, FIGURE).choose(found)] == ["40", "20", "30", "10", "35"]


def test_ray_train_keeps_as_many_by_the_same_figure() -> None:
    kept = Best(3, FIGURE).keep()

    assert (kept.num_to_keep, kept.checkpoint_score_attribute, kept.checkpoint_score_order) == (3, FIGURE, "max")


def test_candidates_are_ranked_at_servings_k_or_the_deepest_trained() -> None:
    assert best_checkpoints(load_settings(None)) is None
    several = ["evaluate.candidates=2", "train.num_depths=4"]
    assert best_checkpoints(load_settings(None, None, several)) == Best(2, FIGURE)
    deeper = [*several, "evaluate.num_speculative_tokens=7"]
    assert best_checkpoints(load_settings(None, None, deeper)) == Best(2, "validation/walked_al_4")


def test_only_several_candidates_are_part_of_the_heads_identity() -> None:
    one, other_k, two = (
        head_stage(load_settings(None, None, overrides)).config
        for overrides in ([], ["evaluate.num_speculative_tokens=2"], ["evaluate.candidates=2"])
    )
    assert one == other_k != two
