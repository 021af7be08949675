"""Which layers a stage of a model has (pipeline parallelism)."""

from quire.base.errors import ConfigError


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a stage. Parts are even, and larger by one at the front, since the last
    stage has the head besides. Raises ConfigError for more stages than layers."""
    if num_stages > num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is more than the model's {num_layers} layers;"
            " take fewer stages."
        )
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))
