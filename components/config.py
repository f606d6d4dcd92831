"""The run's settings: frozen models, whose fields say below themselves what they do. `components/config_loading.py` reads them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from components.arm_config import ArmConfig, sampler_problems
from components.engine_arguments import engine_problems
from components.section import Count, Section, Share
from components.speed_config import SpeedConfig

Weight = Annotated[float, Field(gt=0.0, lt=1.0)]


class TargetConfig(Section):
    model: str = "bundled:smollm2-135m-instruct"
    """The model being served: `bundled:...`, a local folder or a Hugging Face id."""
    revision: str | None = None
    """Branch, tag or commit of a Hugging Face id; it is resolved to a commit."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """One dtype for answering, capture, evaluation and serving: greedy texts part between dtypes."""
    max_model_len: Count = 1024
    """Longest prompt plus answer, in tokens, that every engine is started with."""
    chat_template_kwargs: dict[str, bool | int | float | str] = {}
    """Switches of the chat template (`enable_thinking: false`), the same for answering, evaluation and serving."""


class PromptSource(Section):
    path: str | None = None
    """`builtin`, or a file or folder of JSONL, JSON or Parquet, here or at s3://, or a folder that `datasets` saved."""
    dataset: str | None = None
    """Hugging Face data set id, instead of a path."""
    name: str | None = None
    """Configuration (subset) of a data set or of a folder laid out like one, where it has several."""
    split: str | None = None
    """Split of a data set or of a folder laid out like one; null: `train`, or the only one."""
    revision: str | None = None
    """Branch, tag or commit of a data set id; it is resolved to a commit."""
    files: str | None = None
    """Pattern such as `data/train-*` of the only files of a data set id to download; null: all of its data files."""
    weight: Annotated[float, Field(gt=0.0)] | None = None
    """Share of `data.max_prompts` beside the other sources' weights; null: as many as the source has rows."""
    max_prompts: Count | None = None
    """Take at most this many of the source, drawn by hash."""
    family: str | None = None
    """Family of all its rows; null: the row's `family`, `task` or `category`, else the name of its file."""

    @model_validator(mode="after")
    def _check(self) -> "PromptSource":
        if (self.path is None) == (self.dataset is None):
            raise ValueError("a source is either a path or a dataset: name one of the two")
        if self.path is not None and (self.revision or self.files):
            raise ValueError("revision and files go with a dataset, not with a path: remove them")
        if self.files is not None and (self.name or self.split):
            raise ValueError("files chooses what name and split choose: give the one or the others")
        return self


def _off(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


def _as_list(value: Any) -> Any:
    """A path or a source stands for a list of one, a path for a source."""
    values = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in values]


def _as_written(sources: list[PromptSource]) -> Any:
    """The shortest form that reads as the same."""
    short = [source.model_dump(mode="json", exclude_none=True) for source in sources]
    plain = [source["path"] if list(source) == ["path"] else source for source in short]
    return plain[0] if len(plain) == 1 else plain


PromptSources = Annotated[list[PromptSource], BeforeValidator(_as_list), PlainSerializer(_as_written, return_type=Any)]


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Settings of `data` that say how answers are sampled: those of the training answers, and of the A/B traffic."""


class StreamConfig(Section):
    documents_in_flight: Annotated[int, Field(ge=2)] = 32
    """Documents that one training worker has asked for and not used yet, at most: bounds the memory, and hides the capture's delay."""
    cache_gb: Annotated[float, Field(ge=0.0)] = 0.0
    """Memory of each capture worker in which features stay for the next epochs; 0: every epoch captures all documents again."""


