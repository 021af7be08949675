"""The documents: their code blocks, and the figures of the model card."""
