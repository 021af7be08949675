"""The runner: rows on the device, step inputs, the forward pass, sampling, KV tensors."""