class DataConfig(Section):
    prompts: Annotated[PromptSources, Field(min_length=1)] = [PromptSource(path="builtin")]
    """`builtin`, a file or folder (a relative one starts where the command is given), a source with its keys (below), or a list of these."""
    max_prompts: Count | None = None
    """Take at most this many, drawn over all sources by hash."""
    deduplicate: Annotated[Literal["exact", "near", "off"], BeforeValidator(_off)] = "exact"
    """exact: of equal conversations keep one; near: also of those that are alike; off: keep all."""
    contamination: Annotated[Literal["drop", "warn", "off"], BeforeValidator(_off)] = "drop"
    """What happens to a prompt for training that repeats a held-out or a benchmark prompt, whole or nearly."""
    benchmarks: PromptSources = []
    """Further prompts that none for training may repeat: sources as in `data.prompts`; they are not answered."""
    near_similarity: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Share of common word triples (Jaccard) from which two prompts are alike."""
    held_out_families: list[str] = ["code_editing", "explanation", "rewriting"]
    """Families never trained on; evaluation and A/B traffic come from them."""
    validation_fraction: Annotated[float, Field(gt=0.0, lt=0.4)] = 0.05
    """Share of the other prompts, by hash of their content, kept for the in-training metric."""
    max_new_tokens: Count = 80
    """Longest answer, in tokens."""
    truncation: Literal["keep", "drop"] = "keep"
    """An answer cut off at `max_new_tokens`: keep it (counted as truncated), or drop it and the turns after it (counted as cut_off)."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Sampling temperature of the answers: use the one that serving uses."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus of the answers' sampling."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Most likely tokens that an answer's are drawn from; 0: all."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Least probability of a drawn token, as a share of the most likely one's."""
    repetition_penalty: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """Above 1, tokens that the prompt or the answer has already are less likely, in greedy answers too."""
    seed: int = 0
    """Of the cap's draw and of sampled answers."""
    max_dropped_fraction: Share = 0.1
    """The job fails when a larger share of rows is dropped or failed in one stage; duplicates, contaminated rows and
    rows beyond a cap do not count."""
    max_attempts: Count = 3
    """Times that a row, alone, may end an engine or a capture worker before it is set apart; the other rows are kept."""
    stall_timeout_s: Annotated[float, Field(gt=0.0)] = 1800.0
    """An engine or a capture worker that does nothing for this long hangs: it is ended and started again, and its rows count as having
    ended it. It must have the time to start, and for one step of the engine or one batch of a capture."""
    extractor: Literal["transformers", "vllm"] = "transformers"
    """What runs the target for its hidden states: transformers, or vLLM for targets that need several GPUs (`resources.features.engine`)."""
    mode: Literal["store", "stream"] = "store"
    """store: the features of all documents are written to `storage.uri`, then read by training. stream: capture workers hand those of
    training documents to training as it asks for them, and none is written; `resources.features` and `resources.train` are then
    needed at the same time."""
    stream: StreamConfig = StreamConfig()
    """Of `mode: stream`."""
    rows_per_shard: Count = 64
    """Rows of one file; how work is cut, not what comes out."""
    batch_tokens: Count = 1024
    """Tokens of one forward pass of the target during capture; packed documents pay attention for all of them."""

    @property
    def sampling(self) -> dict[str, float]:
        """How answers are sampled, by the names that vLLM and its HTTP API give these settings."""
        return {name: getattr(self, name) for name in SAMPLING}

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        weighted = [source.weight is not None for source in self.prompts]
        if any(weighted) and not all(weighted):
            raise ValueError("some of data.prompts have a weight and some have none: give one to each, or to none")
        if any(weighted) and self.max_prompts is None:
            raise ValueError("weights share out data.max_prompts, which is not set: set it, or cap each source")
        return self


class DraftConfig(Section):
    num_layers: Count = 2
    """Decoder layers of the head."""
    vocab_size: Count = 12000
    """Size of the draft vocabulary; capped at the target's."""
    aux_layers: list[int] | None = None
    """Decoder layers whose entering residual stream the head reads; null: `[2, L//2, L-3]`."""
    mask_token_id: int | None = None
    """Id that no text uses, for the unknown tokens of a chain; null: chosen from the tokenizer."""


