"""Shared by all tests: tiny random models, policies with tiny dials, and the real model where a test says so."""

import dataclasses

import pytest
import torch

import nanokv.policies  # noqa: F401  fills the registry
from nanokv.model import ModelConfig, Transformer
from nanokv.policy import REGISTRY, Policy
from nanokv.slots import Slots


def tiny(seed: int = 0, **shape) -> Transformer:
    """A random Llama of a few thousand weights: H 2 KV heads, G 2, D 8, 3 layers unless told otherwise."""
    torch.manual_seed(seed)
    defaults = dict(vocab_size=97, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, max_context=4096)
    model = Transformer(ModelConfig(**(defaults | shape))).eval()
    for p in model.parameters():
        p.requires_grad_(False)
        if p.dim() > 1:
            p.normal_(0, 0.25)
    return model


# Dials in the size of a tiny test; a policy takes those that it has.
SMALL = {"sink": 2, "window": 3, "recent": 2, "interval": 1, "history": 11, "kernel": 3, "page": 4, "dense": 1}


def fields(name: str) -> set[str]:
    """The dials of a policy."""
    return {f.name for f in dataclasses.fields(REGISTRY[name])}


def small(name: str, budget: int = 12, **dials: object) -> Policy:
    """A policy for tests: `SMALL` and these dials, as far as it has them."""
    wanted = SMALL | {"budget": budget} | dials
    return REGISTRY[name](**{d: v for d, v in wanted.items() if d in fields(name)})


# Other modes that change who is kept or read; tried beside the defaults.
MODES = {"streaming_llm": [{"positions": "text"}], "triattention": [{"scope": "model"}]}


def variants() -> list:
    """(name, dials) of every registered policy; one that scores comes with all four ways of splitting its budget."""
    splits = [dict(layers=a, heads=b) for a in ("uniform", "pyramid") for b in ("uniform", "adaptive")]
    every = [(n, s) for n in sorted(REGISTRY) for s in (splits if {"layers", "heads"} <= fields(n) else [{}])]
    every += [(n, m) for n, modes in MODES.items() if n in REGISTRY for m in modes]
    return [pytest.param(n, s, id="-".join((n, *s.values()))) for n, s in every]


def forgets(policy: Policy) -> bool:
    """Does it ever evict? (Full has no budget; quest's bounds what is read, not what is stored.)"""
    return policy.budget is not None and type(policy).read is Policy.read


def scratch(kv: Slots, k: torch.Tensor, v: torch.Tensor) -> Slots:
    """What a memory holds and S new tokens, k v [H, S, D] after RoPE, side by side."""
    text = kv.beside(k.shape[1])
    text.append(k, v)
    return text


@pytest.fixture(scope="session")
def model() -> Transformer:
    return tiny()


@pytest.fixture(scope="session")
def smollm2():
    """Path of the default model's GGUF file, fetched once."""
    from nanokv.models import locate

    return locate("smollm2-135m")
