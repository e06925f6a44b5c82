"""Turn a GGUF file into a folder that transformers and nextn load."""
