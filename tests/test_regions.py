"""A graph in pieces against the function that it was traced from: the same answers, the same traces in memory, one layer compiled."""

import pytest
import torch

from nanokv import regions
from nanokv.regions import Pieces, marked

pytestmark = pytest.mark.skipif(marked() is None, reason="this torch knows no regions")


class Layer(torch.nn.Module):
    """Remembers what it was given in a row of its memory [rows, 4], and answers with what it holds."""

    def __init__(self, rows: int):
        super().__init__()
        self.w, self.memory = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False), torch.zeros(rows, 4)

    def forward(self, x, layer, attend):
        self.memory[attend] = x @ self.w  # what attend is, the layer alone must know
        return torch.tanh(x + self.memory.sum(0))


def pieces(rows: list[int]) -> tuple:
    """Layers with so many rows, what a step through them answers and leaves in memory, plainly and in pieces; and what was built."""
    torch.manual_seed(0)
    layers, built = [Layer(n) for n in rows], []

    def build(graph, example):
        built.append(graph)
        assert len(example) == sum(n.op == "placeholder" for n in graph.graph.nodes)
        return graph

    def step(x, through):
        place = torch.arange(3)[1:2]
        x = x * 2
        for i, layer in enumerate(layers):
            x = through(layer, x, i, place)
        return (x + place).sum(0)

    x = torch.randn(1, 4)
    want, held = step(x, regions.through), [layer.memory.clone() for layer in layers]
    for layer in layers:
        layer.memory.zero_()
    mark = marked()
    compiled = torch.compile(lambda x: step(x, mark), fullgraph=True, dynamic=False, backend=lambda graph, example: Pieces(graph, build))
    assert torch.equal(compiled(x), want) and torch.equal(compiled(x), want), "what is written is written twice, to the same place"
    assert all(torch.equal(layer.memory, h) and h.any() for layer, h in zip(layers, held))
    return built


@pytest.mark.parametrize(
    "rows, built",
    [
        ([3, 3, 3, 3], 3),  # what is before the layers, a layer, what is after
        ([3, 4, 5, 4, 3], 5),
        ([*range(3, 15)] * 2, 14),  # more kinds than torch allows unless told
        ([3, 4, 5], 1),  # none is called twice: torch leaves the graph whole
    ],
)
def test_layers_alike_are_built_once(rows, built):
    assert len(pieces(rows)) == built
