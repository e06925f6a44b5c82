"""The numerics: plain-PyTorch functions, each with its fused kernel beside it. Imports nothing of ours.

Some are defined by functions that live with what they belong to: `tokens_triton` by `engine.sampling`, `random_triton`
by `engine.random`, `probs_triton` and `cuts_triton` by `engine.logits`, `packed_conv_triton` by `train.contexts`.
"""
