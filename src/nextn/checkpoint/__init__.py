"""Bytes on disk or on a hub: list, read, plan, write. Listing needs no torch."""
