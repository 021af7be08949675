"""The weights that an ended choice reports (`serve/pipeline/answer.py`)."""

from quire.base.requests.outputs import CompletionOutput, WeightsSpan
from quire.serve.pipeline.answer import weights_fields


def test_only_an_ended_choice_after_an_update_reports_weights() -> None:
    spans = (WeightsSpan(0, "one"), WeightsSpan(3, "two"))
    ended = CompletionOutput(0, "a", [1], finish_reason="stop", weights_versions=spans)
    assert weights_fields(ended) == {
        "weights_versions": [
            {"first_token": 0, "version": "one"},
            {"first_token": 3, "version": "two"},
        ]
    }
    assert weights_fields(CompletionOutput(0, "a", [1], weights_versions=spans)) == {}
    assert weights_fields(CompletionOutput(0, "a", [1], finish_reason="stop")) == {}
