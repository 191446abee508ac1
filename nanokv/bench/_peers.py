"""Other engines on the same model, for a number of theirs beside ours from the same run. None of them is needed, nor installed with nanokv."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nanokv.models import locate


class Peer:
    """An engine that takes its turns."""

    def read(self, tokens: Sequence[int]) -> object:
        """Forget everything and read a prompt."""
        raise NotImplementedError

    def step(self, token: int) -> object:
        """Read one token more."""
        raise NotImplementedError


class Transformers(Peer):
    """Hugging Face's, with its growing cache and torch's own attention; a GGUF file is unpacked to `dtype`."""

    def __init__(self, path: Path, dtype: torch.dtype, length: int):
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)  # its new name is not known to all of 5.x
        folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **file).eval()
        self.cache: Any = None

    def read(self, tokens: Sequence[int]) -> torch.Tensor:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        return self._forward(tokens)

    def step(self, token: int) -> torch.Tensor:
        return self._forward([token])

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens]), past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits


class LlamaCpp(Peer):
    """llama.cpp, which computes with the file's own weights, quantized or not, whatever `dtype` says; its cache is 16 bits."""

    def __init__(self, path: Path, dtype: torch.dtype, length: int):
        from llama_cpp import Llama

        if path.is_dir():
            raise ValueError(f"llama.cpp reads a .gguf file, and {path} is a directory")
        self.llama = Llama(str(path), n_ctx=length, n_threads=torch.get_num_threads(), n_threads_batch=torch.get_num_threads(), verbose=False)

    def read(self, tokens: Sequence[int]) -> None:
        self.llama.reset()
        self.llama.eval(list(tokens))

    def step(self, token: int) -> None:
        self.llama.eval([token])


PEERS: dict[str, tuple[str, Callable[[Path, torch.dtype, int], Peer]]] = {  # what to import, and what then to use
    "transformers": ("transformers", Transformers), "llama.cpp": ("llama_cpp", LlamaCpp),
}  # fmt: skip
PACKAGES = {"transformers": "transformers accelerate", "llama_cpp": "llama-cpp-python"}


def check_peers(names: Sequence[str]) -> None:
    """ValueError for an engine that is not known, ImportError for one that is not installed."""
    for name in names:
        if name not in PEERS:
            raise ValueError(f"no peer is called {name!r}; there are {', '.join(PEERS)}")
        module = PEERS[name][0]
        if importlib.util.find_spec(module) is None:
            raise ImportError(f"the peer {name} is not installed: pip install {PACKAGES[module]}")


def peers(names: Sequence[str], model: str, dtype: torch.dtype, length: int) -> dict[str, Peer]:
    """Each engine by its name, with the model loaded and room for `length` tokens."""
    return {name: PEERS[name][1](locate(model), dtype, length) for name in names}
