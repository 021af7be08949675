"""Plans of a model on a device: memory, other formats, and advice if it does not fit."""
