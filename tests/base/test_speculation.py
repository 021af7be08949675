"""Reading `speculative_config`."""

from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.config import config_from_flat
from quire.base.settings.speculation import (
    MTP_ALIASES,
    Speculation,
    Suffixes,
    parse_speculation,
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{}", Speculation("ngram", 4, 5, 5)),
        ('{"method": "ngram", "num_speculative_tokens": 7}', Speculation("ngram", 7, 5, 5)),
        ({"prompt_lookup_max": 3}, Speculation("ngram", 4, 3, 3)),
        ({"prompt_lookup_min": 2}, Speculation("ngram", 4, 2, 2)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 6}, Speculation("ngram", 4, 6, 2)),
        ({"method": "forced"}, Speculation("forced", 32)),
        ({"method": "forced", "num_speculative_tokens": 8}, Speculation("forced", 8)),
        ({"method": "none"}, Speculation("none", 32)),
        (
            {"method": "draft_model", "model": "x", "num_speculative_tokens": 3},
            Speculation("draft_model", 3, model="x"),
        ),
        ({"method": "eagle3", "model": "y"}, Speculation("eagle3", 4, model="y")),
        ({"method": "mtp"}, Speculation("mtp", 1)),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 3}, Speculation("mtp", 3)),
        *(({"method": name}, Speculation("mtp", 1)) for name in MTP_ALIASES),
        ({"method": "suffix"}, Speculation("suffix", 24, suffixes=Suffixes(24, 10_000, 1.0, 0.1))),
        (
            {
                "method": "suffix",
                "suffix_decoding_max_tree_depth": 64,
                "suffix_decoding_max_cached_requests": 0,
                "suffix_decoding_max_spec_factor": 2,
                "suffix_decoding_min_token_prob": 0.5,
            },
            Speculation("suffix", 32, suffixes=Suffixes(64, 0, 2.0, 0.5)),
        ),
    ],
)
def test_omitted_fields_get_their_defaults(given: Any, expected: Speculation) -> None:
    assert parse_speculation(given) == expected


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("{", "must be JSON such as"),
        ("[1]", "must be like"),
        ({"method": "medusa"}, "one of ngram, suffix.*, got 'medusa'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be a number from 1, got 0"),
        ({"num_speculative_tokens": True}, "must be a number from 1, got True"),
        ({"num_speculative_tokens": 33}, "at most 32, got 33"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "not be above prompt_lookup_max"),
        ({"method": "draft_model"}, "draft_model needs a draft model: a directory"),
        ({"method": "mtp", "model": "x"}, "no 'model' for the method mtp"),
        ({"method": "mimo_mtp"}, "one of .*eagle3, mtp, got 'mimo_mtp'"),
        ({"method": "eagle3", "model": 3}, "eagle3 needs a draft model.* got 3"),
        ({"method": "draft_model", "model": "x", "prompt_lookup_max": 2}, "no 'prompt_lookup_max'"),
        ({"model": "x"}, "has no 'model' for the method ngram; it has: method"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "no 'prompt_lookup_max' for .* suffix"),
        ({"method": "forced", "prompt_lookup_max": 3}, "no 'prompt_lookup_max' for .* forced"),
        ({"suffix_decoding_max_tree_depth": 3}, "no 'suffix_decoding_max_tree_depth'"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, "from 0, got -1"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 10**9}, "at most 100000"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "at most 1, got 1.5"),
        ('{"method": "suffix", "suffix_decoding_max_spec_factor": NaN}', "negative, got nan"),
    ],
)
def test_errors_name_the_invalid_field(given: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        config_from_flat(speculative_config=given)


def test_speculation_is_off_by_default() -> None:
    assert parse_speculation(config_from_flat().speculative_config) is None
