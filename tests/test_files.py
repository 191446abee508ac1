"""Whatever stands in a model's files: it runs, or one sentence says which file and which key is wrong."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import write_checkpoint
from test_tokenizer import MERGES, SPECIAL, TOKENS

from nanokv.config import read_config
from nanokv.files import checked, typed, typed_list
from nanokv.gguf_file import GGUF
from nanokv.gguf_vocabulary import adds_bos, gguf_vocabulary
from nanokv.headers import own_dtype
from nanokv.loading import find
from nanokv.rope import frequencies

WRONG = [None, "text", "", [], [1], [None], {}, {"a": 1}, 2.5, -1, 0, 7, True, False, 10**400, math.nan, math.inf, 2**40]
SHORT = [value for value in WRONG if value != 10**400]  # a GGUF's numbers have 64 bits
NESTED = {"type": "yarn", "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32,
          "beta_slow": 1, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0,
          "rope_theta": 1e4, "truncate": True}  # fmt: skip
CONFIG = ["model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
          "intermediate_size", "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
          "torch_dtype", "quantization_config", "architectures", "layer_types", "sliding_window", "hidden_act", "attention_bias",
          "mlp_bias", "tie_word_embeddings", "partial_rotary_factor", "use_sliding_window", "max_window_layers"]  # fmt: skip
TOKENIZER = ["bos_token", "eos_token", "add_bos_token", "chat_template", "added_tokens_decoder"]


def outcome(read: Callable[[], object], where: str = "") -> str | None:
    """What reading says to a value that it refuses; None if it takes it."""
    try:
        read()
    except (ValueError, OSError) as error:
        assert where in str(error) and len(str(error)) < 400, error
        return str(error)


def refused(file: Path, key: str, read: Callable[[], object], given: dict) -> int:
    """Try every wrong value of a key in a JSON file -> how many were refused."""
    said = []
    for value in WRONG:
        file.write_text(json.dumps(given | {key: value}))
        said.append(outcome(read, str(file.parent)))
    file.write_text(json.dumps(given))
    return sum(s is not None for s in said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"))


def understood(config: dict) -> None:
    """Read a config; its angles must be numbers."""
    shape = read_config(config)
    own_dtype(config, "cpu")
    freqs, scale = frequencies(shape.rope, shape.head_dim, shape.max_context)
    assert freqs.isfinite().all() and math.isfinite(scale), config


def test_every_key_of_config_json(folder):
    given = json.loads((folder / "config.json").read_text())
    for key in CONFIG:
        said = [outcome(lambda: understood(given | {key: value})) for value in WRONG]
        if key not in ("use_sliding_window", "max_window_layers", "hidden_act"):  # nobody asks for these here
            assert sum(s is not None for s in said) >= 5, key
    for rule in ("llama3", "yarn"):
        for key in NESTED:
            for value in WRONG:
                outcome(lambda: understood(given | {"rope_scaling": NESTED | {"type": None, "rope_type": rule, key: value}}))


def test_a_wrong_config_is_called_by_its_file(folder):
    find_it = lambda: find(str(folder)).tokenizer()  # noqa: E731
    given = json.loads((folder / "config.json").read_text())
    for key in ("hidden_size", "eos_token_id", "rms_norm_eps"):
        assert refused(folder / "config.json", key, find_it, given) >= 5


THETAS = [{"rope_theta": theta} for theta in (0, -1e4, math.inf, "10000")]
FACTORS = [{"rope_scaling": {"type": "linear", "factor": factor}} for factor in (-2, 0)]


@pytest.mark.parametrize("rope", THETAS + FACTORS)
def test_angles_that_cannot_be_are_refused(folder, rope):
    given = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match="must be a number above"):
        read_config(given | rope)


def test_every_key_of_the_other_json_files(folder):
    read = lambda: find(str(folder), "float32").tokenizer()  # noqa: E731
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for key in TOKENIZER:
        assert refused(folder / "tokenizer_config.json", key, read, settings) >= 5, key
        assert refused(folder / "special_tokens_map.json", key, read, {}) >= 5, key
    assert refused(folder / "generation_config.json", "eos_token_id", read, {}) >= 5
    index = folder / "model.safetensors.index.json"
    assert refused(index, "weight_map", read, {}) >= 5
    for value in WRONG:
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": value}}))
        assert outcome(read, str(folder)), value
    index.unlink()


def test_every_key_of_a_gguf():
    metadata = {"general.architecture": "llama", "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
                "llama.embedding_length": 32, "llama.attention.key_length": 8, "llama.block_count": 2, "llama.feed_forward_length": 48,
                "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.context_length": 64}  # fmt: skip
    more = {"split.count": 1, "llama.expert_count": 0, "llama.attention.sliding_window": 0, "llama.rope.freq_base": 1e4,
            "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 16,
            "llama.rope.scaling.yarn_beta_fast": 32.0, "llama.rope.scaling.attn_factor": 1.0}  # fmt: skip
    file = GGUF.__new__(GGUF)
    file.path, file.shapes, file._tensors = Path("m.gguf"), {"model.embed_tokens.weight": (97, 32)}, {}
    for key in metadata | more:
        said = []
        for value in SHORT:
            file.metadata = metadata | more | {key: value}
            said.append(outcome(lambda: understood(file.config())))
        assert sum(s is not None for s in said) >= 5, key


def test_every_key_of_a_gguf_vocabulary():
    tokens = TOKENS + SPECIAL
    tables = {"tokens": tokens, "merges": MERGES, "scores": [0.0] * len(tokens), "token_type": [1] * len(TOKENS) + [3] * len(SPECIAL)}
    for kind, pre in (("gpt2", "gpt-2"), ("llama", "default")):
        given = tables | {"model": kind, "pre": pre, "add_bos_token": True, "add_space_prefix": True}
        whole = {f"tokenizer.ggml.{name}": value for name, value in given.items()}
        for key in whole:
            for value in SHORT:
                metadata = whole | {key: value}
                outcome(lambda: (gguf_vocabulary(metadata), adds_bos(metadata)))


def test_kinds():
    assert typed({"a": None}, "a", int, 3) == typed({}, "a", int, 3) == 3
    assert typed({"a": 2}, "a", float) == 2 and typed_list({"a": [1, 2]}, "a", int) == [1, 2]
    for value, kind in ((True, int), (1, bool), (2.0, int), (math.nan, float), (10**400, str), ([1], dict)):
        with pytest.raises(ValueError, match="^x must be .*, not .{1,60}$"):
            checked("x", value, kind)
    with pytest.raises(ValueError, match="every entry of a must be a text, not None"):
        typed_list({"a": ["b", None]}, "a", str)
