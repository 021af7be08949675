"""`LLM` for its users: vLLM's quickstart, prompts, chat, streams, closing and errors."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, QuireError, RequestOutput, SamplingParams
from quire.base.errors import ConfigError, ModelNotFound, RequestError
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.base.settings.config import config_from_flat
from quire.engine.executors.executor import Executor
from tests.support.cases import in_turn, slow_but
from tests.support.models.reference_checkpoints import checkpoint, reference_tokens, text_checkpoint
from tests.support.render.chat_templates import QWEN

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]


def open_llm(**settings: Any) -> LLM:
    defaults = {"max_model_len": 96, "disable_log_stats": True, "block_size": 4}
    return LLM(model=str(text_checkpoint()), **(defaults | settings))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm() as shared:
        yield shared


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.client.core.scheduler
    scheduler.check_invariants()
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert all(pool.num_used == 0 for pool in scheduler.memory.kv.pools), "blocks leak"
    assert llm.engine.client.num_unfinished == 0


# ---- the quickstart --------------------------------------------------------------------------


def test_vllm_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM's first example, with another import and another model."""
    prompts = PROMPTS
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=str(text_checkpoint()))
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
    llm.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", Generated")[0] for line in lines] == [f"Prompt: {p!r}" for p in prompts]
    assert all(not line.endswith("Generated text: ''") for line in lines)


def test_output_fields_are_complete(llm: LLM) -> None:
    llm.reset_prefix_cache()
    (output,) = llm.generate("The quick brown fox", GREEDY)
    (again,) = llm.generate(["The quick brown fox"], GREEDY)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("The quick brown fox")
    assert (output.prompt, output.prompt_token_ids) == ("The quick brown fox", ids)
    assert output.finished and output.prompt_logprobs is None and output.num_cached_tokens == 0
    assert again.num_cached_tokens == (len(ids) - 1) // 4 * 4
    assert output.request_id != again.request_id
    (completion,) = output.outputs
    assert completion.index == 0 and completion.finish_reason == "length"
    assert completion.stop_reason is None and completion.logprobs is None
    assert completion.cumulative_logprob is None and completion.finished()
    assert len(completion.token_ids) == 8
    whole = tokenizer.decode(ids + completion.token_ids, skip_special_tokens=True)
    assert output.prompt + completion.text == whole
    metrics = output.metrics
    assert metrics is not None and metrics.num_preemptions == 0
    times = (metrics.arrival_s, metrics.first_token_s, metrics.finished_s)
    assert sorted(t for t in times if t is not None) == list(times)


def test_all_prompt_forms_give_the_same_text(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Hello world")
    forms: list[Any] = [
        "Hello world",
        {"prompt": "Hello world"},
        {"prompt_token_ids": ids},
        {"prompt": "Hello world", "prompt_token_ids": ids},
        ids,
    ]
    single = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(outputs) == 1 for outputs in single)
    together = llm.generate(forms, [GREEDY] * 5)
    texts = {text(output) for outputs in [*single, together] for output in outputs}
    assert len(texts) == 1
    given = [output.prompt for output in together]
    assert given == ["Hello world", "Hello world", None, "Hello world", None]
    assert all(output.prompt_token_ids == ids for output in together)
    assert text(llm.generate(tuple(forms[:1]), GREEDY)[0]) in texts


def test_outputs_keep_the_order_of_the_prompts(llm: LLM) -> None:
    """Later prompts may finish first. All prompts share one set of parameters, or each has one."""
    lengths = [9, 1, 5, 3]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in lengths]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt for output in outputs] == PROMPTS
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [len(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)] == [8] * 4
    for wrong in (params[:3], []):
        with pytest.raises(RequestError, match=f"sampling_params has {len(wrong)} entries for 4"):
            llm.generate(PROMPTS, wrong)
    with pytest.raises(RequestError, match="priority has 1 entries for 4 prompts"):
        llm.generate(PROMPTS, GREEDY, priority=[1])
    assert [p.max_tokens for p in params] == lengths  # the caller's objects are unchanged
    assert_idle(llm)


# ---- chat ------------------------------------------------------------------------------------


