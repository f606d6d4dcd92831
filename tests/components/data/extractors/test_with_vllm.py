"""The features that a head is trained on are the hidden states that vLLM computes: equal in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm import LLM, SamplingParams

from components.config import Settings
from components.data.extractors.interface import LONGEST_FITS, ExtractorSpec, extractor_spec
from components.data.extractors.with_vllm import VllmExtractor, extraction_kwargs
from components.target.chat import load_tokenizer, render
from components.target.layers import capture, load_target
from tests.engines import cpu_engine
from tests.tiny import FIRST_ORDINARY_ID

AUX_LAYERS = [0, 2, 3, 5]
TARGET = {"num_layers": 6, "hidden_size": 64}
LONGEST = 512  # all positions of the tiny target
NUM_NEW_TOKENS = 24
# float32 through six layers, attention kernels that sum in different orders
TOLERANCE = 2e-4
BATCH_TOKENS = 32  # most documents are longer: their prefill comes in chunks
CONTENTS = ["hello", "write about the lighthouse and the ships that pass it " * 3, "sugar helps bread"]


def make_spec(target: Path) -> ExtractorSpec:
    settings = {
        "target": {"dtype": "float32", "max_model_len": LONGEST},
        "draft": {"aux_layers": AUX_LAYERS},
        "data": {"extractor": "vllm", "batch_tokens": BATCH_TOKENS},
        "resources": {"features": {"engine": {"enable_prefix_caching": True}}},
    }
    return extractor_spec(Settings.model_validate(settings), TARGET, str(target))


@pytest.fixture(scope="module")
def engine(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Path]]:
    """An engine whose core is a process of its own, and the folder that it leaves states in."""
    folder = tmp_path_factory.mktemp("states")
    kwargs = extraction_kwargs(make_spec(tiny_target), folder)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LONGEST_FITS.items():
            patch.setenv(name, value)
        with cpu_engine(kwargs.pop("model"), **kwargs) as llm:
            yield llm, folder


def random_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ORDINARY_ID, 512, (length,), generator=generator).tolist()


def test_features_equal_those_of_transformers(engine: tuple[LLM, Path], tiny_target: Path) -> None:
    """Documents of many lengths at once; two begin with the same tokens, and one has every position there is."""
    llm, folder = engine
    model = load_target(tiny_target, torch.float32)
    start = random_ids(70, 0)
    documents = [start + random_ids(9, 1), random_ids(2, 2), random_ids(LONGEST, 3), start + random_ids(40, 4)]
    documents += [random_ids(15 + i, 5 + i) for i in range(4)]
    extracted = list(VllmExtractor(llm.llm_engine).extract(documents))
    assert list(folder.iterdir()) == []
    for ids, found in zip(documents, extracted, strict=True):
        ours = capture(model, torch.tensor([ids]), AUX_LAYERS)
        torch.testing.assert_close(found.aux_hidden, ours.aux_hidden, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(found.last_hidden, ours.last_hidden, atol=TOLERANCE, rtol=TOLERANCE)
        normed = model.model.norm(ours.last_hidden)
        assert not torch.allclose(found.last_hidden, normed, atol=0.1)


def test_greedy_tokens_equal_transformers(engine: tuple[LLM, Path], tiny_target: Path) -> None:
    tokenizer, model = load_tokenizer(tiny_target), load_target(tiny_target, torch.float32)
    prompts = [render(tokenizer, [{"role": "user", "content": content}]) for content in CONTENTS]
    sampling = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    outputs = engine[0].generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=False
        )
        assert expected[0, len(prompt) :].tolist() == list(output.outputs[0].token_ids)


def test_rendered_ids_equal_vllms_chat(engine: tuple[LLM, Path], tiny_target: Path) -> None:
    messages = [{"role": "user", "content": CONTENTS[1]}]
    output = engine[0].chat(messages, SamplingParams(max_tokens=1))[0]
    assert list(output.prompt_token_ids) == render(load_tokenizer(tiny_target), messages)
