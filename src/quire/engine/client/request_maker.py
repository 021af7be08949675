"""Requests that pin a prefix or pool a prompt, in addition to requests for text."""

import secrets

import msgspec

from quire.base.messages import Request
from quire.base.requests.pooling import SECOND_TEXT
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.client.requests import TextRequestMaker
from quire.render.renderer import RenderedPrompt


class RequestMaker(TextRequestMaker):
    """Makes all requests of one engine."""

    def make_pin(
        self,
        prompt: RenderedPrompt,
        ttl_s: float,
        prefix_id: str | None = None,
        cache_salt: str = "",
        tenant: str = "",
        share: float = 1.0,
    ) -> Request:
        """Make a request that pins a prompt for ttl_s seconds, 0.0 for good. prefix_id: random if
        absent. share: the tenant's part of the room for pinned prefixes."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        name = prefix_id or f"prefix-{secrets.token_hex(8)}"
        request = self.make(prompt, params, name, cache_salt, tenant=tenant)
        return msgspec.structs.replace(request, pin_s=ttl_s, pin_share=share)

    def make_pooling(
        self,
        prompt: RenderedPrompt,
        request_id: str | None = None,
        cache_salt: str = "",
        priority: int = 0,
        tenant: str = "",
        timeout_s: float = 0.0,
        *,
        has_text_pairs: bool = False,
    ) -> Request:
        """Make a request for what a prompt comes to, of a model that pools: it ends with its first
        token, which stands for that. has_text_pairs: see PoolingSpec."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        made = self.make(prompt, params, request_id, cache_salt, priority, tenant, timeout_s)
        ids = prompt.token_ids
        if has_text_pairs and prompt.second is not None:
            first, second = ids[: prompt.second], ids[prompt.second :]
            ids = [*first, *(each + SECOND_TEXT for each in second)]
        return msgspec.structs.replace(made, pools=True, prompt_token_ids=ids)
