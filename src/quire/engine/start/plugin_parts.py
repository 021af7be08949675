"""Plug-ins of an engine: load them before the model, so that a faulty one is reported at once."""

from quire.base.plugins import DRAFTERS, LOGITS_PROCESSORS, load_plugin
from quire.base.settings.config import EngineConfig
from quire.base.settings.speculation import FIELDS_OF, parse_speculation
from quire.scheduler.policy.extensions import extension_classes
from quire.scheduler.policy.policies import make_block_hash, make_eviction, make_policy


def check_plugins(config: EngineConfig) -> None:
    """Load the plug-ins that need no model. Raises ConfigError for a faulty one."""
    make_policy(config.scheduler.scheduling_policy)
    make_eviction(config.cache.eviction_policy)
    make_block_hash(config.cache.prefix_caching_hash_algo)
    for name in config.logits_processors:
        load_plugin(LOGITS_PROCESSORS, name, ())
    extension_classes(config.scheduler.scheduler_extensions)
    speculation = parse_speculation(config.speculative_config)
    if speculation is not None and speculation.is_plugin:
        load_plugin(DRAFTERS, speculation.method, FIELDS_OF)
