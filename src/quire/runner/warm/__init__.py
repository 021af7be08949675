"""Steps without torch: a start saves its model, and later starts map it."""
