"""Encoders: models with bidirectional attention, which pool."""
