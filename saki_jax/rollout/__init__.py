"""Exact sampling from the bridge q: draft, verify, couple, commit."""
