"""What each family's checkpoint says: pure data, no torch, no input or output."""
