"""The check of token ids against the vocabulary."""

import pytest

from quire.base.errors import RequestError
from quire.base.requests.validation import check_vocabulary


@pytest.mark.parametrize("wrong", [-1, 100, -(2**40), 2**32, 2**70])
def test_error_names_the_invalid_token_id_among_many(wrong: int) -> None:
    token_ids = list(range(100)) * 10
    check_vocabulary(token_ids, 100)
    for where in (0, 500, 1000):
        with pytest.raises(RequestError, match=f"token id {wrong} is not in the vocabulary of 100"):
            check_vocabulary([*token_ids[:where], wrong, *token_ids[where:]], 100)


def test_error_names_the_lowest_invalid_token_id() -> None:
    with pytest.raises(RequestError, match="token id -7 is"):
        check_vocabulary([5, 10**9, -3, -7], 100)
