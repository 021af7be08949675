"""Compare quire's model with the same weights in transformers, in every way to compute it.

transformers' model runs first and is unloaded before quire's is loaded, so that memory holds one
copy at a time. It holds two copies if transformers cannot read the files (a GGUF file, dummy
weights) and gets quire's numbers.

All ways must be equal within the dtype's rounding, except formats that round on purpose. These are
compared with their own dequantized numbers, to separate a wrong product from a coarse format.
"""

import dataclasses
import gc
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from quire.base.errors import ConfigError, ModelError, OutOfMemory, QuireError
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.config import EngineConfig, ModelConfig, flat_settings, public_settings
from quire.base.version import QUIRE_VERSION
from quire.engine.start.text import build_text_side
from quire.models.checkpoint.files import weight_files
from quire.models.checkpoint.formats import AS_THEY_ARE, IN_THE_DTYPE, WeightFormats, weight_formats
from quire.models.checkpoint.source import (
    ModelSource,
    load_format_of,
    resolve_model,
    resolve_source,
)
from quire.models.load.assembly import empty_model
from quire.models.load.loading import LoadOptions, check_files, formats_of_file, load_model
from quire.models.load.packing import planned_bytes
from quire.models.registry import model_spec
from quire.ops.host.native import core
from quire.ops.trace.program import Untraceable
from quire.runner.build import choose_device, torch_dtype
from quire.runner.derive import choose_dtype
from quire.runner.memory_plan import available_cpu_bytes
from quire.serve.python.llm import LLM
from quire.spec.gguf.container import is_gguf
from quire.spec.model_spec import ModelSpec
from quire.tools.report import machine_facts
from quire.tools.verify.compare import (
    BOUNDS,
    LOSSY,
    TokensChosen,
    differences,
    tokens_chosen,
)
from quire.tools.verify.ours import AT_ONCE, WAYS, WITH_OTHER_ROWS, runs_in_one_call, trace, way
from quire.tools.verify.paged import CPU, Paging
from quire.tools.verify.report import Report, Run
from quire.tools.verify.theirs import Reference, Tensors, Theirs, check_transformers
from quire.tools.verify.watch import LOGITS, Trace
from quire.tools.verify.weights import checkpoint_tensors, take_dequantised

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "triton")
SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
DIGITS = 16  # printed digits of the config's digest


