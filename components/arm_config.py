"""How one arm drafts, as a run's settings say it: the methods, and the keys that each of them takes.

The keys are those of vLLM's `speculative_config` (vllm/config/speculative.py), under their own names. Only the method `peagle` is ours:
vLLM has no word for a P-EAGLE head. What vLLM would refuse a minute later, or take and do something else, is refused here.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from components.section import Count, Section, Share

Method = Literal["none", "ngram", "suffix", "draft_model", "eagle", "eagle3", "peagle", "mtp"]
REGISTRY = re.compile(r"registry:(?P<name>[^@]+)@(?P<which>[^@]+)")
"""A head of the registry: by alias or by version number."""

ALWAYS = {"num_speculative_tokens", "rejection_sample_method", "synthetic_acceptance_length"}
DRAFT = {"model", "revision", "draft_tensor_parallel_size"}
PADDED = {"disable_padded_drafter_batch"}
DYNAMIC = {"num_speculative_tokens_per_batch_size"}
SUFFIX_KEYS = {
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
}
KEYS: Mapping[str, set[str]] = {
    "none": set(),
    "ngram": ALWAYS | DYNAMIC | {"prompt_lookup_min", "prompt_lookup_max"},
    "suffix": ALWAYS | SUFFIX_KEYS,  # its proposer takes K as it was at the start, and no other
    "draft_model": ALWAYS | DYNAMIC | DRAFT | {"parallel_drafting"},
    "eagle": ALWAYS | DYNAMIC | DRAFT | PADDED,
    "eagle3": ALWAYS | DYNAMIC | DRAFT | PADDED,
    "peagle": ALWAYS | DRAFT,
    "mtp": ALWAYS | DYNAMIC | DRAFT | PADDED,
}
"""The keys that each method takes, `method` aside."""
NEED_A_MODEL = ("draft_model", "eagle", "eagle3", "peagle")
"""Methods that draft with weights of their own; mtp's are in the target."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "max_tokens", "repetition_penalty")
REFUSED_KEYS = {
    "tensor_parallel_size": "write draft_tensor_parallel_size, which is 1 or the target's",
    "pipeline_parallel_size": "remove it: what drafts runs on one pipeline stage",
    **dict.fromkeys(SAMPLING, "remove it: sampling belongs to the request (data.temperature, data.top_p ...)"),
}
"""Keys that a speculative config never takes, and what to do instead."""
METHOD_HINTS = {
    "pard": "write method draft_model with parallel_drafting true",
    "parallel_eagle": "write method peagle",
    "draft": "write method draft_model",
    "assistant": "write method draft_model",
    "prompt_lookup": "write method ngram",
}


class ArmConfig(Section):
    method: Method
    """What drafts: nothing, matches in the text so far (ngram), in earlier answers too (suffix), a smaller model, or a head."""
    num_speculative_tokens: Count | None = None
    """K: draft tokens of a verification round; suffix takes it as the most."""
    model: str | None = None
    """What drafts: a folder, a Hugging Face id, `registry:NAME@ALIAS` or `registry:NAME@VERSION`; mtp without it: the target's own layers."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id; it is resolved to a commit."""
    draft_tensor_parallel_size: Count | None = None
    """GPUs that one draft is spread over: 1, or as many as the target."""
    prompt_lookup_min: Count | None = None
    """Shortest n-gram that is looked up."""
    prompt_lookup_max: Count | None = None
    """Longest n-gram that is looked up."""
    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0)] | None = None
    """Answers that suffix remembers; 0: only the request's own text. It has to be stated: warm and cold caches give other figures."""
    suffix_decoding_max_tree_depth: Count | None = None
    """Longest match plus draft, in tokens."""
    suffix_decoding_max_spec_factor: Annotated[float, Field(gt=0.0)] | None = None
    """At most this many draft tokens a matched token."""
    suffix_decoding_min_token_prob: Share | None = None
    """Rarer continuations are not proposed."""
    parallel_drafting: bool = False
    """Of a draft model that was trained for it (PARD): all K tokens in one pass."""
    disable_padded_drafter_batch: bool = False
    """Draft in batches of uneven length."""
    num_speculative_tokens_per_batch_size: list[tuple[Count, Count, Annotated[int, Field(ge=0)]]] | None = None
    """Dynamic K: [first batch size, last batch size, K] each."""
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    """synthetic accepts by chance, whatever was drafted: for load tests, refused by gate, router and publisher."""
    synthetic_acceptance_length: Annotated[float, Field(ge=1.0)] | None = None
    """AL that synthetic acceptance has on average."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_foreign_keys(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key in REFUSED_KEYS:
                raise ValueError(f"{key} is no key of a speculative config: {REFUSED_KEYS[key]}")
        return given

    @field_validator("method", mode="before")
    @classmethod
    def _refuse_guesses(cls, value: Any) -> Any:
        methods = get_args(Method)
        if isinstance(value, str) and value not in methods:
            raise ValueError(f"{value!r} is no method: {_method_hint(value, methods)}")
        return value

    @model_validator(mode="after")
    def _check(self) -> "ArmConfig":
        for problem in _problems(self):
            raise ValueError(problem)
        return self

    def stated(self) -> dict[str, Any]:
        """The keys that differ from vLLM's own defaults, `method` and `model` aside."""
        fields = type(self).model_fields
        values = {name: getattr(self, name) for name in fields if name not in ("method", "model")}
        return {name: value for name, value in values.items() if value != fields[name].default}


