"""One module a figure, or for those that come of the same runs: `figures(effort, runs)`."""
