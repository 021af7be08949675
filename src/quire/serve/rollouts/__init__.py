"""Routes of trainers that sample rollouts: tokens in and out, and TRL's server."""
