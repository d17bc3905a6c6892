"""Whole deployments on virtual time: the product's gateway, workers and protocol over a network and a transport that fail.

Everything that a run does follows from its seed and its options. `command.py` is the command, `world.py` puts a deployment
together, `checks.py` says what must hold.
"""
