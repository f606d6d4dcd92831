"""The target's own answers: every user turn answered through vLLM replicas under Ray Data."""

from components.config import Settings
from components.data.answering import AnswerWorker
from components.data.part_map import PartJob, make_parts
from components.data.part_worker import PartTask, PartWorker
from components.data.parts import conclude
from components.data.prompt_list import PROMPTS, fixed_cut, prompt_ranges
from components.section import ConfigError
from components.stage import Outcome
from components.storage import Location
from components.target.engine import engine_env, engine_kwargs, has_gpu

CPU_MAX_NUM_SEQS = 64  # more at once gain nothing on two cores, and shorten nothing


def answer_prompts(
    settings: Settings,
    prompts: Location,
    num_turns: int,
    target_path: str,
    output: Location,
    worker: type[PartWorker] = AnswerWorker,
) -> Outcome:
    """Answer every turn of `prompts`, part by part; parts that are there already stay as they are.

    Args:
        settings: The run's.
        prompts: Output folder of the prompts stage.
        num_turns: Turns to answer, over all prompts.
        target_path: The target's Hugging Face folder.
        output: Where the parts go.
        worker: Class of the workers.

    Raises:
        OSError: the storage is full.
        WorkersFailed: engines did not start, or did nothing but die.
        TooManyRowsLost: more turns were lost than `data.max_dropped_fraction` allows.
    """
    file = prompts.join(PROMPTS)
    ranges = prompt_ranges(file, fixed_cut(output, settings.data.rows_per_shard))
    resources = settings.resources.responses
    job = PartJob(
        title="responses",
        unit="answers",
        total=num_turns,
        output=output,
        worker=worker,
        worker_args=(
            prompts,
            target_path,
            response_engine_kwargs(settings, target_path),
            settings.data,
            settings.target.chat_template_kwargs,
        ),
        resources=resources,
        env=engine_env(resources, in_process=True),
        max_attempts=settings.data.max_attempts,
        stall_timeout_s=settings.data.stall_timeout_s,
    )
    make_parts(job, [PartTask(part.number, part.start, part.num_bytes) for part in ranges])
    return conclude("responses", output, settings.data.max_dropped_fraction, prompts)


def response_engine_kwargs(settings: Settings, target_path: str) -> dict:
    extra = {} if has_gpu(settings.resources.responses) else {"max_num_seqs": CPU_MAX_NUM_SEQS}
    kwargs = engine_kwargs(settings, settings.resources.responses, target_path)
    return extra | kwargs


def check_length(settings: Settings, max_position_embeddings: int) -> None:
    """Raises ConfigError when engines would be started for longer sequences than the target takes."""
    if settings.target.max_model_len > max_position_embeddings:
        raise ConfigError(
            "target.max_model_len",
            f"{settings.target.max_model_len} is more than the target's {max_position_embeddings} positions",
            f"set it to {max_position_embeddings} or less",
        )
