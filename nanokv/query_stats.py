"""Where a model's queries point before RoPE, and what that tells about the keys that they will meet.

Before RoPE the queries of a head crowd around one direction. Their mean, and their mean length per
rotary pair, are properties of the model, not of a text: a file of them is a few hundred KiB.

The insight: the logit between a key and a query n positions later is, in expectation, the centre
turned by n positions times the key. A mean over many n is a mean of turned centres, and that is
one vector: so a whole series of cosines (TriAttention, https://arxiv.org/abs/2604.04921) is one
dot product with the key as it is stored, and nobody needs to know where that key stands.

H KV heads, G query heads each, Hq = H x G, D head_dim; pair i is dimensions i and i + D/2, and a
pair of frequency 0 does not turn.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError

from safetensors import SafetensorError, safe_open

from .later import Tensor, torch
from .rope import rotate
from .slots import Shapes


def lengths(x: Tensor) -> Tensor:
    """The length of each rotary pair of x [..., D]: [..., D/2]."""
    return torch.hypot(*x.chunk(2, -1))


def sums(H: int, G: int, D: int) -> Shapes:
    """What `add` adds up to, by name: shape and dtype."""
    return {"mean": ((H, G, D), "float32"), "size": ((H, G, D // 2), "float32"), "count": ((1,), "float32")}


def add(sums: dict[str, Tensor], q: Tensor) -> None:
    """Count queries q [H, G, S, D] in, as they are before RoPE."""
    q = q.to(sums["mean"].dtype)
    sums["mean"] += q.sum(2)
    sums["size"] += lengths(q).sum(2)
    sums["count"] += q.shape[2]


def means(sums: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """E[q] [H, G, D] and E|q| of each pair [H, G, D/2]."""
    count = sums["count"].clamp(min=1)
    return sums["mean"] / count, sums["size"] / count


def expected(keys: Tensor, mean: Tensor, size: Tensor, t0: Tensor, freqs: Tensor, reach: int = 16,
             aggregate: str = "mean", trig: bool = True, mlr: bool = True) -> Tensor:
    """What the queries 1, 2, 4 ... 2^reach positions after t0 are expected to make of each key [H, G, N].

    keys [H, N, D] after RoPE, or [N, D] for all heads; mean [H, G, D] and size [H, G, D/2] of queries
    before it. How far they stray from their mean, times the key's length, is added (not mlr: their
    whole size is). aggregate: mean or max over the positions.
    """
    stray = size - lengths(mean) if mlr else size
    norm = stray @ lengths(keys).mT
    if not trig:
        return norm
    ahead = t0 + 2 ** torch.arange(reach + 1, dtype=torch.float64, device=keys.device)
    centres = rotate(mean[:, :, None], ahead, freqs)  # [H, G, reach + 1, D]
    if aggregate == "mean":
        return norm + centres.mean(2) @ keys.mT
    each = centres.flatten(1, 2) @ keys.mT  # a maximum has no such short cut
    return norm + each.unflatten(1, (-1, reach + 1)).amax(2)


def z_scores(raw: Tensor, judged: Tensor) -> Tensor:
    """raw [H, G, N] in standard deviations (of the population) from the mean of the slots judged [H, N]; elsewhere 0."""
    other = ~judged[:, None]
    n = judged.sum(-1)[:, None, None].clamp(min=1)
    off = raw - raw.masked_fill(other, 0).sum(-1, keepdim=True) / n
    off = off.masked_fill(other, 0)
    return off / (off.square().sum(-1, keepdim=True) / n).sqrt().clamp(min=1e-6)


@dataclass(frozen=True, eq=False)
class QueryStats:
    """mean [L, Hq, D]: E[q] before RoPE; size [L, Hq, D/2]: E|q| of each pair; freqs [D/2] or None if unknown. float32."""

    mean: Tensor
    size: Tensor
    freqs: Tensor | None
    model: str = ""  # its name, if known
    source: str = "the query statistics"  # what to call them in a message

    def __post_init__(self) -> None:
        L, Hq, D = self.mean.shape if self.mean.dim() == 3 else (0, 0, 0)
        pairs = D // 2
        if not L or self.size.shape != (L, Hq, pairs) or self.freqs is not None and self.freqs.shape != (pairs,):
            raise ValueError(f"mean {list(self.mean.shape)} and size {list(self.size.shape)} do not belong together")
        if not (self.mean.isfinite().all() and self.size.isfinite().all()):
            raise ValueError("there are numbers in it that are not finite")

    @property
    def note(self) -> str:
        """What a user should know who relies on them, or nothing."""
        unsaid = "does not say for which RoPE frequencies it was made, so that is not checked"
        return "" if self.freqs is not None else f"{self.source} {unsaid}"

    def into(self, sums: dict[str, Tensor], layer: int, freqs: Tensor, model: str = "") -> None:
        """Put those of one layer where `add` would have. ValueError if they were made for another model.

        freqs [D/2] and name of the model that wants them; its shape is that of the sums.
        """
        (H, G, D), (L, Hq, width) = sums["mean"].shape, self.mean.shape
        if layer >= L or (Hq, width) != (H * G, D):
            here = f"layer {layer + 1} of this model has {H * G} heads of {D}"
            raise ValueError(f"{self.source} has {L} layers of {Hq} heads of {width} dimensions, but {here}")
        if self.model and model and plain(self.model) != plain(model):
            raise ValueError(f"{self.source} was made for {self.model}, not for {model}")
        if self.freqs is not None and not torch.allclose(self.freqs, freqs.cpu().float(), rtol=1e-4, atol=0):
            raise ValueError(f"{self.source} was made for other RoPE frequencies than this model's")
        sums["mean"].copy_(self.mean[layer].view(H, G, D))
        sums["size"].copy_(self.size[layer].view(H, G, D // 2))
        sums["count"].fill_(1)

    def save(self, path: Path | str) -> None:
        """Write a safetensors file that `load` reads."""
        from safetensors.torch import save_file

        tensors = {"mean": self.mean, "size": self.size, "freqs": self.freqs}
        save_file({n: t.float().contiguous() for n, t in tensors.items()}, path, {"model": self.model})


def plain(name: str) -> str:
    """A model's name as it is compared: `HuggingFaceTB/SmolLM2-135M`, `weights/smollm2-135m.gguf` and `smollm2-135m` are one."""
    return Path(name).name.lower().removesuffix(".gguf")


