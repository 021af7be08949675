"""What carries out plans: in this thread, on a thread of its own, or launched ahead."""