class TrainConfig(Section):
    epochs: Count = 2
    """Passes over the training documents."""
    num_depths: Annotated[int, Field(ge=2)] = 4
    """K in training: a chain has depths 0..num_depths-1."""
    chain_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """r: share of anchors whose chain reaches depth d is max(r^d, chain_floor)."""
    chain_floor: Share = 0.0
    """r_min: smallest share of anchors at any depth."""
    documents_per_step: Count = 4
    """Global batch: documents of one optimiser step, over all workers."""
    rows_per_part: Count | Literal["auto"] = "auto"
    """Most elements computed at once: memory against speed, never the result. auto: as the GPU's free memory allows, 4096 on a CPU."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Compute each layer of the depth-0 rows again in the backward instead of keeping it. auto: where a GPU's memory asks for it."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-3
    """Peak of the schedule (AdamW)."""
    lr_schedule: Literal["cosine", "linear"] = "cosine"
    """Shape of the decay to 0 after the warm-up."""
    warmup_fraction: Share = 0.05
    """Share of all steps in which the learning rate rises."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Of matrices; gains are never decayed."""
    clip_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Largest norm of the gradient of one step."""
    loss: Literal["kl", "cross_entropy"] = "kl"
    """Distance to the teacher: KL(teacher || head), or cross entropy with the recorded token."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Autocast dtype over fp32 master weights."""
    train_embeddings: bool = True
    """Whether the embedding rows that the training texts use are trained."""
    embedding_updates: Literal["dense", "sparse"] = "dense"
    """dense: Adam moves all trained rows in every step. sparse: only those that the step read (SparseAdam), a gain of 1% of a GPU's step
    with 150,000 rows."""
    train_lm_head: bool = True
    """Whether the head's output layer is trained, or stays the target's."""
    shard: bool = False
    """Cut weights, gradients and optimiser state over the workers (FSDP2): for heads whose state fills a GPU."""
    checkpoint_every_steps: Count | None = None
    """Optimiser steps between checkpoints; null: at the end of every epoch."""
    seed: int = 0
    """Of the head's start, the order of documents and the chains."""

    @model_validator(mode="after")
    def _check(self) -> "TrainConfig":
        if self.embedding_updates == "sparse":
            for name, clash in (("shard", self.shard), ("weight_decay", self.weight_decay > 0)):
                if clash:
                    raise ValueError(
                        f"train.embedding_updates=sparse goes without train.{name}: leave {name} at its default, or choose dense"
                    )
        return self


class BenchmarkConfig(Section):
    path: str
    """File of JSON Lines, JSON or Parquet: prompts as in `data.prompts`, each with what its scorer needs."""
    scorer: Literal["humaneval", "mbpp", "gsm8k", "none"] = "none"
    """What makes an answer right: tests that are run in a sandbox (humaneval, mbpp), the reference's last number (gsm8k), or nothing. Every
    answer is also compared with plain decoding's; without test or reference by its last number, or by whether its code runs."""
    max_prompts: Count | None = None
    """At most this many, drawn by hash; null: all."""
    max_new_tokens: Count = 512
    """Longest answer, in tokens."""


class SandboxConfig(Section):
    timeout_s: Annotated[float, Field(gt=0.0)] = 10.0
    """Wall time of one generated program."""
    memory_mb: Annotated[int, Field(ge=128)] = 1024
    """Memory of one generated program."""


BenchmarkName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class EvaluateConfig(Section):
    num_speculative_tokens: Count = 3
    """K: draft tokens of a verification round."""
    candidates: Count = 1
    """Heads of the training run that are measured: its checkpoints with the best walked AL on validation answers; 1: the last one."""
    num_prompts: Count = 32
    """Held-out prompts that every arm answers."""
    max_new_tokens: Count = 96
    """Longest answer of the answers pass, in tokens."""
    concurrency: Count = 32
    """Requests at once in the answers pass."""
    speed_prompts: Annotated[int, Field(ge=5)] = 12
    """Prompts of the speed pass (one at a time, fixed length); fewer than 5 would give no interval."""
    speed_tokens: Count = 32
    """Tokens of each answer in the speed pass."""
    tasks: dict[str, list[str]] = {"code_editing": ["code_editing"], "chat": ["explanation", "rewriting"]}
    """Families that are reported together, by task; a family that is in none is a task of its own."""
    temperatures: Annotated[list[Annotated[float, Field(ge=0.0, le=2.0)]], Field(min_length=1)] = [0.0]
    """Of the answers to the held-out prompts. 0.0 is required: it decides; any other adds a sampled pass that is reported apart."""
    benchmarks: dict[BenchmarkName, BenchmarkConfig] = {}
    """Further prompts that every arm answers greedily, each set a task of its own with a score; by name."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where generated code runs; only benchmarks with such a scorer run any."""
    regression_tolerance: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.02
    """Largest relative difference from a registered head's recorded AL in `pipelines/evaluate.py --regression`."""
    baselines: dict[str, ArmConfig] = {
        "none": ArmConfig(method="none"),
        "ngram": ArmConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=2, prompt_lookup_max=4),
    }
    """Arms measured beside the head, by name; `none` is required."""

    @model_validator(mode="after")
    def _check(self) -> "EvaluateConfig":
        if "none" not in self.baselines or self.baselines["none"].method != "none":
            raise ValueError(
                "evaluate.baselines.none must exist with method none: it is what greedy answers are compared with"
            )
        if 0.0 not in self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(
                "evaluate.temperatures must hold 0.0 and nothing twice: the verdict comes from greedy answers"
            )
        families = [family for task in self.tasks.values() for family in task]
        if twice := sorted({family for family in families if families.count(family) > 1}):
            raise ValueError(f"the family {twice[0]} is in evaluate.tasks twice: leave it in one task")
        if taken := sorted(self.benchmarks.keys() & {*self.tasks, *families}):
            raise ValueError(f"evaluate.benchmarks.{taken[0]} has the name of a task: give it another")
        return self


