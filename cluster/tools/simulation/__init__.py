"""Policies against worlds whose truth is known."""