def test_chat_renders_the_template_and_matches_generate() -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    other = [{"role": "user", "content": "How are you?"}]
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with open_llm(chat_template=QWEN) as llm:
        (one,) = llm.chat(conversation, GREEDY)
        assert one.prompt == rendered
        assert text(one) == text(llm.generate(rendered, GREEDY)[0])
        first, second = llm.chat([conversation, other], [GREEDY, GREEDY])
        assert (first.prompt, text(first)) == (rendered, text(one))
        assert second.prompt is not None and "How are you?" in second.prompt
        (open_end,) = llm.chat(other, GREEDY, add_generation_prompt=False)
        assert open_end.prompt is not None and open_end.prompt.endswith("<|im_end|>\n")
        streamed = list(llm.stream(conversation, GREEDY))
        assert streamed[0].prompt == rendered
        assert "".join(text(output) for output in streamed) == text(one)
        with pytest.raises(RequestError, match="messages is empty"):
            llm.chat([])
    with open_llm() as llm, pytest.raises(RequestError, match="no chat template"):
        llm.chat(conversation)


# ---- streams ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", slow_but((1, 2), 2))
def test_stream_matches_generate(depth: int) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=24, stop="zzz", logprobs=1)
    with open_llm(pipeline_depth=depth) as llm:
        (whole,) = llm.generate("Grüße aus Köln", params)
        parts = list(llm.stream("Grüße aus Köln", params))
        assert "".join(text(part) for part in parts) == text(whole)
        joined = [token for part in parts for token in part.outputs[0].token_ids]
        assert joined == whole.outputs[0].token_ids
        logprobs = [entry for part in parts for entry in part.outputs[0].logprobs or []]
        assert logprobs == whole.outputs[0].logprobs
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert len(parts) > 10
        assert_idle(llm)


@pytest.mark.parametrize("depth", slow_but((1, 2), 1))
def test_closing_a_stream_early_aborts_the_request(depth: int) -> None:
    with open_llm(pipeline_depth=depth) as llm:
        stream = llm.stream("Hello", SamplingParams(max_tokens=60))
        next(stream)
        next(stream)
        assert llm.engine.client.core.scheduler.num_running == 1
        stream.close()
        assert_idle(llm)
        for _ in llm.stream("Hello", SamplingParams(max_tokens=60)):
            break
        assert_idle(llm)
        assert len(llm.generate(PROMPTS, GREEDY)) == 4


def test_interleaved_streams_get_their_own_outputs(llm: LLM) -> None:
    """A blocking call between their steps gets its own output, too."""
    params = SamplingParams(temperature=0, max_tokens=12)
    wanted = [text(output) for output in llm.generate(PROMPTS[:2], params)]
    a, b = (llm.stream(prompt, params) for prompt in PROMPTS[:2])
    texts = [text(next(a)), text(next(b))]
    (between,) = llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=30))
    assert len(between.outputs[0].token_ids) == 30
    texts[1] += "".join(text(part) for part in b)
    texts[0] += "".join(text(part) for part in a)
    assert texts == wanted
    assert_idle(llm)


# ---- closing and interrupts ------------------------------------------------------------------


def test_close_is_idempotent_and_later_calls_fail() -> None:
    llm = open_llm()
    with llm as entered:
        assert entered is llm
        stream = llm.stream("Hello", GREEDY)
        next(stream)
    llm.close()
    for use in (
        lambda: llm.generate("Hello", GREEDY),
        lambda: llm.chat([{"role": "user", "content": "Hello"}]),
        lambda: next(llm.stream("Hello")),
        lambda: next(stream),
        llm.get_tokenizer,
        llm.get_default_sampling_params,
        llm.reset_prefix_cache,
    ):
        with pytest.raises(ConfigError, match="closed; create a new one"):
            use()


class InterruptedRunner:
    """A runner that raises one KeyboardInterrupt during a step."""

    def __init__(self, runner: Any, countdown: int) -> None:
        self.runner = runner
        self.countdown = countdown

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        self.countdown -= 1
        if self.countdown == 0:
            raise KeyboardInterrupt
        result: StepResult = self.runner.run(plan, masks)
        return result


