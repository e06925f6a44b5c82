"""Take heads out of checkpoints and put them back: plans first, then an atomic write."""