def facts_of(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, reference_dtype: str
) -> dict[str, dict[str, Any]]:
    """Return the facts by section and name."""
    sizes = {name: getattr(spec, name) for name in SIZES}
    return {
        "versions": {"quire": QUIRE_VERSION, **{name: _version(name) for name in PACKAGES}},
        "machine": machine_facts(),
        "model": {
            "name": source.name,
            "type": spec.model_type,
            "class of": spec.implementation,
            **sizes,
            "config": spec.identity[:DIGITS],
            "reference": f"transformers in {reference_dtype}, eager attention",
        },
        "settings": _given(config),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _given(config: EngineConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    defaults, given = public_settings(EngineConfig()), public_settings(config)
    return {name: value for name, value in given.items() if value != defaults[name]}


TRANSFORMERS, DEQUANTISED = "transformers", "the dequantised weights"
PLAIN, AS_STORED = "plain", "as in the file"
PROMPT = (
    "Once upon a time a little fox lived at the edge of a wood. Every evening it counted: one, two,"
    " three, 17 + 25 = 42. Then it asked:"
)
RANDOM_TOKENS = 40  # prompt length for a model without a tokenizer
MAX_ADDED_TOKENS = 512  # maximum number of tokens added to exceed a window
ROOM = 1.25  # memory for the comparison, relative to the weights
ENGINE_ROWS = 4
MIB = 1 << 20
OnRun = Callable[[Run, int], None]  # takes a result and the number of all runs
Chosen = tuple[str, bool]  # attention backend, and whether the model runs in one call


@dataclass(frozen=True)
class Comparison:
    """The comparison to make."""

    config: EngineConfig  # selects the model; given settings limit the ways that are compared
    prompt: str | None = None  # None for a built-in text
    num_tokens: int = 16  # tokens that transformers generates
    against: str | None = None  # directory that transformers reads instead of the model
    spec: ModelSpec | None = None  # spec of quire's model; by default from its config
    is_quick: bool = False  # whether to compare only the exact model and the engine as given


@dataclass(frozen=True)
class Model:
    """The model under comparison."""

    comparison: Comparison
    source: ModelSource
    spec: ModelSpec  # of quire's model, for the length of the sequence
    device: torch.device
    exact: torch.dtype  # dtype of the reference, in which only rounding may differ

    @property
    def config(self) -> EngineConfig:
        return self.comparison.config

    def load(
        self, dtype: torch.dtype, formats: WeightFormats, device: torch.device | None = None
    ) -> Any:
        """Load quire's model."""
        load_format = load_format_of(self.config, self.source)
        options = LoadOptions(load_format, self.config.model.seed, formats)
        return load_model(self.source.directory, self.spec, dtype, device or self.device, options)


def verify(comparison: Comparison, on_run: OnRun = lambda run, num_runs: None) -> Report:
    """Compare in all ways, or in two of them if the comparison is quick.

    Raises MissingDependency without transformers, ModelError if either side cannot load the model,
    OutOfMemory if it does not fit, and ConfigError for a wrong setting.
    """
    check_transformers()
    config = comparison.config
    source = resolve_source(config.model, progress=False)
    spec = comparison.spec or model_spec(source.directory, config.model.model_impl)
    if spec.is_encoder:
        raise ConfigError(
            f"models of type {spec.model_type} are encoders, which do not generate tokens to"
            " compare. docs/use/model-table.md describes them."
        )
    prompt = _prompt(comparison, source, spec)
    length = len(prompt) + comparison.num_tokens
    if length > spec.max_position:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, and {comparison.num_tokens} more exceed the"
            " model's"
            f" limit of {spec.max_position}; give a shorter one with --prompt."
        )
    spec = spec.served_up_to(length)
    if not is_gguf(source.directory) and load_format_of(config, source) != "dummy":
        check_files(weight_files(source.directory), spec)  # better errors than transformers'
    given = _is_given(comparison, source, spec)
    model = Model(comparison, source, spec, choose_device(config.device), _exact_dtype(spec, given))
    reference = _reference(model, prompt, given)
    runs, ways = [], Runs(model, reference)
    for run in ways.quick() if comparison.is_quick else ways.all():
        on_run(run, ways.num_quick if comparison.is_quick else ways.num_all)
        runs.append(run)
    chosen = reference.tokens[len(prompt) :]
    facts = facts_of(config, source, spec, _name(model.exact))
    return Report(facts, prompt, chosen, reference.cache_error, tuple(runs))


# ---- transformers' side ----------------------------------------------------------------------


def _is_given(comparison: Comparison, source: ModelSource, spec: ModelSpec) -> bool:
    """Return whether transformers cannot read the files and must get quire's numbers."""
    is_dummy = load_format_of(comparison.config, source) == "dummy"
    is_quantised = spec.raw.get("quantization_config") is not None
    return comparison.against is None and (is_gguf(source.directory) or is_dummy or is_quantised)


def _exact_dtype(spec: ModelSpec, given: bool) -> torch.dtype:
    """Return float64 if memory suffices, else float32. Raises OutOfMemory."""
    free, needed, copies = available_cpu_bytes(), 0, 2 if given else 1
    for dtype in (torch.float64, torch.float32):
        empty = empty_model(spec, dtype, CPU)
        needed = int(planned_bytes(empty, dtype, CPU, IN_THE_DTYPE) * copies * ROOM)
        if needed <= free:
            return dtype
    raise OutOfMemory(
        f"comparing takes {needed / MIB:,.0f} MiB ({copies} x the weights in float32, and a"
        f" quarter), but {free / MIB:,.0f} MiB are free. Use a smaller model of the same kind."
    )


def _reference(model: Model, prompt: list[int], given: bool) -> Reference:
    directory, tensors = model.source.directory, None
    if model.comparison.against is not None:
        directory = resolve_model(model.comparison.against, progress=False).directory
    elif given:
        tensors = _our_tensors(model)
    theirs = Theirs(directory, model.spec, model.exact, tensors)
    del tensors
    reference = theirs.reference(prompt, model.comparison.num_tokens)
    del theirs
    gc.collect()
    if not reference.trace[LOGITS].isfinite().all():
        raise ModelError(
            "transformers' logits are not finite (NaN or infinity), so they cannot be compared."
            " Check the weights for such numbers."
        )
    return reference


def _our_tensors(model: Model) -> Tensors:
    ours = model.load(model.exact, IN_THE_DTYPE, CPU)
    take_dequantised(ours, ours)  # float32 weights are packed
    return checkpoint_tensors(ours)


# ---- quire's side ------------------------------------------------------------------------------


class Runs:
    """Computes the tokens in each way, and compares the results with transformers'."""

    def __init__(self, model: Model, reference: Reference) -> None:
        self._model, self._reference = model, reference
        self._config, self._spec = model.config, model.spec

    num_quick = 2

    def quick(self) -> Iterator[Run]:
        """Yield one exact run, then the engine's."""
        yield from self._plain_runs(self._model.exact, [("reference", False)], (AT_ONCE,))
        yield self._served_run()

    @property
    def num_all(self) -> int:
        """The number of runs of `all`."""
        in_float32 = len(self._backends()) * len(WAYS) + len(self._kv_formats())
        num = len(WAYS) + in_float32 * self._runs_float32 + self._runs_served_dtype
        return num + len(list(self._quantised())) + 1

    @property
    def _is_plain(self) -> bool:
        return self._config.model.quantization in (None, "none")

    @property
    def _runs_float32(self) -> bool:
        return self._model.exact != torch.float32 and self._is_plain

    @property
    def _served_dtype(self) -> torch.dtype:
        given = self._config.model.dtype
        return torch_dtype(choose_dtype(given, self._spec, self._model.device.type))

    @property
    def _runs_served_dtype(self) -> bool:
        return self._served_dtype.itemsize == 2 and self._is_plain

    def all(self) -> Iterator[Run]:
        """Yield the runs, exact ones first."""
        yield from self._plain_runs(self._model.exact, [("reference", False)], WAYS)
        if self._runs_float32:
            yield from self._plain_runs(torch.float32, self._backends(), WAYS, self._kv_formats())
        if self._runs_served_dtype:
            served = self._served_dtype
            model = self._model.load(served, IN_THE_DTYPE)
            paging = self._served(model, served)
            yield self._compared(PLAIN, model, paging, WITH_OTHER_ROWS, BOUNDS[served])
        for name, formats in self._quantised():
            yield self._quantised_run(name, formats)
        yield self._served_run()

    def _backends(self) -> list[Chosen]:
        """Return the backends to compare; the last one is the engine's choice."""
        name = self._config.attention_backend
        found: list[Chosen] = [("torch", False)]
        if self._model.device.type != "cpu":
            found += [("triton", False)]
        elif core() is not None:
            found += [("cpu", False), ("cpu", True)]
        if name == "auto":
            return found
        return [each for each in found if each[0] == name] or [(name, False)]

    def _kv_formats(self) -> list[str]:
        given = self._config.cache.kv_cache_dtype
        return [given] if given != "auto" else ["int8"]

    def _plain_runs(
        self,
        dtype: torch.dtype,
        backends: Sequence[Chosen],
        ways: Sequence[str],
        kv_formats: Sequence[str] = (),
    ) -> Iterator[Run]:
        model = self._model.load(dtype, IN_THE_DTYPE)
        for name, native in backends:
            paging = self._paging(name, dtype, native)
            for division in ways:
                yield self._compared(PLAIN, model, paging, division, BOUNDS[dtype])
        for kv_format in kv_formats:
            paging = dataclasses.replace(self._served(model, dtype), kv_format=kv_format)
            yield self._compared(PLAIN, model, paging, WITH_OTHER_ROWS, LOSSY)

    def _paging(self, backend: str, dtype: torch.dtype, native: bool) -> Paging:
        size = self._config.cache.block_size
        return Paging(size, backend, dtype, self._model.device, native=native)

    def _served(self, model: Any, dtype: torch.dtype) -> Paging:
        """Return the paging with which an engine would run the model."""
        name, native = self._backends()[-1]
        return self._paging(name, dtype, native and runs_in_one_call(model))

    def _compared(
        self, weights: str, model: Any, paging: Paging, division: str, bound: float
    ) -> Run:
        run = Run(
            weights, _name(paging.dtype), _attention(paging), paging.kv_format, division,
            TRANSFORMERS, bound, reroutes=self._reroutes(bound),
        )  # fmt: skip
        reference = self._reference
        try:
            got = self._trace(model, paging, division)
        except (ConfigError, Untraceable) as error:
            return dataclasses.replace(run, refusal=str(error))
        found = differences(got, reference.trace, paging.dtype, bound)
        return dataclasses.replace(run, differences=tuple(found), tokens=self._tokens(got))

    def _trace(self, model: Any, paging: Paging, division: str) -> Trace:
        chunked = way(division, self._reference.tokens, self._spec.vocab_size)
        return trace(model, self._spec, chunked, paging)

    def _tokens(self, got: Trace) -> TokensChosen | None:
        reference = self._reference
        if len(reference.tokens) == reference.num_prompt:
            return None
        return tokens_chosen(got, reference.trace, reference.tokens, reference.num_prompt)

    def _reroutes(self, bound: float) -> bool:
        """Return whether rounding of this size may route tokens to other experts."""
        return self._reference.has_experts and bound > BOUNDS[torch.float32]

    # ---- formats that round ----------------------------------------------------------------------

    def _quantised(self) -> Iterator[tuple[str, WeightFormats]]:
        """Yield the formats to compare: the file's own, and the requested quantization or all."""
        model = self._config.model
        if self._keeps_stored(torch.float32):
            yield AS_STORED, AS_THEY_ARE
        choices = {f.name: f.metadata for f in dataclasses.fields(ModelConfig)}["quantization"]
        names = choices["choices"] if model.quantization is None else (model.quantization,)
        for name in names:
            if name != "none":
                yield name, weight_formats(dataclasses.replace(model, quantization=name))

    def _keeps_stored(self, dtype: torch.dtype) -> bool:
        """Return whether weights stay quantized as in the file."""
        model, formats = self._model, weight_formats(self._config.model)
        if formats != AS_THEY_ARE or load_format_of(self._config, model.source) == "dummy":
            return False
        directory, device = model.source.directory, model.device
        empty = empty_model(self._spec, dtype, device)
        return bool(formats_of_file(directory, self._spec, empty, dtype, device, formats))

    def _quantised_run(self, name: str, formats: WeightFormats) -> Run:
        """Compare quantized weights with a float32 model of the same numbers."""
        reference_name = f"{DEQUANTISED} in float32"
        reroutes = self._reroutes(LOSSY)
        run = Run(
            name, "float32", "", "auto", WITH_OTHER_ROWS, reference_name, LOSSY, reroutes=reroutes
        )
        try:
            formats.check("float32", self._model.device.type)
            packed = self._model.load(torch.float32, formats)
            paging = self._served(packed, torch.float32)
            run = dataclasses.replace(run, attention=_attention(paging))
            got = self._trace(packed, paging, WITH_OTHER_ROWS)
            plain = self._model.load(torch.float32, IN_THE_DTYPE)
            take_dequantised(plain, packed)
        except QuireError as error:
            return dataclasses.replace(run, refusal=str(error))
        exact = self._trace(plain, self._paging("reference", torch.float32, False), AT_ONCE)
        rounding = _relative(exact[LOGITS], self._reference.trace[LOGITS])
        found = differences(got, exact, torch.float32, LOSSY)
        return dataclasses.replace(
            run, differences=tuple(found), tokens=self._tokens(got), weights_rounding=rounding
        )

    # ---- the engine ------------------------------------------------------------------------------

    def _served_run(self) -> Run:
        """Generate the tokens with the whole engine, under the given settings."""
        reference = self._reference
        prompt = reference.tokens[: reference.num_prompt]
        settings = flat_settings(self._config) | {"disable_log_stats": True}
        settings |= {"max_model_len": len(reference.tokens), "max_num_seqs": ENGINE_ROWS}
        run = Run("as given", "", "", "", "by the engine", TRANSFORMERS, LOSSY)
        if self._model.comparison.spec is not None or not self._model.comparison.num_tokens:
            return dataclasses.replace(run, refusal="it has no tokens to choose from")
        params = SamplingParams(
            temperature=0, max_tokens=self._model.comparison.num_tokens, ignore_eos=True
        )
        try:
            with LLM(**settings) as llm:
                config = llm.engine.config
                output = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]
        except QuireError as error:
            return dataclasses.replace(run, refusal=str(error))
        tokens = self._same_until(output.outputs[0].token_ids, config)
        return dataclasses.replace(
            run, dtype=config.model.dtype, attention=config.attention_backend,
            kv=config.cache.kv_cache_dtype, tokens=tokens,
        )  # fmt: skip

    def _same_until(self, chosen: Sequence[int], config: EngineConfig) -> TokensChosen:
        """Compare generated tokens up to the first difference, after which contexts differ.

        The assumed error of the logits there is the bound on rounding."""
        reference = self._reference
        expected = reference.tokens[reference.num_prompt :]
        pairs = list(zip(chosen, expected, strict=False))
        place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
        if place == len(expected):
            return TokensChosen(place, place)
        if place == len(chosen):  # the engine stopped early
            return TokensChosen(len(expected), place, place, math.inf)
        logits_V = reference.trace[LOGITS][reference.num_prompt - 1 + place].double()
        margin = (logits_V[expected[place]] - logits_V[chosen[place]]).item()
        dtype = torch_dtype(config.model.dtype)
        is_exact = config.model.quantization is None and config.cache.kv_cache_dtype == "auto"
        is_exact = is_exact and not self._keeps_stored(dtype)
        error = BOUNDS[dtype] * logits_V.std().item()
        return TokensChosen(len(pairs), place, place, margin, error if is_exact else margin)


