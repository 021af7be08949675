"""One module per figure, or per set of figures from the same runs: `figures(effort, runs)`."""
