"""The engine against transformers: the same logits, and the same greedy ids, cached and uncached."""

import foreign
import pytest
import torch
import transformers

import nanokv.policies
from nanokv import make
from nanokv.checkpoint import load_model
from nanokv.engine import Engine
from nanokv.tokenizer import load_tokenizer


def greedy(model: transformers.PreTrainedModel, prompt: torch.Tensor, new: int, cached: bool) -> list[int]:
    """transformers' greedy ids, without an end."""
    out = model.generate(prompt[None], max_new_tokens=new, do_sample=False, use_cache=cached, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", foreign.MODELS)
def test_a_tiny_checkpoint(name, tmp_path):
    theirs, prompt = foreign.theirs(name), foreign.tokens(24)
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32)
    with torch.no_grad():
        expected = theirs(prompt[None]).logits[0]
    engine = Engine(model, make("full"))
    engine.reset(24, 1)
    assert (engine.extend(prompt) - expected[-1]).abs().max() < 1e-4  # uncached: in one piece
    engine.reset(24, 1)
    engine.extend(prompt[:4])
    for t in range(4, 24):  # cached: token by token
        assert (engine.decode(prompt[t : t + 1]) - expected[t]).abs().max() < 1e-4
    for cached in (True, False):
        assert list(engine.generate(prompt.tolist(), 20)) == greedy(theirs, prompt, 20, cached)


@pytest.mark.slow
def test_the_real_model(smollm2):
    text = (smollm2.parent.parent / "README.md").read_text() if (smollm2.parent.parent / "README.md").exists() else __doc__ * 80
    prompt = torch.tensor(load_tokenizer(smollm2).encode(text)[:512])
    assert len(prompt) == 512
    theirs = transformers.AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()
    model = load_model(smollm2, torch.float32)
    with torch.no_grad():
        expected = theirs(prompt[None]).logits[0]
        assert (foreign.logits(model, prompt) - expected).abs().max() < 1e-3
    engine = Engine(model, make("full"))
    engine.reset(512, 1)
    assert (engine.extend(prompt) - expected[-1]).abs().max() < 1e-3
    assert list(engine.generate(prompt.tolist(), 64)) == greedy(theirs, prompt, 64, True)