def load(path: Path | str) -> QueryStats:
    """Read a file of `save`, or the `.pt` layout that TriAttention's authors publish. ValueError names what is wrong."""
    path = str(path)
    if not Path(path).is_file():
        raise ValueError(f"there is no statistics file {path!r}: make one with python -m nanokv.calibrate")
    return _load(path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=1)  # every layer asks for it
def _load(path: str, changed: int) -> QueryStats:
    try:
        return _official(path) if Path(path).suffix in (".pt", ".pth") else _own(path)
    except KeyError as error:
        why = f"it has no {error}"
    except (UnpicklingError, EOFError):
        why = "it is no archive of tensors alone"
    except (ValueError, TypeError, SafetensorError, RuntimeError, OSError) as error:
        why = str(error).partition("\n")[0]
    raise ValueError(f"{path} is no file of query statistics: {why}")


def _own(path: str) -> QueryStats:
    with safe_open(path, "pt") as file:
        mean, size, freqs = (file.get_tensor(name).float() for name in ("mean", "size", "freqs"))
        return QueryStats(mean, size, freqs, (file.metadata() or {}).get("model", ""), path)


def _official(path: str) -> QueryStats:
    """{"stats": {"layer00_head00": {q_mean_real, q_mean_imag, q_abs_mean}, ...}}, each [D/2]; real and imaginary part
    make the pair, however the model lays it out. No frequencies, and no name that could be compared."""
    stats = torch.load(path, map_location="cpu", weights_only=True)["stats"]
    places = [re.fullmatch(r"layer(\d+)_head(\d+)", name) for name in stats] if isinstance(stats, dict) else []
    if not places or None in places:
        raise ValueError("its entries are not called layer00_head00 and so on")
    L, Hq = (1 + max(int(place[i]) for place in places) for i in (1, 2))
    heads = [stats[f"layer{layer:02d}_head{head:02d}"] for layer in range(L) for head in range(Hq)]
    mean = torch.stack([torch.cat((head["q_mean_real"], head["q_mean_imag"])) for head in heads]).float()
    size = torch.stack([head["q_abs_mean"] for head in heads]).float()
    return QueryStats(mean.view(L, Hq, -1), size.view(L, Hq, -1), None, source=path)
