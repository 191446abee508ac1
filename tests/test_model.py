"""The forward pass: against transformers on random weights, and against the dense oracle, which is anchored here too."""

import pytest
import torch
import torch.nn.functional as F
from conftest import REGISTRY, small, tiny
from oracle import causal, dense_logits
from torch import Tensor

from nanokv import model as nanokv_model
from nanokv import processor
from nanokv.engine import Engine
from nanokv.model import ModelConfig, Transformer
from nanokv.policy import make
from nanokv.rope import frequencies, rotate
from nanokv.shape import FEW

SHAPE = dict(vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
             intermediate_size=40, max_position_embeddings=64, rms_norm_eps=1e-5)
TOKENS = torch.randint(61, (19,), generator=torch.Generator().manual_seed(0))


def plain(model: Transformer):
    """An attend() without memory: the text attends to itself, causally."""
    c, calls = model.config, []
    freqs, factor = frequencies(c.rope, c.head_dim, c.max_context)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(layer)
        pos = torch.arange(k.shape[1])
        k, v = (x[:, None].expand(-1, c.n_heads // c.n_kv_heads, -1, -1) for x in (rotate(k, pos, freqs), v))
        return F.scaled_dot_product_attention(rotate(q, pos, freqs), k, v, is_causal=True, scale=factor * c.head_dim**-0.5)

    attend.calls = calls
    return attend


def translated(hf: torch.nn.Module, **extra) -> Transformer:
    """A transformers model's weights in ours."""
    c = hf.config
    ours = Transformer(ModelConfig(
        vocab_size=c.vocab_size, dim=c.hidden_size, n_layers=c.num_hidden_layers, n_heads=c.num_attention_heads,
        n_kv_heads=c.num_key_value_heads, head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        ffn_dim=c.intermediate_size, norm_eps=c.rms_norm_eps, tied=c.tie_word_embeddings, **extra))
    w, to = hf.state_dict(), {}
    for name in ours.state_dict():
        kind = name.rpartition(".")[2]
        theirs = name.replace("blocks.", "model.layers.").replace("attn_norm", "input_layernorm")
        theirs = theirs.replace("mlp_norm", "post_attention_layernorm").replace(".attn.o.", ".self_attn.o_proj.")
        theirs = theirs.replace(".mlp.down.", ".mlp.down_proj.").replace(".attn.", ".self_attn.")
        if name.startswith(("embed", "norm")):
            theirs = theirs.replace("embed.", "model.embed_tokens.").replace("norm.", "model.norm.")
        theirs = theirs.replace("head.weight", "lm_head.weight")
        if ".qkv." in name:
            to[name] = torch.cat([w[theirs.replace(f"qkv.{kind}", f"{x}_proj.{kind}")] for x in "qkv"])
        elif ".gate_up." in name:
            to[name] = torch.cat([w[theirs.replace(f"gate_up.{kind}", f"{x}_proj.{kind}")] for x in ("gate", "up")])
        else:
            to[name] = w[theirs]
    ours.load_state_dict(to)
    return ours.requires_grad_(False)


def families():
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    yield LlamaForCausalLM, LlamaConfig(**SHAPE), {}
    yield LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True), dict(
        qkv_bias=True, o_bias=True, mlp_bias=True)
    yield Qwen2ForCausalLM, Qwen2Config(**SHAPE), dict(qkv_bias=True)
    yield Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16), dict(qk_norm=True)


@pytest.mark.parametrize("family", range(4))
def test_logits_are_those_of_transformers(family):
    cls, config, extra = list(families())[family]
    torch.manual_seed(family)
    hf = cls(config).eval()
    for p in hf.parameters():
        p.data.normal_(1 if p.dim() == 1 else 0, 0.3)
    ours = translated(hf, **extra, rope={"rope_type": "default", "rope_theta": float(config.rope_parameters["rope_theta"])})
    with torch.no_grad():
        want = hf(TOKENS[None]).logits[0]
    assert (ours(TOKENS, plain(ours), every=True) - want).abs().max() < 1e-4
    assert (dense_logits(ours, TOKENS.tolist(), causal(2, 2, 19)) - want).abs().max() < 1e-4, "the oracle of the laws"
    engine = Engine(ours, make("full"))
    engine.reset(19)
    assert (engine.extend(TOKENS) - want[-1]).abs().max() < 1e-4


