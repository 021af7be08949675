"""Commands for the models and servers on this machine."""
