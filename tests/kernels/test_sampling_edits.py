"""Compare edits of logits on the device with the torch path for each row."""

import pytest
import torch

from quire.ops.kernels.sampling.sampling_edits import edit_logits
from quire.ops.sampling.logit_edits import RowEdits, apply_edits, make_edit_table
from tests.support.kernels.sampling_oracle import random_logits

VOCAB = 300
TOKENS = [[7, 8, 9, 4, 5, 6, 5, 6], [1, 2, 3, 3, 3, 3, 3, 3], [9, 9, 9, 9, 9, 9, 9, 9]]
ROWS = [
    None,
    RowEdits(allowed=[5, 299, 0]),
    RowEdits(bad_words=[[3], [5, 6, 17], [6, 5, 18], [4, 5, 6, 5, 6, 19], [6, 20]]),
    RowEdits(bad_words=[[9, 4, 5, 6, 5, 6, 11], [5, 6, 12], [7, 12], [8, 9, 4, 5, 6, 5, 6, 13]]),
    RowEdits(min_tokens=6, stop_token_ids=[2, 40]),
    RowEdits(min_tokens=5, stop_token_ids=[2, 40]),
    RowEdits(bias={7: 1.5, 250: -100.0, 3: 0.25}),
    RowEdits(
        allowed=range(0, 300, 1), bad_words=[[10], [6, 10]], min_tokens=100,
        stop_token_ids=[11], bias={10: 5.0, 11: 5.0, 12: 5.0},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("length", "prompt_len"), [(8, 3), (3, 3), (7, 5), (8, 0)])
def test_edits_equal_the_torch_path(
    length: int, prompt_len: int, dtype: torch.dtype, device: torch.device
) -> None:
    tokens = torch.tensor(TOKENS, dtype=torch.int32)
    wide = random_logits(len(ROWS), VOCAB + 30, 2.0).to(dtype)
    raw = wide[:, 11 : VOCAB + 11]
    listed = [row for row in ROWS if row is not None]
    # The table's order is not the step's, and one of its rows is not in the step.
    table = make_edit_table([RowEdits(bias={1: 1.0}), *listed[::-1]], device)
    slots = torch.tensor([-1, *range(len(listed), 0, -1)], dtype=torch.int32, device=device)
    buffers = torch.arange(len(ROWS)) % 3
    buffers[3] = 0
    lengths = torch.full((len(ROWS),), length)
    prompt_lens = torch.full((len(ROWS),), prompt_len)
    found = edit_logits(
        raw.to(device) if device.type == "cuda" else raw, table, slots, tokens.to(device),
        buffers.to(device), lengths.to(device), prompt_lens.to(device),
    )  # fmt: skip
    for n, edits in enumerate(ROWS):
        expected = raw[n].float().clone()
        if edits is not None:
            row_tokens = tokens[int(buffers[n])]
            own, num_tokens = make_edit_table([edits], torch.device("cpu")), torch.tensor(length)
            apply_edits(expected, own, own.spans[0].numpy(), row_tokens, num_tokens, prompt_len)
        assert torch.equal(found[n].cpu(), expected), f"row {n}"


def test_bad_words_match_only_output_tokens(device: torch.device) -> None:
    """A match that begins in the prompt does not count; one that begins in the output does."""
    table = make_edit_table([RowEdits(bad_words=[[9, 4, 11], [4, 12], [13]])], device)
    tokens = torch.tensor([[7, 9, 4]], device=device)
    zero, three = torch.tensor([0], device=device), torch.tensor([3], device=device)
    logits = edit_logits(
        torch.zeros(1, 20, device=device), table, zero.int(), tokens, zero, three, three - 1
    )
    assert logits[0].isinf().nonzero()[:, 0].tolist() == [12, 13]


def test_no_rows_give_no_logits(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    table = make_edit_table([], device)
    logits = torch.empty(0, 9, device=device)
    tokens = torch.empty(0, 4, dtype=torch.int64, device=device)
    assert edit_logits(logits, table, none.int(), tokens, none, none, none).shape == (0, 9)