class ExperimentConfig(Section):
    alpha: Annotated[float, Field(gt=0.0, le=0.2)] = 0.05
    """Largest chance that a head which is no better is promoted, whenever one looks; likewise of a wrong stop."""
    min_effect: Annotated[float, Field(ge=0.0)] = 0.02
    """Relative gain in AL that is worth a change."""
    min_sessions: Count = 100
    """Sessions of both arms before the first decision on AL."""
    max_requests: Count = 2000
    """Requests of both arms that count, after which the experiment ends, undecided or not."""
    session_idle_s: Annotated[float, Field(gt=0.0)] = 300.0
    """A session that is silent for this long is over: it counts then, once."""
    session_requests: Count = 20
    """A session counts with its first so many requests, so that one client cannot decide alone."""
    guardrail_sessions: Count = 20
    """Sessions of both arms before the first decision on errors and latency."""
    max_error_increase: Share = 0.01
    """The challenger's share of requests that failed, or that clients left in vain, may be larger by this much."""
    max_latency_increase: Annotated[float, Field(ge=0.0)] = 0.25
    """The challenger's 95th percentile of a request's time may be larger by this share."""
    max_tpot_increase: Annotated[float, Field(ge=0.0)] = 0.1
    """The challenger's time per output token may be larger by this share."""
    min_own_answers: Share = 0.99
    """Share of the challenger's requests that it must have answered itself: while an arm is ejected, others answer for it."""
    poll_s: Annotated[float, Field(gt=0.0)] = 5.0
    """Seconds between two looks."""


class WatchConfig(Section):
    sessions: Annotated[int, Field(ge=20)] = 200
    """Sessions of a window, which is tested once."""
    al_drop: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Alarm when AL is lower by more than this share, beyond doubt, than in the experiment; without one than recorded of the registered
    version at this K; without such a figure than in the first window."""
    latency_increase: Annotated[float, Field(ge=0.0)] = 0.25
    """Alarm when the 95th percentile of a request's time is larger than in the first window by more than this share, beyond doubt."""
    level: Annotated[float, Field(gt=0.0, le=0.05)] = 0.001
    """Chance that a window of a sound champion gives an alarm."""
    rollback: bool = False
    """After an experiment's promotion: on an alarm give traffic and alias back to the champion before; false: only say so."""


class AbConfig(Section):
    requests: Count = 20
    """Replayed held-out requests."""
    concurrency: Count = 4
    """Sessions at once."""
    max_new_tokens: Count = 64
    """Longest answer of the replayed traffic, in tokens."""
    challenger_weight: Weight = 0.5
    """Share of the sessions that the new head answers while the A/B stage runs."""
    arms: dict[str, Weight] = {}
    """Arms of `evaluate.baselines` that get traffic too in the A/B stage, each with its share of the sessions; the control has what is left."""
    salt: str = "aerie"
    """Salt of the sticky assignment; another salt deals the sessions anew."""
    host: str = "127.0.0.1"
    """Address that the endpoint listens on."""
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port that the endpoint listens on."""
    first_item_timeout_s: Annotated[float, Field(gt=0.0)] = 120.0
    """A request whose arm says nothing for this long fails with 504."""
    drain_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    """Requests that run on an arm when it is replaced or removed may go on for this long."""
    keep_serving: bool = True
    """Leave the endpoint up after the job; one that was up before it stays in any case."""
    max_body_bytes: Count = 8388608
    """A request with a longer body is refused with 413."""
    api_keys_file: Path | None = None
    """File with the keys of clients, one a line, on the router's machine; null: everybody may ask."""
    admin_token_file: Path | None = None
    """File with the token of operators, who may change weights and states of the arms; null: nobody may."""
    record_requests: bool = True
    """Write one line a live request, without its text, to `live/` in the storage."""
    records_retention_days: Count | None = 30
    """Live records of older days are removed; null: never. An interrupted experiment goes on only with those since its beginning."""
    experiment: ExperimentConfig = ExperimentConfig()
    """`pipelines/serve.py --experiment`."""
    watch: WatchConfig = WatchConfig()
    """`pipelines/serve.py --watch`, also after a promotion by `--experiment`."""


