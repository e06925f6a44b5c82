"""The numerics: plain-PyTorch functions, each with its fused kernel beside it. Imports nothing of ours."""
