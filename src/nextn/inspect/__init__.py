"""The truth about a checkpoint's head: facts from headers, findings about them, verdicts of engines."""
