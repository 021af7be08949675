"""Loading: checkpoints fill the parameters of a model."""
