import json
import shutil
from pathlib import Path

import pytest

from components.section import ConfigError
from components.target.resolve import resolve_target
from tests.tiny import BOS, EOS, PAD


@pytest.fixture
def folder(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_facts_of_a_local_folder(folder: Path, tmp_path: Path) -> None:
    target = resolve_target(str(folder), None, tmp_path / "unused")
    assert (target.model, target.path, target.revision) == (str(folder), str(folder), target.digest)
    assert (target.hidden_size, target.num_layers, target.vocab_size, target.intermediate_size) == (64, 6, 512, 128)
    assert (target.num_heads, target.num_kv_heads, target.head_dim) == (4, 2, 32)
    assert target.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (target.eos_token_ids, target.bos_token_id, target.pad_token_id) == ([EOS], BOS, PAD)
    assert (target.dtype, target.rms_norm_eps, target.tie_word_embeddings) == ("float32", 1e-5, False)
    assert target.max_position_embeddings == 512
    assert not (tmp_path / "unused").exists()


def test_end_tokens_of_both_files_are_kept(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=[EOS, 9])
    edit(folder / "generation_config.json", eos_token_id=[9, 11])
    assert resolve_target(str(folder), None, folder).eos_token_ids == [EOS, 9, 11]


def test_digest_follows_content(folder: Path) -> None:
    digest = resolve_target(str(folder), None, folder).digest
    (folder / "README.md").write_text("notes")
    assert resolve_target(str(folder), None, folder).digest == digest
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    changed = resolve_target(str(folder), None, folder).digest
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# a note #}")
    assert len({digest, changed, resolve_target(str(folder), None, folder).digest}) == 3


def test_a_template_that_cannot_be_masked_is_a_config_error(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("add_generation_prompt", "no_such_flag"))
    with pytest.raises(
        ConfigError, match=r"^target\.model: the chat template ends a prompt before the assistant's turn"
    ):
        resolve_target(str(folder), None, folder)


def test_switches_of_the_template_are_described_or_refused(folder: Path) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt and brief %}<think></think>{% endif %}")
    target = resolve_target(str(folder), None, folder, {"brief": True})
    assert target.chat_template_kwargs == {"brief": True}
    assert target.chat_template.opening.endswith("assistant\n<think></think>")
    with pytest.raises(ConfigError, match=r"^target\.chat_template_kwargs: .*does not read breif.*reads brief"):
        resolve_target(str(folder), None, folder, {"breif": True})


def test_remote_code_is_never_run(folder: Path, tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(proof)!r}, 'w')\nclass Evil: ...")
    edit(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    with pytest.raises(ConfigError, match=r"^target\.model: transformers cannot read the config"):
        resolve_target(str(folder), None, folder)
    assert not proof.exists()


def test_folders_without_config_or_safetensors(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors.*save_pretrained"):
        resolve_target(str(folder), None, folder)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_target(str(tmp_path), None, folder)


def test_missing_folder_and_needless_revision(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^target\.model: the folder .* does not exist"):
        resolve_target(str(tmp_path / "absent"), None, folder)
    with pytest.raises(ConfigError, match=r"^target\.revision: .* has no revisions"):
        resolve_target(str(folder), "main", folder)