class GateConfig(Section):
    min_effect: Annotated[float, Field(ge=0.0)] = 0.02
    """Relative gain in AL over the champion that is worth a change."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Of all intervals."""
    task_margin: Annotated[float, Field(ge=0.0)] = 0.05
    """No family's AL may be worse than the champion's by more than this share, beyond doubt."""
    speed_margin: Annotated[float, Field(ge=0.0)] = 0.02
    """Output tokens/s may be at most this share below the baseline's."""
    max_errors: Annotated[int, Field(ge=0)] = 0
    """Failed or empty answers that an arm may have."""
    bootstrap_samples: Count = 2000
    """Resamples of the prompts behind an interval."""
    seed: int = 0
    """Of the resamples."""


class PublishConfig(Section):
    name: str = "aerie-head"
    """Name of the registered model in MLflow."""
    promote: bool = True
    """Let the gate move the `champion` alias; false: register and report only."""
    bundle_uri: str | None = None
    """s3://bucket/prefix that also receives the bundle."""
    include_prompts: bool = True
    """Put the held-out prompts, as token ids, into the bundle: `pipelines/evaluate.py --regression` measures the head with them."""
    gate: GateConfig = GateConfig()


class StageResources(Section):
    num_cpus: Annotated[float, Field(gt=0.0)] = 1.0
    """Logical CPUs of one actor or worker."""
    num_gpus: Annotated[float, Field(ge=0.0)] = 0.0
    """GPUs of one actor or worker; 0: the stage runs on the CPU."""
    replicas: Count = 1
    """Actors or workers of the stage."""
    engine: dict[str, Any] = {}
    """Further vLLM engine arguments (tensor_parallel_size, gpu_memory_utilization, ...). One that changes what the engine says
    (quantization, kv_cache_dtype, ...) is part of what the stage's output depends on."""
    env: dict[str, str] = {}
    """Environment variables of the stage's processes."""


class ResourcesConfig(Section):
    responses: StageResources = StageResources()
    """Engines that answer the prompts."""
    features: StageResources = StageResources()
    """Workers that record hidden states."""
    train: StageResources = StageResources()
    """Ray Train workers."""
    evaluate: StageResources = StageResources()
    """The engine or server of the arm that is being measured."""
    ab: StageResources = StageResources()
    """One arm's resources."""


class StorageConfig(Section):
    uri: str = "storage"
    """Folder or s3://bucket/prefix that holds every stage's output; a relative folder starts at the project root."""
    lease_ttl_s: Annotated[float, Field(gt=0.0)] = 60.0
    """A run that gave no sign of life for this long has lost its output to the next one."""
    refuse_overfull: bool = True
    """Refuse a run whose plan (`--plan`: answers of full length) does not fit on the disk; false: say so and go on. A disk that then fills
    up ends the job, and what is done is kept."""


class MlflowConfig(Section):
    tracking_uri: str = "http://127.0.0.1:5000"
    """Address of the MLflow server."""
    experiment: str = "aerie"
    """MLflow experiment that the run belongs to."""


class Settings(Section):
    target: TargetConfig = TargetConfig()
    data: DataConfig = DataConfig()
    draft: DraftConfig = DraftConfig()
    train: TrainConfig = TrainConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    speed: SpeedConfig = SpeedConfig()
    ab: AbConfig = AbConfig()
    publish: PublishConfig = PublishConfig()
    resources: ResourcesConfig = ResourcesConfig()
    storage: StorageConfig = StorageConfig()
    mlflow: MlflowConfig = MlflowConfig()

    @model_validator(mode="after")
    def _check(self) -> "Settings":
        if self.data.max_new_tokens >= self.target.max_model_len:
            raise ValueError("data.max_new_tokens must be below target.max_model_len: lower the one or raise the other")
        engines = {stage: getattr(self.resources, stage).engine for stage in ResourcesConfig.model_fields}
        for problem in [
            *engine_problems(engines, self.evaluate.baselines),
            *sampler_problems(self.evaluate.baselines, on_gpu=self.resources.evaluate.num_gpus > 0),
            *self._traffic_problems(),
        ]:
            raise ValueError(problem)
        return self

    def _traffic_problems(self) -> Iterator[str]:
        for name in sorted(self.ab.arms.keys() - self.evaluate.baselines.keys()):
            yield f"ab.arms.{name} is no arm of evaluate.baselines: use one of {', '.join(self.evaluate.baselines)}"
        if self.ab.challenger_weight + sum(self.ab.arms.values()) >= 1:
            yield "ab.challenger_weight and ab.arms leave nothing for the control: lower them to less than 1"
