"""What an engine shows of itself: metrics, timelines, heartbeats, the live view, the log."""
