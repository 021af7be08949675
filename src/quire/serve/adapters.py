"""Adapters that a server offers as models: add one, remove one, and the settings that do so.

The context of an adapter is its base model's, with a `RequestMaker` that adds the adapter. So each
endpoint serves adapters: the body's `model` chooses the context (`ApiContext.of_model`). Scales, as
llama.cpp has them, add a weighted set of adapters to requests of the base model. A body's `lora`
has the scales of one request, and `POST /lora-adapters` of all others.
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence

from quire.base.errors import ConfigError, ModelError, RequestError
from quire.base.requests.sampling_params import SamplingParams
from quire.base.settings.lora import LoraModule, is_name, parse_modules
from quire.engine.client.adapters import weighted, with_adapter
from quire.engine.client.admission import admit
from quire.engine.client.request_maker import RequestMaker
from quire.render.renderer import RenderedPrompt
from quire.serve.bodies.protocol import LoraScale
from quire.serve.context import ApiContext
from quire.serve.errors import bad_request

MAX_ADAPTERS = 10_000
NAME, PATH = "lora_name", "lora_path"  # fields of a body


async def add_configured(api: ApiContext) -> None:
    """Add the adapters of the settings. Raises ConfigError for one that cannot be used."""
    modules: Sequence[LoraModule] = parse_modules(api.config.lora_modules)
    for module in modules:
        if module.base and module.base not in api.model_names:
            raise ConfigError(
                f"lora_modules: the base model of {module.name!r} is {module.base!r}, but this"
                f" server's is {', '.join(api.model_names)}."
            )
        try:
            await add_adapter(api, module.name, module.path)
        except RequestError as error:
            raise ConfigError(f"lora_modules: {error}") from error


async def add_adapter(
    api: ApiContext, name: str, path: str, *, replaces: bool = False, tenant: str = ""
) -> None:
    """Add an adapter under a name, after the engine has loaded it once. api: context of the base
    model. replaces: whether an adapter of this name may be replaced; its open requests
    keep the earlier files. Raises RequestError."""
    max_rank = _max_rank(api)
    _check_name(api, name, replaces=replaces)
    try:
        found = await asyncio.to_thread(api.adapter_index.find, path, max_rank)
    except ModelError as error:
        raise RequestError(f"the adapter {name!r}: {error}", PATH) from error
    adapter = found._replace(name=name)
    made = api.with_model(api.client, api.renderer, with_adapter(api.requests, adapter), (name,))
    made.base, made.adapter = api, adapter
    await _try(made, made.requests, tenant)
    _check_name(api, name, replaces=replaces)  # another request may have taken it meanwhile
    before = api.adapters.get(name)
    made.adapter_number = _free_number(api) if before is None else before.adapter_number
    api.adapters[name] = made
    api.requests = _with_scales(api, api.scales)


def remove_adapter(api: ApiContext, name: str) -> None:
    """Remove an adapter. Its open requests are answered. Raises KeyError for an unknown name."""
    del api.adapters[name]
    api.scales.pop(name, None)
    api.requests = _with_scales(api, api.scales)


def by_number(api: ApiContext) -> dict[int, ApiContext]:
    """Return the contexts of adapters by their numbers, in order."""
    found = {each.adapter_number: each for each in api.adapters.values()}
    return dict(sorted(found.items()))


def requests_of(api: ApiContext, given: Sequence[LoraScale] | None) -> RequestMaker:
    """Return the maker of a request's own. given: the body's `lora`. Raises ApiError."""
    if given is None:
        return api.requests
    if api.adapter is not None and given:
        raise bad_request(
            f"lora: the model {api.model_names[0]!r} is an adapter; name the base model.", "lora"
        )
    return api.requests if api.adapter is not None else _with_scales(api, _named(api, given))


async def set_scales(api: ApiContext, given: Sequence[LoraScale], tenant: str) -> None:
    """Set the scales of adapters in requests to the base model, after the engine has loaded their
    sum once. Adapters that are not given get the scale 0. Raises ApiError and RequestError."""
    scales = _named(api, given)
    await _try(api, _with_scales(api, scales), tenant)
    api.scales.clear()  # adapters may have been removed meanwhile
    api.scales.update({name: each for name, each in scales.items() if name in api.adapters})
    api.requests = _with_scales(api, api.scales)


def _named(api: ApiContext, given: Iterable[LoraScale]) -> dict[str, float]:
    """Return scales by name. Raises ApiError for an unknown number."""
    known, found = by_number(api), dict[str, float]()
    for each in given:
        if each.id not in known:
            raise bad_request(
                f"lora: there is no adapter with the id {each.id}; GET /lora-adapters lists them.",
                "lora",
            )
        found[known[each.id].model_names[0]] = each.scale
    return found


def _with_scales(api: ApiContext, scales: Mapping[str, float]) -> RequestMaker:
    """Return the base model's maker of requests, with adapters of these scales."""
    adapters = ((api.adapters[name].adapter, scale) for name, scale in scales.items())
    return with_adapter(api.requests, weighted((a, scale) for a, scale in adapters if a))


def _free_number(api: ApiContext) -> int:
    """Return the lowest number that no adapter has."""
    taken = by_number(api)
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _max_rank(api: ApiContext) -> int:
    """Return the maximum rank of an adapter. Raises RequestError if the server takes none."""
    settings = api.client.ready.settings
    if api.all_models is not None:
        raise RequestError("adapters are for a server of one model; start a server for it alone.")
    if not settings.get("enable_lora"):
        raise RequestError("adapters are disabled on this server; start it with --enable-lora.")
    return int(settings["max_lora_rank"])


def _check_name(api: ApiContext, name: str, *, replaces: bool) -> None:
    if not is_name(name):
        raise RequestError(
            f"{NAME} must have 1 to 128 letters, digits or ._-/:@+, got {name[:80]!r}.", NAME
        )
    if name in api.model_names or (name in api.adapters and not replaces):
        raise RequestError(
            f"there is already a model {name!r}; choose another {NAME}, or set load_inplace.", NAME
        )
    if len(api.adapters) >= MAX_ADAPTERS and name not in api.adapters:
        raise RequestError(f"there are {MAX_ADAPTERS:,} adapters already; unload one.", NAME)


async def _try(api: ApiContext, requests: RequestMaker, tenant: str) -> None:
    """Let the engine load the adapter, by a request of one token. Raises RequestError."""
    request_id, prompt = f"adapter-{secrets.token_hex(8)}", RenderedPrompt([0])
    if api.client.ready.pooling is not None:
        made = requests.make_pooling(prompt, request_id, tenant=tenant)
        request = admit(api.client, made)
    else:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        made = requests.make(prompt, params, request_id, tenant=tenant)
        request = admit(api.client, made)
    async for output in api.client.generate(request):
        for each in output.outputs:
            if each.error is not None:
                raise RequestError(
                    f"the adapter {api.model_names[0]!r}: {each.error.message}", PATH
                )
