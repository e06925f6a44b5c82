"""On a GPU: the numbers are those of the CPU, and sampling runs inside a captured graph."""

from __future__ import annotations

import pytest
import torch

from nextn.engine.logits import SamplingState, process
from nextn.engine.params import SamplingParams
from nextn.engine.random import uniforms
from nextn.engine.sampling import accept

pytestmark = pytest.mark.gpu


def test_numbers_equal_those_of_the_cpu() -> None:
    seed, position = torch.arange(-50, 50) * 10**16, torch.arange(300).reshape(100, 3)
    assert torch.equal(uniforms(seed.cuda(), position.cuda()).cpu(), uniforms(seed, position))


def test_a_captured_graph_decides_as_the_cpu_does() -> None:
    batch = [
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=1, repetition_penalty=1.2),
        SamplingParams(temperature=0, presence_penalty=0.5, logit_bias={3: 2.0}),
        SamplingParams(temperature=1.1, top_p=0.7, seed=3, min_tokens=2, stop_token_ids=[5]),
    ]
    stops, prompts = [p.stop_ids([7]) for p in batch], [[1, 2], [3], [4, 5]]
    g = torch.Generator().manual_seed(0)
    # float64, so that no choice hangs on the rounding of one device.
    logits = torch.randn(3, 4, 5000, generator=g, dtype=torch.float64) * 3
    other = torch.randn(3, 4, 5000, generator=g, dtype=torch.float64) * 3

    def decide(logits: torch.Tensor, state: SamplingState) -> tuple[torch.Tensor, torch.Tensor]:
        drafts = logits[:, :3].argmax(-1)
        draws = uniforms(state.seed, torch.arange(4, device=logits.device).expand(3, 4))
        laws = process(logits[:, :3] * 0.9, state, drafts)
        return accept(process(logits, state, drafts), drafts, laws, draws)

    on_cpu = SamplingState.build(batch, prompts, vocab_size=5000, stop_ids=stops)
    on_gpu = SamplingState.build(batch, prompts, vocab_size=5000, stop_ids=stops, device="cuda")
    on_gpu.seed.copy_(on_cpu.seed)
    given = logits.cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        decide(given, on_gpu)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens, accepted = decide(given, on_gpu)
    for source in (logits, other):
        given.copy_(source)
        graph.replay()
        expected, count = decide(source, on_cpu)
        assert accepted.cpu().tolist() == count.tolist()
        for row in range(3):
            kept = int(count[row]) + 1
            assert tokens[row, :kept].tolist() == expected[row, :kept].tolist()
