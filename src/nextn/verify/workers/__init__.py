"""Scripts that an engine's own Python runs. They import nothing of nextn."""
