"""Quantisation: how tensors are stored, what the configuration claims, and how engines match its rules."""