def _relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    error = (got.double() - exact.double()).norm() / exact.double().norm()
    return float(error.item())


def _attention(paging: Paging) -> str:
    return f"{paging.backend}, one call" if paging.native else paging.backend


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _prompt(comparison: Comparison, source: ModelSource, spec: ModelSpec) -> list[int]:
    """Return the prompt's token ids.

    Without a tokenizer they are random. Random ones also precede the built-in text if no token
    would otherwise leave a window."""
    tokenizer = build_text_side(comparison.config.model, source).tokenizer
    numbers = random.Random(0)
    if tokenizer is None and comparison.prompt is not None:
        raise ConfigError(f"{source.name} has no tokenizer; remove --prompt, or give one.")
    if comparison.prompt is not None:
        assert tokenizer is not None
        found = tokenizer.encode(comparison.prompt)
        if not found:
            raise ConfigError("the prompt has no tokens; give a longer one with --prompt.")
        return found
    found = []
    if tokenizer is not None:
        found = [each for each in tokenizer.encode(PROMPT) if each < spec.vocab_size]
    windows = [w for w in spec.layer_windows if w is not None and w <= MAX_ADDED_TOKENS]
    length = max([RANDOM_TOKENS, *(2 * w for w in windows)])
    length = max(1, min(length, spec.max_position - comparison.num_tokens))
    more = [numbers.randrange(spec.vocab_size) for _ in range(length - len(found))]
    return [*more, *found][:length]
