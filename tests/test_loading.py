"""From a name to a model and its tokenizer."""

from pathlib import Path

from test_cli import write_checkpoint

from nanokv.loading import find, load


def test_a_path_will_do_for_a_name(tmp_path):
    model, tokenizer = load(write_checkpoint(tmp_path))
    assert model.config.name == str(tmp_path) and tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert find(Path("smollm2-135m"), read=False).config.name == "smollm2-135m"


def test_a_plan_needs_no_weights_not_even_their_file(tmp_path):
    (write_checkpoint(tmp_path) / "model.safetensors").unlink()
    source = find(tmp_path, read=False)
    assert source.config.n_layers == 3 and source.dtype == "float32"
