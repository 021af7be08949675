"""The loop of one model: plan, submit, take, recover; and the interface of its attachments."""
