"""What rows sample with, and how a step chooses tokens."""
