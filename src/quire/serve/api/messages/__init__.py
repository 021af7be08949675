"""Anthropic's Messages API over the same conversations, tools and reasoning as chat completions."""
