"""From a name to a model and its tokenizer."""

from pathlib import Path

import pytest
from test_cli import write_checkpoint

from nanokv import headers, processor
from nanokv.loading import find, load


def test_a_path_will_do_for_a_name(tmp_path):
    model, tokenizer = load(write_checkpoint(tmp_path))
    assert model.config.name == str(tmp_path) and tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert find(Path("smollm2-135m"), read=False).config.name == "smollm2-135m"


def test_a_plan_needs_no_weights_not_even_their_file(tmp_path):
    (write_checkpoint(tmp_path) / "model.safetensors").unlink()
    source = find(tmp_path, read=False)
    assert source.config.n_layers == 3 and source.dtype == "float32"


@pytest.mark.parametrize("flags, dtype", [("fpu avx2", "float32"), ("avx512f avx512_bf16", "bfloat16"), ("asimd bf16", "bfloat16"), (None, "float32")])
def test_codes_are_unpacked_to_what_the_processor_is_best_at(flags, dtype, monkeypatch):
    """smollm2's file holds codes, which are of no dtype: with or without the file, the processor decides, and the user before it."""

    class Cpuinfo:
        def __init__(self, path):
            assert path == "/proc/cpuinfo"

        def read_text(self, **_):
            if flags is None:
                raise OSError
            return f"flags\t: {flags}\n"

    monkeypatch.setattr(processor, "Path", Cpuinfo)
    monkeypatch.setattr(processor, "features", processor.features.__wrapped__)  # asked anew, and not remembered
    assert find("smollm2-135m", device="cpu", read=False).dtype == dtype
    assert headers.own_dtype({"dtype": "auto"}, "cpu") == dtype and headers.own_dtype({"dtype": "auto"}, "cuda") == "float32"
    assert find("smollm2-135m", "float16", "cpu", read=False).dtype == "float16"
