"""Steps, policies and events of the scheduler, without a model or with one."""
