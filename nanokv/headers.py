"""What a model's files say before a weight is read: its config, its dtype, its tensors' shapes, how its answers end.

The insight: a plan needs this and nothing else, so it is kept apart from what needs torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import brief, checked, read_json, refuse_pointer, typed
from .gguf_file import GGUF, read_metadata
from .processor import multiplies
from .shape import DTYPES

if TYPE_CHECKING:
    from torch import Tensor

STORED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # as safetensors calls them
EMBED = "model.embed_tokens.weight"


def read_config_of(path: Path) -> dict[str, Any]:
    """A checkpoint's config, in config.json's words, without touching its weights."""
    return GGUF(path).config() | {"dtype": "auto"} if path.is_file() else read_json(path / "config.json")


def stop_ids(path: Path) -> set[int]:
    """Tokens that end an answer: all ids of config.json and generation_config.json, or of the GGUF."""
    path = Path(path)
    if path.is_file():
        metadata = read_metadata(path)
        named = {f"{path}: tokenizer.ggml.{end}_token_id": metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")}
    else:
        files = [path / "config.json", *filter(Path.exists, [path / "generation_config.json"])]
        named = {f"{file}: eos_token_id": read_json(file).get("eos_token_id") for file in files}
    found: set[int] = set()
    for name, ids in named.items():
        for i in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            found.add(checked(name, i, int))
    return found


class Safetensors:
    """The tensors of a directory: model.safetensors, or the shards that its index names."""

    def __init__(self, directory: Path):
        from safetensors import safe_open, SafetensorError

        index = directory / "model.safetensors.index.json"
        places = _shards(index) if index.exists() else {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._places: dict[str, Path] = {}
        self._files: dict[Path, Any] = {}  # opened to be read
        for name in sorted(set(places.values())) or ["model.safetensors"]:
            path = directory / name
            if not path.exists():
                raise FileNotFoundError(f"{directory} has no {name}" + (f", which {index.name} names" if places else ""))
            refuse_pointer(path)
            try:
                file = safe_open(path, framework="np")  # for its header: "pt" would import torch
            except SafetensorError as error:
                size = path.stat().st_size
                raise ValueError(f"{path} is damaged or cut short ({size:,} bytes); download it again") from error
            for key in file.keys():
                if places.get(key, name) == name:  # a tensor stored twice: the index decides
                    header = file.get_slice(key)
                    self.shapes[key], self._places[key] = tuple(header.get_shape()), path
                    self.dtypes[key] = STORED.get(header.get_dtype(), header.get_dtype())

    def tensor(self, name: str) -> "Tensor":
        """One tensor, memory-mapped."""
        from safetensors import safe_open

        path = self._places[name]
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path].get_tensor(name)


def _shards(index: Path) -> dict[str, str]:
    """Tensor name -> the file it is in."""
    try:
        places = typed(read_json(index), "weight_map", dict, {})
        return {name: checked(f"the place of {name}", file, str) for name, file in places.items()}
    except ValueError as error:
        raise ValueError(f"{index}: {error}") from error


def own_dtype(config: Mapping, device: str, stored: Safetensors | None = None) -> str:
    """The dtype that a config names, else the one the embedding is stored in, by name.

    auto, as of codes, which are stored in none: bfloat16 on a CPU that multiplies it (half the bytes, and prompts are read several times faster), else float32.
    """
    name = config.get("dtype") or config.get("torch_dtype")
    if name == "auto":
        return "bfloat16" if device == "cpu" and multiplies("bfloat16") else "float32"
    if name is None:
        name = stored.dtypes.get(EMBED, "bfloat16") if stored else "bfloat16"
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"config.json names the dtype {brief(name)}; known: {', '.join(DTYPES)}")
    return "float32" if name == "float16" and device.partition(":")[0] == "cpu" else name
