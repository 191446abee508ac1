"""config.json -> ModelConfig: what a Llama-like model is made of, or one sentence on why it cannot run.

The insight that makes it short: llama, mistral, qwen2 and qwen3 are one architecture with four
switches (biases, q/k norm, head_dim, tied head). What a config leaves out is never guessed,
except where its family has one documented meaning for that: FAMILIES.
"""

from collections.abc import Mapping
from typing import Any

from . import rope
from .model import ModelConfig

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},  # Llama 1 predates these keys
    "mistral": {"sliding_window": 4096},
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"max_window_layers": 28, "head_dim": 128},
}


def read_config(config: Mapping) -> ModelConfig:
    """The model that a `config.json` describes. Raises ValueError for one this engine cannot run."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model type {family!r} is not supported; known: {', '.join(FAMILIES)}")
    given = {**FAMILIES[family], **config}
    _refuse(given)

    def size(key: str, default: int | None = None) -> int:
        value = given.get(key) if given.get(key) is not None else default
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"config.json must give {key} as a positive number, not {value!r}")
        return value

    dim, n_heads = size("hidden_size"), size("num_attention_heads")
    n_kv_heads = size("num_key_value_heads", n_heads if family == "llama" else None)
    head_dim = size("head_dim", dim // n_heads)
    if n_heads % n_kv_heads or head_dim % 2:
        raise ValueError(f"{n_heads} heads of {head_dim} dimensions cannot share {n_kv_heads} KV heads under RoPE")
    bias = bool(given.get("attention_bias")) and family in ("llama", "qwen3")
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
        mlp_bias=bool(given.get("mlp_bias")) and family == "llama",
        qk_norm=family == "qwen3",
        tied=bool(given.get("tie_word_embeddings", False)),  # untied is the default of all four families
        max_context=size("max_position_embeddings"),
        rope=rope.parameters(given),
    )
    rope.frequencies(shape.rope, shape.head_dim, shape.max_context)  # an unknown rule is an error now, not later
    if _slides(given, shape.n_layers, shape.max_context):
        raise ValueError(f"this {family} model uses sliding-window layers, which are not supported yet")
    return shape


def _refuse(config: Mapping) -> None:
    """Raise ValueError for what would otherwise run and be wrong."""
    quantised = config.get("quantization_config")
    if quantised:
        raise ValueError(
            f"the checkpoint is quantised ({quantised.get('quant_method', 'unknown method')}); "
            "use the original one in 16 or 32 bits, or a GGUF file"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {config['hidden_act']!r} is not supported; known: silu")
    classes = config.get("architectures") or []
    if classes and not any(name.endswith("ForCausalLM") for name in classes):
        raise ValueError(f"{', '.join(classes)} is not a language model; a ...ForCausalLM checkpoint is needed")


def _eps(config: Mapping) -> float:
    if config.get("rms_norm_eps") is None:
        raise ValueError("config.json does not give rms_norm_eps")
    return float(config["rms_norm_eps"])


def _slides(config: Mapping, n_layers: int, max_context: int) -> bool:
    """Is a window shorter than the context switched on in any layer? Naming one is not switching it on."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    if config["model_type"] == "llama" or window is None or window >= max_context:
        return False
    if config["model_type"] == "mistral":
        return True
    return bool(config.get("use_sliding_window")) and config["max_window_layers"] < n_layers
