"""Torch modules, one definition for training and for decoding."""
