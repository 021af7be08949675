"""Our own attachments: features that follow the engine's loop."""
