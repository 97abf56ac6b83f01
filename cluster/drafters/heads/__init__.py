"""Drafters that read the target's hidden states, and so live beside it."""