class InterruptedExecutor:
    """Raises one KeyboardInterrupt while waiting; the next call gets the result."""

    def __init__(self, executor: Executor, countdown: int) -> None:
        self.executor = executor
        self.countdown = countdown

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        self.executor.submit(plan, masks)

    def is_ready(self) -> bool:
        return self.executor.is_ready()

    def next_result(self) -> StepResult:
        self.countdown -= 1
        if self.countdown == 0:
            raise KeyboardInterrupt
        return self.executor.next_result()

    def close(self) -> None:
        self.executor.close()


# From depth 2 on, steps run on a thread, which no interrupt reaches.
@pytest.mark.parametrize(
    ("case", "countdown"),
    in_turn(((1, "while it computes"), (1, "while it waits"), (2, "while it waits")), (1, 3)),
)
def test_interrupt_aborts_all_requests(case: tuple[int, str], countdown: int) -> None:
    depth, where = case
    with open_llm(pipeline_depth=depth, max_num_seqs=3, weight_cache="off") as llm:
        wanted = [text(output) for output in llm.generate(PROMPTS, GREEDY)]
        core = llm.engine.client.core
        if where == "while it computes":
            executor: Any = core.executor
            runner = InterruptedRunner(executor._built.runner, countdown)
            executor._built = dataclasses.replace(executor._built, runner=runner)
        else:
            core.executor = InterruptedExecutor(core.executor, countdown)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[::-1], GREEDY)
        assert_idle(llm)
        assert [text(output) for output in llm.generate(PROMPTS, GREEDY)] == wanted
        assert_idle(llm)


# ---- settings and errors ---------------------------------------------------------------------


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"no setting 'max_modle_len'; did you mean max_model_len"
    ):
        open_llm(max_modle_len=5)
    with pytest.raises(ModelNotFound, match="there is no directory"):
        LLM(model="/nowhere/at/all")
    with pytest.raises(ConfigError, match=r"max_model_len=1000 is more than .* \(128\)"):
        open_llm(max_model_len=1000)
    with pytest.raises(ConfigError, match="uni is for one rank, but tensor_parallel_size.* is 2"):
        open_llm(tensor_parallel_size=2, distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="one of auto, int8, fp8, got 'fp8_e5m2'"):
        open_llm(kv_cache_dtype="fp8_e5m2")
    assert config_from_flat(kv_cache_dtype="fp8_e4m3") == config_from_flat(kv_cache_dtype="fp8")
    assert issubclass(ConfigError, QuireError) and issubclass(ConfigError, ValueError)


def test_auto_max_model_len_is_the_longest_that_fits() -> None:
    """A prompt that leaves room for one token is answered."""
    with open_llm() as llm:
        token_bytes = llm.engine.memory.pool_bytes // llm.engine.memory.num_slots
    small: dict[str, Any] = {"kv_cache_memory_bytes": 11 * 4 * token_bytes, "max_num_seqs": 1}
    with open_llm(max_model_len="auto", **small) as llm:
        assert llm.engine.config.model.max_model_len == 40
        (output,) = llm.generate({"prompt_token_ids": [5] * 39}, GREEDY)
        assert len(output.outputs[0].token_ids) == 1


def test_neutral_vllm_settings_are_accepted() -> None:
    neutral: dict[str, Any] = {
        "trust_remote_code": False,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enforce_eager": True,
        "enable_chunked_prefill": True,
        "swap_space": 4,
        "cpu_offload_gb": 0,
        "tokenizer_mode": "auto",
        "quantization": None,
        "gpu_memory_utilization": 0.5,
        "seed": 7,
        "tokenizer": str(text_checkpoint()),
        "dtype": "float32",
    }
    with open_llm(**neutral) as llm:
        assert llm.engine.config.model.seed == 7
        assert len(llm.generate("Hello", GREEDY)) == 1


