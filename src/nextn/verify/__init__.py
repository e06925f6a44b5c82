"""Prove that a head is whole, that an engine's own class loads it, and that it is wired right."""
