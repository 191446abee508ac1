"""Random weights: memory and speed are real, what the model says is noise."""

import torch
from torch import Tensor

from .checkpoint import filled, name_table
from .model import ModelConfig, Transformer

ROWS = 64  # rows of noise, repeated: drawing 7 billion numbers would take minutes


class Noise:
    """The tensors of a model that nobody trained: norms are 1, matrices are noise."""

    def __init__(self, c: ModelConfig, seed: int):
        with torch.device("meta"):
            ours = dict(Transformer(c).named_parameters())
        places = {name: place for name, place in name_table(c).items() if place[0] in ours}
        self.shapes = {name: tuple(ours[place][rows].shape) for name, (place, rows) in places.items()}
        self._random = torch.Generator().manual_seed(seed)

    def tensor(self, name: str) -> Tensor:
        """One tensor, bfloat16; another one each time."""
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        rows = (torch.randn(min(shape[0], ROWS), shape[1], generator=self._random) * 0.02).bfloat16()
        return rows.repeat(-(-shape[0] // len(rows)), 1)[: shape[0]]


def random_model(shape: ModelConfig, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0, form: str = "native") -> Transformer:
    """A model of this shape with random weights."""
    return filled(shape, Noise(shape, seed), dtype, device, form)
