"""Other engines on the same model, for a number of theirs beside ours from the same run. None of them is needed, nor installed with nanokv.

One that computes in whatever dtype it is told takes part once for each dtype of the run; one that has its own, once.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nanokv.models import locate


class Peer:
    """An engine that takes its turns. dtype: what it computes in, by name; "" where that is its own affair."""

    name = ""
    dtype = ""

    def read(self, tokens: Sequence[int]) -> object:
        """Forget everything and read a prompt."""
        raise NotImplementedError

    def step(self, token: int) -> object:
        """Read one token more."""
        raise NotImplementedError


class Transformers(Peer):
    """Hugging Face's, with its growing cache and torch's own attention; a GGUF file is unpacked to `dtype`."""

    name = "transformers"

    def __init__(self, path: Path, dtype: str, length: int):
        from transformers import AutoModelForCausalLM, logging

        logging.disable_progress_bar()
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)  # its new name is not known to all of 5.x
        folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        self.dtype = dtype
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", **file).eval()
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
    """llama.cpp, which computes with the file's own weights, quantized or not; it keeps every key and value, in 16 bits."""

    name = "llama.cpp"

    def __init__(self, path: Path, dtype: str, length: int):
        from llama_cpp import Llama

        if path.is_dir():
            raise ValueError(f"llama.cpp reads a .gguf file, and {path} is a directory")
        n = torch.get_num_threads()
        self.llama = Llama(str(path), n_ctx=length, n_threads=n, n_threads_batch=n, verbose=False)

    def read(self, tokens: Sequence[int]) -> None:
        self.llama.reset()
        self.llama.eval(list(tokens))

    def step(self, token: int) -> None:
        self.llama.eval([token])


PEERS: dict[str, tuple[str, type[Peer]]] = {  # what to import, and what then to use
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


def peers(names: Sequence[str], model: str, dtypes: Sequence[str], length: int) -> list[Peer]:
    """These engines with the model loaded and room for `length` tokens: transformers once for each dtype, llama.cpp once."""
    wanted = {name: dtypes if name == "transformers" else [""] for name in names}
    return [PEERS[name][1](locate(model), dtype, length) for name, every in wanted.items() for dtype in every]
