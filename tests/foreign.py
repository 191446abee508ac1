"""Tiny random checkpoints of transformers, and plain causal attention: the oracle of all loading tests."""

import torch
import transformers
from torch import Tensor

from nanokv import rope
from nanokv.model import Attend, Transformer

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32)
MODELS = {
    "llama-2": ("Llama", dict(num_key_value_heads=4, rope_parameters=PLAIN)),
    "llama-2-tied": ("Llama", dict(num_key_value_heads=1, rope_parameters=PLAIN, tie_word_embeddings=True)),
    "llama-biased": ("Llama", dict(rope_parameters=PLAIN, attention_bias=True, mlp_bias=True)),
    "llama-3.1": ("Llama", dict(rope_parameters=LLAMA3, max_position_embeddings=512)),
    "mistral": ("Mistral", dict(rope_parameters=PLAIN, sliding_window=None, head_dim=16)),
    "qwen2": ("Qwen2", dict(rope_parameters=PLAIN, tie_word_embeddings=True)),
    "qwen2.5-yarn": ("Qwen2", dict(rope_parameters=YARN, max_position_embeddings=32)),
    "qwen3": ("Qwen3", dict(rope_parameters=PLAIN, head_dim=16)),
}


def causal(freqs: Tensor, scale: float) -> Attend:
    """Plain causal attention over one piece of text: what any memory must reproduce."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        S, D = q.shape[-2:]
        pos = torch.arange(S)
        q, k = rope.rotate(q, pos, freqs), rope.rotate(k, pos, freqs)
        logits = torch.einsum("hgsd,htd->hgst", q, k) * D**-0.5 * scale
        logits = logits.masked_fill(pos > pos[:, None], -torch.inf)
        return torch.einsum("hgst,htd->hgsd", logits.softmax(-1), v)

    return attend


def logits(model: Transformer, tokens: Tensor) -> Tensor:
    c = model.config
    return model(tokens, causal(*rope.frequencies(c.rope, c.head_dim, c.max_context)), every=True)


def theirs(name: str) -> transformers.PreTrainedModel:
    """A tiny random transformers model whose every parameter, biases and norms too, matters."""
    family, options = MODELS[name]
    sizes = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
    options = sizes | dict(num_key_value_heads=2, max_position_embeddings=256) | options
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2) if p.dim() > 1 else p.add_(torch.randn_like(p) * 0.2)
    return model


def tokens(n: int = 60) -> Tensor:
    return torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(1))
