"""A name -> a model and its tokenizer, ready to run: `model, tokenizer = load("smollm2-135m")`.

The insight: where the files are, what they hold and how the text is cut are three questions with
three answers elsewhere (`models`, `checkpoint`, `tokenizer`); here they only meet.
"""

from dataclasses import replace

import torch

from .checkpoint import DTYPES, load_model, stop_ids
from .model import Transformer
from .models import locate
from .tokenizer import Tokenizer, load_tokenizer


def load(name: str, dtype: str = "auto", device: str = "auto") -> tuple[Transformer, Tokenizer]:
    """The model called `name` (a registry name, a directory, or a .gguf file) and its tokenizer.

    dtype: auto (what the checkpoint is in), float32, bfloat16 or float16. device: auto (a CUDA
    device if there is one, else the CPU), cpu, cuda, cuda:1, ... `tokenizer.eos_ids` are all tokens
    that end an answer. Raises ValueError or OSError, in one sentence.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, not {dtype!r}")
    place = device_named(device)
    path = locate(name)
    tokenizer = load_tokenizer(path)  # first: it is quick, so a mistake in it shows before the weights are read
    tokenizer = replace(tokenizer, eos_ids=tokenizer.eos_ids | stop_ids(path))
    return load_model(path, DTYPES.get(dtype), place), tokenizer


def device_named(name: str) -> torch.device:
    """The device that `--device` means. ValueError if it is unknown or not in this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdecimal() or name == kind):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:NUMBER, not {name!r}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {name} in this machine ({torch.cuda.device_count()} CUDA devices found)")
    return torch.device(name)
