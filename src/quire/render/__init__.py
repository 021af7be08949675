"""Text in, tokens out, and back: tokenizers, chat templates, detokenisation, tool calls."""
