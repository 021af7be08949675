"""The engines that the paper compares with, behind the simulator's `SimulatedCore`."""
