"""Fill a decoder with random weights to start from."""

from __future__ import annotations

import math

import torch

from nextn.models.blocks import MLP, Attention, GatedDeltaNet, RMSNorm
from nextn.models.decoder import Decoder

STD = 0.02
SLOWEST, FASTEST = 1e-3, 1e-1
"""Range of the delta net's step size at zero input (Gu and Dao, "Mamba", 2023, section 3.6)."""


@torch.no_grad()
def initialise(model: Decoder, seed: int) -> None:
    """Matrices normal, those that write to the residual stream smaller by sqrt(2 * layers); norms the identity.

    The delta net forgets at a rate drawn from [1, 16] times a step size drawn log-uniformly, as in Mamba 2.
    """
    torch.manual_seed(seed)
    for param in model.parameters():
        param.normal_(0.0, STD)
    writes = STD / math.sqrt(2 * len(model.layers))
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(0.0 if module.one_plus else 1.0)
        elif isinstance(module, Attention):
            module.o.weight.normal_(0.0, writes)
        elif isinstance(module, MLP):
            module.down.weight.normal_(0.0, writes)
        elif isinstance(module, GatedDeltaNet):
            module.out.weight.normal_(0.0, writes)
            bound = module.conv.shape[1] ** -0.5
            module.conv.uniform_(-bound, bound)
            module.a_log.uniform_(1.0, 16.0).log_()
            step = module.dt_bias.uniform_(math.log(SLOWEST), math.log(FASTEST)).exp_()
            step.copy_(step + torch.log(-torch.expm1(-step)))
