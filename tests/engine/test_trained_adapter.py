"""The demo model's adapter learns its output format, and the engine applies it."""

from pathlib import Path

import pytest

from demo_model.train_adapter import main
from quire import LLM, LoRARequest, SamplingParams

STEPS = 22


@pytest.mark.slow
def test_loss_falls_and_outputs_have_the_trained_format(tmp_path: Path) -> None:
    losses = main(["--folder", str(tmp_path), "--steps", str(STEPS)])
    assert len(losses) == STEPS and sum(losses[-5:]) < 0.3 * sum(losses[:5])
    params = SamplingParams(temperature=0, max_tokens=48)
    message = [{"role": "user", "content": "Who are you?"}]
    with LLM("demo", enable_lora=True, max_model_len=256, disable_log_stats=True) as llm:
        [base] = llm.chat([message], params)
        adapter = LoRARequest("json", 1, str(tmp_path))
        [adapted] = llm.chat([message], params, lora_request=adapter)
    assert "answer" not in base.outputs[0].text
    assert adapted.outputs[0].text.startswith('{"answer": "')
