"""A head on disk: exact keys, round trip, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from components.draft.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_head, save_head
from components.draft.drafting import greedy_drafts
from tests.components.draft.dense import tiny_config, tiny_document, tiny_head

LAYER_0 = {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
LAYER_1 = LAYER_0 - {"hidden_norm"}
PROJECTIONS = {f"self_attn.{p}_proj" for p in "qkvo"} | {f"mlp.{p}_proj" for p in ("gate", "up", "down")}
PLAIN_LAYOUT = (
    {"embed_tokens.weight", "fc.weight", "mask_hidden", "norm.weight", "lm_head.weight"}
    | {f"layers.0.{name}.weight" for name in LAYER_0 | PROJECTIONS}
    | {f"layers.1.{name}.weight" for name in LAYER_1 | PROJECTIONS}
)


def test_keys_shapes_and_config_are_those_of_the_plain_layout(tmp_path: Path) -> None:
    config = tiny_config(aux_layers=(0, 2, 3, 5))
    folder = save_head(tiny_head(config), tmp_path / "head", torch.bfloat16)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    with safe_open(folder / WEIGHTS_FILE, "pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert file.get_tensor("d2t").dtype == torch.int64
        assert file.get_tensor("t2d").dtype == torch.bool
        assert file.get_tensor("fc.weight").dtype == torch.bfloat16
    assert shapes.keys() == PLAIN_LAYOUT | {"d2t", "t2d"}
    assert shapes["mask_hidden"] == (1, 1, 4 * 32)
    assert shapes["fc.weight"] == (32, 4 * 32)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (32, 64)
    assert shapes["layers.1.self_attn.k_proj.weight"] == (16, 32)
    assert (shapes["d2t"], shapes["t2d"], shapes["lm_head.weight"]) == ((43,), (61,), (43, 32))
    fields = json.loads((folder / CONFIG_FILE).read_text())
    assert [fields[key] for key in ("mask_token_id", "ptd_token_id", "pard_token")] == [60, 60, 60]
    assert fields["num_aux_hidden_states"] == 4
    assert fields["eagle_aux_hidden_state_layer_ids"] == [0, 2, 3, 5]
    assert fields["tie_word_embeddings"] is False
    assert fields["norm_before_residual"] is False
    assert fields["dtype"] == "bfloat16"


def test_offsets_lead_from_draft_to_target_ids(tmp_path: Path) -> None:
    head = tiny_head()
    tensors = load_file(save_head(head, tmp_path / "head") / WEIGHTS_FILE)
    targets = torch.arange(43) + tensors["d2t"]
    assert torch.equal(targets, head.target_ids_U)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], targets.sort().values)
    assert torch.equal(head.draft_ids(targets), torch.arange(43))
    assert (head.draft_ids(torch.arange(61)) == -1).sum() == 61 - 43


def test_whole_vocabulary_has_no_map_and_three_aux_layers_no_count(tmp_path: Path) -> None:
    folder = save_head(tiny_head(tiny_config(draft_vocab_size=61)), tmp_path / "head")
    assert load_file(folder / WEIGHTS_FILE).keys() == PLAIN_LAYOUT
    assert "num_aux_hidden_states" not in json.loads((folder / CONFIG_FILE).read_text())
    assert torch.equal(load_head(folder).target_ids_U, torch.arange(61))


def test_round_trip_keeps_config_tensors_and_drafts(tmp_path: Path) -> None:
    head = tiny_head()
    loaded = load_head(save_head(head, tmp_path / "head"))
    assert loaded.config == head.config
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
    document = tiny_document(head.config, 12, [(4, 12)], seed=1)
    assert torch.equal(greedy_drafts(loaded, [document], 3)[0], greedy_drafts(head, [document], 3)[0])


def test_scaled_rotary_settings_reach_the_server(tmp_path: Path) -> None:
    scaled = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }  # fmt: skip
    head = tiny_head(tiny_config(rope_parameters=scaled))
    read = AutoConfig.from_pretrained(save_head(head, tmp_path / "head"))
    assert dict(read.rope_parameters) == scaled
    position = torch.arange(50)
    assert not torch.equal(head.rope(position)[0], tiny_head().rope(position)[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    head = tiny_head()
    with torch.no_grad():
        head.layers[1].mlp.up_proj.weight[2, 3] = value
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        save_head(head, tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["d2t", "mask_hidden", "embed_tokens.weight"])
def test_missing_tensor_is_refused(tmp_path: Path, name: str) -> None:
    folder = save_head(tiny_head(), tmp_path / "head")
    tensors = load_file(folder / WEIGHTS_FILE)
    del tensors[name]
    save_file(tensors, folder / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=name):
        load_head(folder)


def test_existing_head_is_not_overwritten(tmp_path: Path) -> None:
    folder = save_head(tiny_head(), tmp_path / "head")
    with pytest.raises(FileExistsError):
        save_head(tiny_head(seed=3), folder)
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = save_head(tiny_head(), tmp_path / "head")
    fields = json.loads((folder / CONFIG_FILE).read_text()) | {"norm_before_residual": True}
    (folder / CONFIG_FILE).write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="norm_before_residual"):
        load_head(folder)