def test_one_invalid_prompt_rejects_the_batch(llm: LLM) -> None:
    limit = llm.engine.config.model.max_model_len or 0
    vocab = llm.engine.spec.vocab_size
    cases: list[tuple[Any, str]] = [
        ("", "prompt is empty"),
        ({"prompt_token_ids": []}, "non-empty list"),
        ({"prompt_token_ids": [1, "a"]}, "integers"),
        ({"prompt_token_ids": [-1]}, "from 0 on, got -1"),
        ({"prompt_token_ids": [vocab]}, f"token id {vocab} is not in the vocabulary of {vocab}"),
        ({"prompt_token_ids": [1] * limit}, f"the prompt has {limit} tokens; .* Shorten it"),
        ({"text": "Hello"}, '"prompt"'),
        (5.5, "must be a text"),
        (None, "must be a text"),
    ]
    for prompt, message in cases:
        with pytest.raises(RequestError, match=message):
            llm.generate(["Hello", prompt], GREEDY)
        assert_idle(llm)
    assert llm.generate([], GREEDY) == []
    assert len(llm.generate({"prompt_token_ids": [1] * (limit - 1)}, GREEDY)) == 1


def test_model_without_tokenizer_takes_only_token_ids() -> None:
    folder: Path = checkpoint("llama")
    with LLM(str(folder), dtype="float64", disable_log_stats=True) as llm:
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY)
        assert output.outputs[0].token_ids == reference_tokens(folder, [1, 2, 3], 8)
        assert (output.prompt, text(output)) == (None, "")
        with pytest.raises(RequestError, match="no tokenizer, so prompts must be token ids"):
            llm.generate("Hello", GREEDY)
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.get_tokenizer()
        for name in ("stop", "bad_words"):
            params = SamplingParams(**{name: ["dog"]})  # type: ignore[arg-type]
            with pytest.raises(RequestError, match=rf"{name}=\['dog'\] needs a tokenizer"):
                llm.generate([1, 2, 3], params)


# ---- the prefix cache ------------------------------------------------------------------------


def test_cache_salt_isolates_prefix_hits(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = "Paged attention keeps keys and values in blocks; a block table maps them."

    def cached(**more: str) -> int:
        (output,) = llm.generate([{"prompt": prompt} | more], GREEDY)
        return output.num_cached_tokens or 0

    hit = (len(llm.get_tokenizer().encode(prompt)) - 1) // 4 * 4
    assert hit > 8
    assert [cached(), cached()] == [0, hit]
    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a")] == [0, 0, hit]
    pair = llm.generate([{"prompt": prompt, "cache_salt": salt} for salt in ("c", "c")], GREEDY)
    assert [output.num_cached_tokens for output in pair] == [0, hit]
    with pytest.raises(RequestError, match="cache_salt"):
        cached(cache_salt="x" * 2000)


def test_truncate_prompt_tokens_keeps_the_requested_tokens(llm: LLM) -> None:
    """The last tokens, the first ones, or (-1) as many as max_tokens leaves room for."""
    whole = list(range(5, 45))
    for keep, side, expected in (
        (3, "left", whole[-3:]),
        (3, "right", whole[:3]),
        (100, "left", whole),
        (None, "left", whole),
    ):
        params = SamplingParams(
            temperature=0, max_tokens=2, truncate_prompt_tokens=keep, truncation_side=side
        )
        [cut] = llm.generate({"prompt_token_ids": whole}, params, use_tqdm=False)
        [plain] = llm.generate(
            {"prompt_token_ids": expected}, SamplingParams(temperature=0, max_tokens=2), False
        )
        assert cut.prompt_token_ids == expected
        assert cut.outputs[0].token_ids == plain.outputs[0].token_ids
    long = {"prompt_token_ids": whole * 5}
    fitting = SamplingParams(temperature=0, max_tokens=20, truncate_prompt_tokens=-1)
    [cut] = llm.generate(long, fitting, use_tqdm=False)
    assert cut.prompt_token_ids == (whole * 5)[-(96 - 20) :]
    streamed = list(llm.stream(long, fitting))
    assert streamed[0].prompt_token_ids == cut.prompt_token_ids
    with pytest.raises(RequestError, match="prompt has 200 tokens"):
        llm.generate(long, SamplingParams(max_tokens=20), use_tqdm=False)


def test_reset_prefix_cache_spares_running_requests(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(30))}
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 28
    llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0
    stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=20))
    streamed = text(next(stream))
    llm.reset_prefix_cache()  # the running request keeps its blocks
    streamed += "".join(text(part) for part in stream)
    assert streamed == text(llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20))[0])