def test_it_asks_once_a_layer_and_answers_for_the_last_token_or_for_all():
    model = tiny()
    attend = plain(model)
    last = model(TOKENS, attend)
    assert attend.calls == [0, 1, 2] and last.shape == (97,)
    every = model(TOKENS, plain(model), every=True)
    assert every.shape == (19, 97) and torch.allclose(every[-1], last, atol=1e-5)


def test_attend_is_asked_with_grouped_heads_before_rope():
    """Query head h reads KV head h // G, and no position has been applied yet: equal tokens give equal vectors."""
    model, shapes = tiny(n_heads=6, n_kv_heads=2), []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shapes.append((q.shape, k.shape, v.shape))
        if layer == 0:
            assert all(torch.allclose(x[..., :1, :], x, atol=1e-6) for x in (q, k, v))
            block = model.blocks[0]
            heads = block.attn.qkv(block.attn_norm(model.embed(torch.tensor([5])))).view(-1, 8)  # [6 + 2 + 2, D]
            assert torch.allclose(q[:, :, 0].flatten(0, 1), heads[:6], atol=1e-6)
            assert torch.allclose(k[:, 0], heads[6:8], atol=1e-6) and torch.allclose(v[:, 0], heads[8:], atol=1e-6)
        return torch.zeros_like(q)

    model(torch.tensor([5, 5, 5, 5]), attend)
    assert shapes == [((2, 3, 4, 8), (2, 4, 8), (2, 4, 8))] * 3


@pytest.mark.parametrize("rows", (1, 5, 18))
def test_a_long_text_passes_a_layer_in_blocks_of_rows(rows, monkeypatch):
    """It changes nothing, for no policy: what stays is chosen when the whole text is there."""
    for name in sorted(REGISTRY):
        whole, blocks = (Engine(tiny(), small(name, 14, window=3 if rows > 1 else 1, recent=1, heads="adaptive")) for _ in range(2))
        for engine, limit in ((whole, 1024), (blocks, rows)):
            monkeypatch.setattr(nanokv_model, "ROWS", limit)
            engine.reset(38, 5)
            engine.logits = torch.stack([engine.extend(TOKENS), engine.extend(TOKENS.flip(0))])
        assert (whole.logits - blocks.logits).abs().max() < 1e-5, name
        assert all(torch.equal(a.pos, b.pos) for a, b in zip(whole.slots, blocks.slots)), name


@pytest.mark.parametrize("dtype, word", [(torch.bfloat16, "avx512_bf16"), (torch.float16, "avx512_fp16")])
@pytest.mark.parametrize("bias", [True, False])
def test_a_long_text_is_multiplied_in_float32_where_the_processor_knows_nothing_shorter(dtype, word, bias, monkeypatch):
    layer = nanokv_model.Linear(24, 40, bias, dtype=dtype)
    x = torch.randn(FEW + 1, 24, dtype=dtype)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    own = F.linear(x, layer.weight, layer.bias)
    seen = []
    monkeypatch.setattr(nanokv_model.F, "linear", lambda x, w, b=None: seen.append(w.dtype) or torch._C._nn.linear(x, w, b))
    monkeypatch.setattr(processor, "features", lambda: set())
    assert (layer(x).double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max(), "rounded once"
    few = layer(x[:FEW])
    monkeypatch.setattr(processor, "features", lambda: {word})
    assert torch.equal(layer(x), own) and few.dtype == dtype
    assert seen == [torch.float32, dtype, dtype], "a wider matrix for the long text, none for a few rows or where it is not needed"
