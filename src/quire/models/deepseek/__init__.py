"""Architectures with DeepSeek's latent attention or DeepSeek's mixtures of experts."""