def sampler_problems(arms: Mapping[str, ArmConfig], on_gpu: bool) -> Iterator[str]:
    """Synthetic acceptance on a CPU: vLLM's sampler dies there at the first round (vllm/utils/cpu_triton_utils.py)."""
    for name, arm in arms.items():
        if arm.rejection_sample_method == "synthetic" and not on_gpu:
            yield (
                f"evaluate.baselines.{name}.rejection_sample_method synthetic needs a GPU: "
                "set resources.evaluate.num_gpus, or remove it"
            )


def _method_hint(given: str, methods: tuple[str, ...]) -> str:
    word = given.lower().replace("-", "_").replace(" ", "_")
    if word in METHOD_HINTS or word.endswith("_mtp"):  # vLLM had a method for every model with such layers
        return METHOD_HINTS.get(word, "write method mtp")
    near = difflib.get_close_matches(word, methods, n=1)
    known = f"use one of {', '.join(methods)}"
    return f"did you mean {near[0]}? Otherwise {known}" if near else known


def _problems(arm: ArmConfig) -> Iterator[str]:
    """`problem: fix` lines, the most telling one first."""
    for key in sorted(arm.stated().keys() | ({"model"} if arm.model else set())):
        if key not in KEYS[arm.method]:
            yield _misplaced(key, arm.method)
    if arm.method == "none":
        return
    article = "an" if arm.method[0] in "aeimn" else "a"
    if arm.num_speculative_tokens is None:
        yield f"{article} {arm.method} arm needs num_speculative_tokens: set it, 3 for example"
    if arm.method in NEED_A_MODEL and arm.model is None:
        yield f"{article} {arm.method} arm needs model: name a folder, a Hugging Face id or registry:NAME@ALIAS"
    yield from _model_problems(arm)
    yield from _lookup_problems(arm)
    yield from _length_problems(arm)
    yield from _schedule_problems(arm)


def _misplaced(key: str, method: str) -> str:
    if method == "peagle" and key in PADDED:
        return f"P-EAGLE drafts in padded batches only: remove {key}"
    if method == "peagle" and key in DYNAMIC:
        return (
            f"P-EAGLE's draft slots are fixed at K, and {key} would hand one request another's drafts: "
            "remove it and measure each K as an arm of its own"
        )
    if key == "parallel_drafting" and method in ("eagle3", "peagle"):
        return "a head that drafts all K tokens in one pass is a P-EAGLE head: write method peagle without parallel_drafting"
    takers = [name for name, keys in KEYS.items() if key in keys]
    return f"a {method} arm does not take {key}: remove it (it goes with {', '.join(takers)})"


def _model_problems(arm: ArmConfig) -> Iterator[str]:
    if arm.model is not None and arm.model.startswith("registry:"):
        if not REGISTRY.fullmatch(arm.model):
            yield f"model {arm.model!r} names no head: write registry:NAME@ALIAS or registry:NAME@VERSION"
        if arm.method != "peagle":
            yield f"the registry holds P-EAGLE heads, and this is a {arm.method} arm: write method peagle"
        if arm.revision is not None:
            yield "a head of the registry has no revision: write its version into model, as registry:NAME@VERSION"
    if arm.revision is not None and arm.model is None:
        yield "revision goes with model: name a Hugging Face id, or remove it"
    if arm.parallel_drafting and arm.num_speculative_tokens_per_batch_size is not None:
        yield "a parallel draft's slots are fixed at K: remove num_speculative_tokens_per_batch_size"


def _lookup_problems(arm: ArmConfig) -> Iterator[str]:
    low, high = arm.prompt_lookup_min, arm.prompt_lookup_max
    if low is not None and high is not None and low > high:
        yield f"prompt_lookup_min {low} is above prompt_lookup_max {high}: swap the two"
    if arm.method == "suffix" and arm.suffix_decoding_max_cached_requests is None:
        yield (
            "a suffix arm's figures depend on suffix_decoding_max_cached_requests: "
            "state it, 10000 as vLLM does, or 0 for the request's own text alone"
        )


def _length_problems(arm: ArmConfig) -> Iterator[str]:
    length, k = arm.synthetic_acceptance_length, arm.num_speculative_tokens or 1
    synthetic = arm.rejection_sample_method == "synthetic"
    if synthetic and length is None:
        yield f"synthetic acceptance needs synthetic_acceptance_length: set it between 1 and {k + 1}"
    if length is not None and not synthetic:
        yield "synthetic_acceptance_length goes with rejection_sample_method synthetic: remove it"
    if length is not None and length > k + 1:
        yield f"synthetic_acceptance_length {length:g} is more than K + 1: set it between 1 and {k + 1}"


def _schedule_problems(arm: ArmConfig) -> Iterator[str]:
    schedule = arm.num_speculative_tokens_per_batch_size
    if schedule is None:
        return
    expected = 1
    for first, last, k in schedule:
        if first != expected or last < first:
            yield f"dynamic K leaves batch size {expected} out or names it twice: begin at 1 and leave no gap"
        if k > (arm.num_speculative_tokens or 0):
            yield f"dynamic K {k} is above num_speculative_tokens: raise that one, vLLM would cut this one"
        expected = last + 1
    if not schedule:
        yield "dynamic K without an entry: remove num_speculative_tokens_per_batch_size"
