"""The loop of one model: plan, submit, take, recover; and the interface of what attaches to it."""
