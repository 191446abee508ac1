"""A name -> a model and its tokenizer, ready to run: `model, tokenizer = load("smollm2-135m")`.

The insight: finding a model and reading it are two steps, and all that a plan needs (its shape, its
dtype) is known after the first, in milliseconds.
"""

import re
import sys
from dataclasses import dataclass, replace
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING

from .config import read_config
from .headers import Safetensors, own_dtype, read_config_of, stop_ids
from .later import torch
from .memory import FORMS
from .models import architecture, locate
from .shape import DTYPES, ModelConfig
from .tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from .model import Transformer

DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")  # NVIDIA's, its boards', WSL's, AMD's: torch calls all of them CUDA


class Bytes:
    """The vocabulary of a model that has none: one token a byte."""

    size, strip_space, pattern = 256, False, re.compile("(?!)")

    def plain(self, text: str) -> list[int]:
        """UTF-8."""
        return list(text.encode())

    whole = plain

    def token_bytes(self, token: int) -> bytes:
        """Some byte for every id: the text is noise anyway."""
        return bytes([token % 256])


@dataclass(frozen=True)
class Source:
    """A model that was found, and is not yet read. read False: it never will be, random weights take their place."""

    path: Path | None  # None: nothing but its shape is known
    config: ModelConfig  # its `name` is the one it was asked for by
    dtype: str  # by its name in torch, as the device: neither needs more before the weights are read
    device: str
    read: bool = True
    form: str = "native"  # of the weights: native, int8 or int4

    def tokenizer(self) -> Tokenizer:
        """Its tokenizer; `eos_ids` are all tokens that end an answer."""
        if self.path is None:
            return Tokenizer(Bytes())
        tokenizer = load_tokenizer(self.path)
        return replace(tokenizer, eos_ids=tokenizer.eos_ids | stop_ids(self.path))

    def model(self) -> "Transformer":
        """The model itself; this reads the weights, and only this needs torch."""
        from .checkpoint import load_model
        from .noise import random_model

        dtype = getattr(torch, self.dtype)
        if not self.read:
            return random_model(self.config, dtype, self.device, form=self.form)
        model = load_model(self.path, dtype, self.device, self.form)
        model.config = replace(model.config, name=self.config.name)
        return model


def find(name: str | Path, dtype: str = "auto", device: str = "auto", read: bool = True, weights: str = "native") -> Source:
    """The model called `name`: a registry name, a directory, or a .gguf file.

    dtype: auto (what the checkpoint is in; for a GGUF file on the CPU what the processor multiplies best), float32, bfloat16 or float16. device: auto (a CUDA
    device if there is one, else the CPU), cpu, cuda, cuda:1, ... read False: its weights are not
    needed, so a registry name or a config.json is enough. weights: native, int8 or int4, see quantize.py. Raises ValueError or OSError, in one sentence.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype must be auto, {', '.join(DTYPES)}, not {dtype!r}")
    if weights not in FORMS:
        raise ValueError(f"weights must be {', '.join(FORMS)}, not {weights!r}")
    place, name = device_named(device), str(name)
    given = None if read else architecture(name)
    path = locate(name) if given is None else None
    if path is not None:
        given = read_config_of(path)
    stored = None  # opened, not read
    if path is not None and path.is_dir() and (read or any(path.glob("*.safetensors"))):
        stored = Safetensors(path)
    try:
        shape, kind = replace(read_config(given), name=name), dtype if dtype != "auto" else own_dtype(given, place, stored)
        return Source(path, shape, kind, place, read, weights)
    except ValueError as error:
        where = name if path is None else path / "config.json" if path.is_dir() else path
        raise ValueError(f"{where}: {error}") from error


def load(name: str | Path, dtype: str = "auto", device: str = "auto", weights: str = "native") -> "tuple[Transformer, Tokenizer]":
    """The model called `name` and its tokenizer; see `find` for the arguments."""
    source = find(name, dtype, device, weights=weights)
    tokenizer = source.tokenizer()  # first: it is quick, so a mistake in it shows before the weights are read
    return source.model(), tokenizer


def device_named(name: str) -> str:
    """The device that `--device` means. ValueError if it is unknown or not in this machine."""
    if name == "auto":  # torch would know, but takes seconds to ask where there is no driver that it could use
        possible = sys.platform == "win32" or any(map(exists, DRIVERS))
        return "cuda" if possible and torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number.isdecimal() or name == kind):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:NUMBER, not {name!r}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {name} in this machine ({torch.cuda.device_count()} CUDA devices found)")
    return name
