"""The step of several ranks is the step of one, and a resumed run is the uninterrupted one."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from components.config import TrainConfig
from components.draft.batch import Document
from components.draft.head import DraftHead, HeadConfig
from components.draft.losses import Teacher
from components.training.memory import local, missing_bytes
from components.training.order import Entry
from components.training.reduce import reduce_gradients, scale_gradients
from components.training.shard import shard_head, whole_tensor
from components.training.state import load_progress, load_weights, save_state
from components.training.trainer import Trainer
from components.training.validation import validate

VOCAB, WIDTH, AUX = 40, 32, (1, 2)
FP32_STEP_TOLERANCE = 2e-6  # sums of fp32 gradients in another order, through a few Adam steps of 1e-3
CONFIG = TrainConfig(
    epochs=2, num_depths=3, documents_per_step=4, rows_per_part=64, dtype="float32", learning_rate=1e-3
)


def make_document(number: int, answer_tokens: int = 12) -> Document:
    generator = torch.Generator().manual_seed(number)
    length = 8 + answer_tokens
    mask = torch.zeros(length, dtype=torch.bool)
    mask[length - answer_tokens :] = True
    return Document(
        input_ids=torch.randint(VOCAB, (length,), generator=generator),
        loss_mask=mask,
        aux_hidden=torch.randn(length, len(AUX) * WIDTH, generator=generator),
        last_hidden=torch.randn(length, WIDTH, generator=generator),
    )


def make_trainer(
    documents: list[Document | None],
    rank: int = 0,
    world_size: int = 1,
    config: TrainConfig = CONFIG,
    checkpoint: Path | None = None,
) -> Trainer:
    torch.manual_seed(0)
    shape = HeadConfig(
        hidden_size=WIDTH, target_hidden_size=WIDTH, aux_layers=AUX, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, intermediate_size=48, vocab_size=VOCAB, draft_vocab_size=VOCAB, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=64, mask_token_id=3,
    )  # fmt: skip
    head = DraftHead(shape)
    teacher = Teacher(torch.rand(WIDTH) + 0.5, 1e-5, torch.randn(VOCAB, WIDTH))
    head.embed_tokens.train_rows(torch.arange(VOCAB - 4))
    head.embed_tokens.sparse = config.embedding_updates == "sparse"
    head.lm_head.requires_grad_(config.train_lm_head)
    if checkpoint:
        load_weights(checkpoint, head)
    if config.shard:
        shard_head(head, world_size)
    entries = [Entry("part-00000.parquet", row, row) for row in range(len(documents))]
    source = lambda wanted: (documents[entry.row] for entry in wanted)  # noqa: E731
    trainer = Trainer(head, teacher, entries, source, config, rank, world_size)
    if checkpoint:
        trainer.progress = load_progress(checkpoint, trainer.optimizer)
    return trainer


def weights(trainer: Trainer) -> torch.Tensor:
    """All tensors of the head; every rank of a sharded one must ask."""
    tensors = trainer.head.state_dict()
    return torch.cat([whole_tensor(tensors[name]).flatten().double() for name in sorted(tensors)])


def train_rank(rank: int, world_size: int, folder: str, steps: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    trainer = make_trainer(DOCUMENTS, rank, world_size)
    losses = [float(trainer.step().loss) for _ in range(steps)]
    figures = validate(trainer, DOCUMENTS[rank:5:world_size])
    results = {"weights": weights(trainer), "losses": losses, "figures": figures, "uneven": reduce_uneven(rank)}
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def reduce_uneven(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    count = (1, 9)[rank]
    parameter.grad = torch.full((1,), 2.0 * count)  # every supervised element contributes 2
    sums = reduce_gradients([parameter], torch.tensor([count, 0.0], dtype=torch.float64))
    scale_gradients([parameter], float(sums[0]), clip_norm=100.0)
    return parameter.grad, sums


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of two gloo ranks has after three steps."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(train_rank, args=(2, str(folder), 3), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


# 9 documents, 4 a step: the third step leaves the second rank without a document; number 5 has no supervised token
DOCUMENTS = [make_document(i, answer_tokens=1 if i == 5 else 4 + i) for i in range(9)]


def test_two_gloo_ranks_make_the_step_of_one(ranks: list[dict]) -> None:
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    alone = make_trainer(DOCUMENTS)
    before = weights(alone)
    losses = [float(alone.step().loss) for _ in range(3)]
    assert losses == pytest.approx(ranks[0]["losses"], rel=1e-5)
    assert (weights(alone) - before).abs().max() > 100 * FP32_STEP_TOLERANCE
    torch.testing.assert_close(weights(alone), ranks[0]["weights"], atol=FP32_STEP_TOLERANCE, rtol=0)
    figures = validate(alone, DOCUMENTS[:5])
    assert ranks[0]["figures"] == ranks[1]["figures"] == pytest.approx(figures, rel=1e-5)
    assert figures["validation/walked_al_1"] >= 1


def train_sparse_rank(rank: int, world_size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    trainer = make_trainer(DOCUMENTS, rank, world_size, SPARSE)
    for _ in range(3):
        trainer.step()
    torch.save(weights(trainer), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


SPARSE = CONFIG.model_copy(update={"embedding_updates": "sparse"})


def test_sparse_updates_are_those_of_adam_where_a_row_was_read_and_nothing_elsewhere() -> None:
    dense, sparse = make_trainer(DOCUMENTS), make_trainer(DOCUMENTS, config=SPARSE)
    start = sparse.head.embed_tokens.rows.detach().clone()
    dense.step(), sparse.step()
    off = (weights(sparse) - weights(dense)).abs()
    assert (
        off > FP32_STEP_TOLERANCE
    ).double().mean() < 0.01  # gradients near Adam's epsilon, which SparseAdam adds elsewhere
    assert off.max() < 0.5 * CONFIG.learning_rate
    read = {entry.number for entry in sparse._share(0)}
    ids = torch.cat([DOCUMENTS[number].input_ids for number in read]).unique()
    moved = (sparse.head.embed_tokens.rows != start).any(1).nonzero()[:, 0]
    assert set(moved.tolist()) <= set(ids.tolist()) | {3}  # and the mask token
    between = sparse.head.embed_tokens.rows.detach().clone()
    sparse.step()
    second = torch.cat([DOCUMENTS[entry.number].input_ids for entry in sparse._share(1)]).unique()
    still = torch.ones(VOCAB - 4, dtype=torch.bool)
    still[second[second < VOCAB - 4]] = False
    still[3] = False
    assert still.any()  # under plain Adam these would go on moving
    assert torch.equal(sparse.head.embed_tokens.rows[still], between[still])


def test_sparse_updates_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    mp.spawn(train_sparse_rank, args=(2, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    alone = make_trainer(DOCUMENTS, config=SPARSE)
    for _ in range(3):
        alone.step()
    assert torch.equal(first, second)
    torch.testing.assert_close(weights(alone), first, atol=FP32_STEP_TOLERANCE, rtol=0)


def test_a_frozen_output_layer_stays_and_the_rest_learns_as_before() -> None:
    unclipped = CONFIG.model_copy(update={"clip_norm": 1e6})
    free = make_trainer(DOCUMENTS, config=unclipped)
    frozen = make_trainer(DOCUMENTS, config=unclipped.model_copy(update={"train_lm_head": False}))
    start = frozen.head.lm_head.weight.detach().clone()
    free.step(), frozen.step()
    assert torch.equal(frozen.head.lm_head.weight, start)
    states = [trainer.head.state_dict() for trainer in (frozen, free)]
    assert not torch.equal(states[1]["lm_head.weight"], start)
    for name in states[0].keys() - {"lm_head.weight"}:
        torch.testing.assert_close(states[0][name], states[1][name], atol=FP32_STEP_TOLERANCE, rtol=0)


def test_a_loss_that_is_not_finite_moves_nothing() -> None:
    trainer = make_trainer(DOCUMENTS)
    with torch.no_grad():
        trainer.head.norm.weight.fill_(float("inf"))
    before = {name: tensor.clone() for name, tensor in trainer.head.state_dict().items()}
    with pytest.raises(ValueError, match="not finite"):
        trainer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.head.state_dict().items())


def train_sharded_rank(rank: int, world_size: int, folder: str) -> None:
    """Three steps, a checkpoint, and three more in a trainer that begins with it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    config = CONFIG.model_copy(update={"shard": True})
    trainer = make_trainer(DOCUMENTS, rank, world_size, config)
    share = sum(local(p).numel() for p in trainer.parameters)
    missing = missing_bytes(trainer.head, trainer.optimizer)
    losses = [float(trainer.step().loss) for _ in range(3)]
    figures = validate(trainer, DOCUMENTS[rank:5:world_size])
    save_state(Path(folder), trainer.head, trainer.optimizer, trainer.progress, write=rank == 0)
    dist.barrier()
    after_three = weights(trainer)
    resumed = make_trainer(DOCUMENTS, rank, world_size, config, checkpoint=Path(folder))
    for _ in range(3):
        resumed.step()
    results = {"weights": after_three, "losses": losses, "figures": figures, "resumed": weights(resumed)}
    results |= {"share": share, "all": sum(p.numel() for p in trainer.parameters), "missing": missing}
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_a_head_cut_by_fsdp_makes_the_steps_of_a_whole_one(tmp_path: Path, ranks: list[dict]) -> None:
    mp.spawn(train_sharded_rank, args=(2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        cut = torch.load(tmp_path / f"rank{rank}.pt")
        assert cut["share"] <= 0.51 * cut["all"]  # what the optimiser holds here
        # whole weights and whole gradients come and go with a step, two moments of the share stay
        assert cut["missing"] == 4 * (cut["all"] + cut["all"] + 2 * cut["share"])
        torch.testing.assert_close(cut["weights"], ranks[0]["weights"], atol=FP32_STEP_TOLERANCE, rtol=0)
        assert cut["losses"] == pytest.approx(ranks[0]["losses"], rel=1e-5)
        assert cut["figures"] == pytest.approx(ranks[0]["figures"], rel=1e-4)
        straight = make_trainer(DOCUMENTS)
        for _ in range(6):
            straight.step()
        torch.testing.assert_close(cut["resumed"], weights(straight), atol=2 * FP32_STEP_TOLERANCE, rtol=0)
    whole = make_trainer(DOCUMENTS, checkpoint=tmp_path)  # the checkpoint of two shares goes on as one
    for _ in range(3):
        whole.step()
    torch.testing.assert_close(weights(whole), weights(straight), atol=2 * FP32_STEP_TOLERANCE, rtol=0)


def test_ranks_with_1_and_9_supervised_elements_equal_one_with_10(ranks: list[dict]) -> None:
    for result in ranks:
        grad, sums = result["uneven"]
        assert float(grad) == pytest.approx(2.0)
        assert float(sums[0]) == 10


@pytest.mark.parametrize("config", [CONFIG, SPARSE], ids=["dense", "sparse"])
def test_six_steps_equal_three_a_checkpoint_and_three(config: TrainConfig, tmp_path: Path) -> None:
    straight = make_trainer(DOCUMENTS, config=config)
    rates = []
    for _ in range(6):
        straight.step()
        rates.append(straight.optimizer.param_groups[0]["lr"])
    first = make_trainer(DOCUMENTS, config=config)
    for _ in range(3):
        first.step()
    save_state(tmp_path, first.head, first.optimizer, first.progress)
    second = make_trainer(DOCUMENTS, config=config, checkpoint=tmp_path)
    resumed_rates = []
    for _ in range(3):
        second.step()
        resumed_rates.append(second.optimizer.param_groups[0]["lr"])
    assert resumed_rates == rates[3:]
    assert torch.equal(weights(second), weights(straight))
    assert second.progress.step == straight.total_steps == 6


def test_a_document_that_cannot_be_used_is_left_out_of_its_step() -> None:
    whole = CONFIG.model_copy(update={"documents_per_step": 9})
    without = [None if i == 5 else document for i, document in enumerate(DOCUMENTS)]
    trainers = [make_trainer(documents, config=whole) for documents in (without, DOCUMENTS)]
    counts = [int(trainer.step().count_D[0]) for trainer in trainers]
    assert counts[1] - counts[0] == 0  # number 5 has no supervised token
    torch.testing.assert_close(weights(trainers[0]), weights(trainers[1]), atol=FP32_STEP_TOLERANCE, rtol=0)
    nothing = make_trainer([None] * 9)
    before = weights(nothing)
    assert int(nothing.step().count) == 0
    assert torch.equal(weights(nothing), before)


def test_a_batch_without_a_supervised_token_changes_nothing() -> None:
    trainer = make_trainer([make_document(i, answer_tokens=1) for i in range(4)])
    before = weights(trainer)
    sums = trainer.step()
    assert int(sums.count) == 0
    assert torch.equal(weights(trainer), before)
    assert trainer.progress.step == 1


@pytest.mark.parametrize(("clip_norm", "scale"), [(10.0, 1 / 4), (2.5, 1 / 8)])
def test_gradients_become_those_of_the_mean_and_no_longer_than_the_clip(clip_norm: float, scale: float) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad, parameters[1].grad = (
        torch.tensor([12.0, 0.0]),
        torch.tensor([0.0, 16.0]),
    )  # of a sum over 4: 3 and 4
    scale_gradients(parameters, 4.0, clip_norm)
    torch.testing.assert_close(parameters[0].grad, torch.tensor([12.0 * scale, 0.0]))
    torch.testing.assert_close(parameters[1].grad, torch.tensor([0.0, 16.0 * scale]))
    assert parameters[2].grad is None


def test_loss_falls_on_repeated_documents() -> None:
    documents = [make_document(i) for i in range(4)]
    trainer = make_trainer(documents, config=CONFIG.model_copy(update={"epochs": 60, "learning_rate": 3e-3}))
    first = float(trainer.step().loss)
    for _ in range(59):
        last = float(trainer.step().loss)
    assert last < 0.5 * first
