"""torch, later: a stand-in that imports it when something is first asked of it.

Importing torch takes several times as long as everything up to a plan's verdict, and the verdict needs
none of it: dials, a model's shape and a prompt's tokens are plain Python. So a file on that way says
`from .later import torch` and goes on as always. The first thing asked of any stand-in puts the real
modules in the place of all of them, in every file of this package, so that neither a hot path nor
torch.compile ever meets one. (It is what PEP 810's `lazy import torch` will do.)
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

PACKAGE = __name__.partition(".")[0]


class Later:
    """Stands for a module, by its name, until somebody wants something of it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        module = import_module(self._name)
        for other in [m for key, m in sys.modules.items() if key.partition(".")[0] == PACKAGE]:
            for held in [key for key, value in vars(other).items() if isinstance(value, Later)]:
                setattr(other, held, import_module(getattr(other, held)._name))
        return getattr(module, name)


if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    torch, F = Later("torch"), Later("torch.nn.functional")

    class Tensor:
        """torch's, in signatures only: what is no tensor needs no torch to say that it takes one."""
