"""OpenAI's Responses API: its bodies, items and events, around what chat completions make."""
