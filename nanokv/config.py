"""config.json -> ModelConfig: what a Llama-like model is made of, or one sentence on why it cannot run.

The insight that makes it short: llama, mistral, qwen2 and qwen3 are one architecture with four
switches (biases, q/k norm, head_dim, tied head). What a config leaves out is never guessed,
except where its family has one documented meaning for that: FAMILIES.
"""

from collections.abc import Mapping
from typing import Any

from . import rope
from .files import brief, typed, typed_list
from .shape import ModelConfig

LARGEST = 1 << 31  # no size comes near it
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},  # Llama 1 predates these keys
    "mistral": {"sliding_window": 4096},
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"max_window_layers": 28, "head_dim": 128},
}


def read_config(config: Mapping) -> ModelConfig:
    """The model that a `config.json` describes. Raises ValueError for one this engine cannot run."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"model type {brief(family)} is not supported; known: {', '.join(FAMILIES)}")
    given = {**FAMILIES[family], **config}
    _refuse(given)

    def size(key: str, default: int | None = None) -> int:
        value = typed(given, key, int, default)
        if value is None or not 0 < value < LARGEST:
            raise ValueError(f"config.json must give {key} as a positive number, not {brief(value)}")
        return value

    dim, n_heads = size("hidden_size"), size("num_attention_heads")
    n_kv_heads = size("num_key_value_heads", n_heads if family == "llama" else None)
    head_dim = size("head_dim", dim // n_heads)
    if n_heads % n_kv_heads or head_dim % 2:
        raise ValueError(f"{n_heads} heads of {head_dim} dimensions cannot share {n_kv_heads} KV heads under RoPE")
    bias = typed(given, "attention_bias", bool, False) and family in ("llama", "qwen3")
    shape = ModelConfig(
        vocab_size=size("vocab_size"),
        dim=dim,
        n_layers=size("num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_dim=size("intermediate_size"),
        norm_eps=_eps(given),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=typed(given, "mlp_bias", bool, False) and family == "llama",
        qk_norm=family == "qwen3",
        tied=typed(given, "tie_word_embeddings", bool, False),  # untied is the default of all four families
        max_context=size("max_position_embeddings"),
        rope=rope.parameters(given | {key: typed(given, key, dict) for key in ("rope_parameters", "rope_scaling")}),
    )
    rope.rule(shape.rope, shape.head_dim, shape.max_context)  # an unknown rule is an error now, not later
    if _slides(given, shape.n_layers, shape.max_context):
        raise ValueError(f"this {family} model uses sliding-window layers, which are not supported yet")
    return shape


def _refuse(config: Mapping) -> None:
    """Raise ValueError for what would otherwise run and be wrong."""
    quantised = typed(config, "quantization_config", dict)
    if quantised:
        raise ValueError(
            f"the checkpoint is quantised ({quantised.get('quant_method', 'unknown method')}); "
            "use the original one in 16 or 32 bits, or a GGUF file"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {brief(config['hidden_act'])} is not supported; known: silu")
    classes = typed_list(config, "architectures", str)
    if classes and not any(name.endswith("ForCausalLM") for name in classes):
        raise ValueError(f"{', '.join(classes)} is not a language model; a ...ForCausalLM checkpoint is needed")


def _eps(config: Mapping) -> float:
    eps = typed(config, "rms_norm_eps", float)
    if eps is None or not 0 <= eps < 1:
        raise ValueError(f"config.json must give rms_norm_eps as a small number, not {brief(eps)}")
    return float(eps)


def _slides(config: Mapping, n_layers: int, max_context: int) -> bool:
    """Is a window shorter than the context switched on in any layer? Naming one is not switching it on."""
    kinds, window = typed_list(config, "layer_types", str), typed(config, "sliding_window", int)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    if config["model_type"] == "llama" or window is None or window >= max_context:
        return False
    if config["model_type"] == "mistral":
        return True
    return typed(config, "use_sliding_window", bool, False) and typed(config, "max_window_layers", int, 0) < n_layers
