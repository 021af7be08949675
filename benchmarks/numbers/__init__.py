"""The page of numbers, made from result files."""
