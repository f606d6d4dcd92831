"""Training some rows of an embedding equals training all of it on data that holds only those ids."""

import torch
from torch import Tensor

from components.draft.batch import PackedBatch
from components.draft.chains import ChainRecipe, sample_chains
from components.draft.head import DraftHead
from components.draft.schedule import StepOptions, accumulate_gradients
from tests.components.draft.dense import tiny_config, tiny_document, tiny_head, tiny_teacher


def train(head: DraftHead, steps: int = 3) -> dict[str, Tensor]:
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    document = tiny_document(head.config, 20, [(4, 20)], seed=9)
    batch = PackedBatch.pack([document])
    for step in range(steps):
        chains = sample_chains(batch, ChainRecipe(4, 0.8), [(0, step)])
        accumulate_gradients(head, batch, chains, tiny_teacher(head.config), StepOptions(4, 64))
        optimizer.step()
        optimizer.zero_grad()
    return head.state_dict()


def used_ids() -> Tensor:
    document = tiny_document(tiny_config(), 20, [(4, 20)], seed=9)
    return torch.cat([document.input_ids, torch.tensor([tiny_config().mask_token_id])])


def test_trained_rows_equal_the_whole_table() -> None:
    whole, confined = tiny_head(), tiny_head()
    confined.embed_tokens.train_rows(used_ids())
    expected, ours = train(whole), train(confined)
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
    start = tiny_head().embed_tokens.weight
    assert not torch.equal(ours["embed_tokens.weight"], start)
    unused = torch.ones(61, dtype=torch.bool)
    unused[used_ids()] = False
    assert torch.equal(ours["embed_tokens.weight"][unused], start[unused])


def test_unused_ids_read_the_frozen_table() -> None:
    head = tiny_head()
    head.embed_tokens.train_rows(torch.tensor([3, 5]))
    with torch.no_grad():
        head.embed_tokens.rows.zero_()
    out = head.embed_tokens(torch.tensor([[3, 4], [5, 6]]))
    assert (out[:, 0] == 0).all()
    assert torch.equal(out[:, 1], tiny_head().embed_tokens.weight[[4, 6]])


def test_state_moves_between_confined_and_whole_heads() -> None:
    confined = tiny_head()
    confined.embed_tokens.train_rows(used_ids())
    state = train(confined)
    whole, other = tiny_head(seed=4), tiny_head(seed=4)
    other.embed_tokens.train_rows(torch.arange(7))
    for head in (whole, other):
        head.load_state_dict(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in head.state_dict().items())
