"""Media in prompts: which items a step encodes, and the slots that hold encoder outputs."""
