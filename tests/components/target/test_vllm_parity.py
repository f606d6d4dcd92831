"""The features that a head is trained on are the hidden states that vLLM hands it: equal in float32."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm import SamplingParams

from components.target.chat import load_tokenizer, render
from components.target.layers import capture, load_target
from tests.engines import cpu_engine

AUX_LAYERS = [0, 2, 3, 5]
NUM_LAYERS = 6
NUM_NEW_TOKENS = 24
# float32 through six layers, attention kernels that sum in different orders
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def extracted(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory):
    """Per prompt: its ids, the generated ids, and what vLLM's own extraction saved for all of them but the last.

    The batch holds prompts of different lengths, longer than one chunk of the prefill.
    """
    tokenizer = load_tokenizer(tiny_target)
    contents = ["hello", "write about the lighthouse and the ships that pass it " * 3, "sugar helps bread"]
    prompts = [render(tokenizer, [{"role": "user", "content": content}]) for content in contents]
    layer_ids = [*AUX_LAYERS, NUM_LAYERS]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
    }
    transfer = {
        "kv_connector": "SynchronousHiddenStatesConnector",
        "kv_connector_module_path": "tests.components.target.kv_capture",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": str(tmp_path_factory.mktemp("states")),
            "use_synchronization_lock": False,
        },
    }
    sampling = SamplingParams(
        temperature=0,
        max_tokens=NUM_NEW_TOKENS,
        ignore_eos=True,
        extra_args={"kv_transfer_params": {"include_output_tokens": True}},
    )
    with cpu_engine(
        tiny_target,
        speculative_config=speculative,
        kv_transfer_config=transfer,
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        max_num_batched_tokens=32,
    ) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
        chat_ids = llm.chat([{"role": "user", "content": contents[1]}], SamplingParams(max_tokens=1))
    assert max(len(ids) for ids in prompts) > 32
    states = [load_file(output.kv_transfer_params["hidden_states_path"]) for output in outputs]
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    return prompts, answers, states, list(chat_ids[0].prompt_token_ids)


def test_features_equal_what_vllm_extracts(tiny_target: Path, extracted) -> None:
    model = load_target(tiny_target, torch.float32)
    prompts, answers, states, _ = extracted
    for prompt, answer, saved in zip(prompts, answers, states, strict=True):
        ids = saved["token_ids"]
        assert ids.tolist() == (prompt + answer)[:-1]
        ours = capture(model, ids[None], AUX_LAYERS)
        theirs = saved["hidden_states"]
        torch.testing.assert_close(ours.aux_hidden, theirs[:, :-1].flatten(1), atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(ours.last_hidden, theirs[:, -1], atol=TOLERANCE, rtol=TOLERANCE)


def test_greedy_tokens_equal_transformers(tiny_target: Path, extracted) -> None:
    model = load_target(tiny_target, torch.float32)
    prompts, answers, _, _ = extracted
    for prompt, answer in zip(prompts, answers, strict=True):
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=False
        )
        assert output[0, len(prompt) :].tolist() == answer


def test_rendered_ids_equal_vllms_chat(extracted) -> None:
    prompts, _, _, chat_ids = extracted
    assert chat_ids == prompts[1]
