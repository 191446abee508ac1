"""RoPE: a query or key is turned by an angle proportional to its token's position. Nothing more.

The insight that keeps the rest of the project short: rotations form a group,
`rotate(rotate(x, a), b) == rotate(x, a + b)`. A stored key can be turned further or turned
back without knowing anything but how far.

D is head_dim; the pair of dimensions (i, i + D/2) turns by `pos * freqs[i]` (Su et al. 2021,
https://arxiv.org/abs/2104.09864, in the half-split layout of Llama and Qwen checkpoints).
"""

import math
from collections.abc import Callable, Mapping
from reprlib import repr as brief

from .later import Tensor, torch

TAU = 2 * math.pi

Rule = Callable[[Tensor], Tensor]  # plain frequencies [D/2] -> those to turn by


def angles(pos: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of positions `pos [...]`: two tensors [..., D], float32.

    pos: integers (any dtype); freqs [D/2] in radians per position. The product is taken in
    float64 and reduced to one turn before the cosine, so position 4,000,000 is as exact as
    position 4. The sine's first half is negated, which makes `turn` two products.
    """
    angle = torch.remainder(pos.double()[..., None] * freqs.double(), TAU).float()
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., D] by prepared `angles` (broadcast against x); computed in at least float32."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def rotate(x: Tensor, pos: Tensor, freqs: Tensor) -> Tensor:
    """Turn x [..., D] by pos [...] positions (negative: turn back)."""
    return turn(x, *angles(pos, freqs))


def parameters(config: Mapping) -> dict:
    """The RoPE rule of a `config.json`, whichever dialect it speaks, as one flat dict.

    Understood: `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` whose
    type is called `rope_type` or `type`. Always returns `rope_type` and `rope_theta`.
    Raises ValueError when no theta is given and the family has no documented default.
    """
    rope = dict(config.get("rope_parameters") or {})
    rope.update(config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    if "rope_theta" not in rope:
        theta = config.get("rope_theta")
        if theta is None:
            # Llama 1 and 2 predate the key and mean 10,000. For anyone else a guess would be a
            # silent, large error: Llama 3 turns at 500,000 and Qwen at 1,000,000.
            if config.get("model_type") != "llama" or config.get("vocab_size", 0) > 100_000:
                raise ValueError("config.json gives no rope_theta, and no default is safe for this model")
            theta = 10000.0
        rope["rope_theta"] = theta
    rope["rope_theta"] = _number(rope, "rope_theta", above=1)
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise ValueError("partial rotary embeddings (partial_rotary_factor) are not supported")
    return rope


def frequencies(rope: Mapping, head_dim: int, max_context: int) -> tuple[Tensor, float]:
    """Radians per position of each pair [D/2] in float32, and the factor on the attention logits.

    rope: as `parameters` returns it. The second value is 1 except for YaRN, whose attention
    factor multiplies q and k alike; its square therefore multiplies the logits, and `rotate`
    stays a pure rotation. Raises ValueError where `rule` does.
    """
    changed, scale = rule(rope, head_dim, max_context)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return changed(1.0 / rope["rope_theta"] ** exponent), scale


def rule(rope: Mapping, head_dim: int, max_context: int) -> tuple[Rule, float]:
    """What is made of the plain frequencies, and the factor on the attention logits. All that can be wrong is found here.

    Raises ValueError for rules whose frequencies depend on the length of the text (dynamic,
    longrope): a key already stored would have to be turned again.
    """
    kind = rope["rope_type"]
    if kind == "default":
        return lambda freqs: freqs, 1.0
    if kind == "linear":
        factor = _number(rope, "factor")
        return lambda freqs: freqs / factor, 1.0
    if kind == "llama3":
        return _llama3(rope), 1.0
    if kind == "yarn":
        return _yarn(rope, head_dim, max_context)
    if kind == "factors":  # what a GGUF file stores instead of naming llama3: one divisor per pair
        if len(rope["factors"]) != head_dim // 2:
            raise ValueError(f"there are {len(rope['factors'])} rope factors for {head_dim // 2} pairs of dimensions")
        return lambda freqs: freqs / torch.tensor(rope["factors"], dtype=torch.float32), 1.0
    why = "its frequencies depend on the text's length" if kind in ("dynamic", "longrope") else "unknown"
    raise ValueError(f"rope type {brief(kind)} is not supported ({why}); known: default, linear, llama3, yarn")


def _number(rope: Mapping, name: str, default: float | None = None, above: float = 0) -> float:
    """A number that the rule needs. ValueError names it if it is missing, of another kind, or too small to mean anything."""
    value = default if rope.get(name) is None else rope[name]
    if value is None:
        raise ValueError(f"rope type {rope['rope_type']!r} needs {name!r}, which the config does not give")
    if not isinstance(value, (int, float)) or not above < value < 1e30:
        raise ValueError(f"{name!r} must be a number above {above} to turn keys by, not {brief(value)}")
    return float(value)


def _llama3(rope: Mapping) -> Rule:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, the middle blended."""
    factor, low, high = (_number(rope, n) for n in ("factor", "low_freq_factor", "high_freq_factor"))
    if not low < high:
        raise ValueError(f"high_freq_factor must be above low_freq_factor, {low}, not {high}")
    trained = _number(rope, "original_max_position_embeddings")

    def changed(freqs: Tensor) -> Tensor:
        turns = trained * freqs / TAU  # over the trained context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * freqs / factor + blend * freqs

    return changed


def _yarn(rope: Mapping, head_dim: int, max_context: int) -> tuple[Rule, float]:
    """YaRN (Peng et al. 2023, https://arxiv.org/abs/2309.00071): pairs that turn often keep their
    frequency, slow ones are interpolated; the logits grow with log(factor)."""
    factor = _number(rope, "factor")
    trained = _number(rope, "original_max_position_embeddings", max_context)

    def pair(turns: float) -> float:  # the (fractional) pair that makes `turns` turns in the trained context
        return head_dim * math.log(trained / (turns * TAU)) / (2 * math.log(rope["rope_theta"]))

    low, high = pair(_number(rope, "beta_fast", 32)), pair(_number(rope, "beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        scale = growth(_number(rope, "mscale")) / growth(_number(rope, "mscale_all_dim")) if both else growth(1.0)
    else:
        scale = _number(rope, "attention_factor")

    def changed(freqs: Tensor) -> Tensor:
        ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
        return freqs / factor * ramp + freqs * (1 - ramp)

    return changed, scale**2
