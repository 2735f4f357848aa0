"""Routing, objective, optimizer, checkpoints and the training loop."""
