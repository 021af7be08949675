"""Convert prompts to tokens and answers to text: templates, tokenizers, grammars, tool calls."""
