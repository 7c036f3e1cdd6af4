"""Where a model is: a path on this machine, or a name on the Hugging Face hub that is fetched once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from onegraph.engine.arguments import require_path
from onegraph.formats.checkpoint import CARD, SIDECARS, unfinished
from onegraph.formats.extras import install
from onegraph.formats.files import CheckpointError, reason

NAME = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?", re.ASCII)
CONFIGS = ["config.json", "hf_quant_config.json", "model.safetensors.index.json"]
# What a checkpoint is read from; never pickles, and no code.
PATTERNS = [*CONFIGS, "model*.safetensors", *SIDECARS, CARD]
DATASET_BYTES = 32 << 20  # of a dataset; files that would exceed it are not fetched
NO_ANSWER = "ConnectError", "ConnectTimeout", "ProxyError", "ReadTimeout"  # of httpx


@dataclass(frozen=True)
class Located:
    """A model on this machine: `path` is where, `name` what it is called: the path that was given, or org/name@commit
    of the hub."""

    path: Path
    name: str


def locate(model: str | os.PathLike[str], *, weights: bool = True, option: str = "model") -> Located:
    """The model at a path, or by its name on the hub: org/name, or org/name@revision.

    A name is fetched into the hub's cache: safetensors, tokenizer and configs only, at one commit, which is asked for
    once in a process; what is there already stays. HF_HUB_OFFLINE is honoured. A directory without config.json that
    holds just one .gguf file is that file. A name whose first part is a directory here is a path, unless it has a
    revision. `weights` False fetches no more than it takes to know the model's size; `option` is what an error calls
    `model`.

    Raises ValueError for what is no path and no name, CheckpointError where it is neither here nor can be fetched, and
    says how to.
    """
    require_path(option, model, "a directory, a .gguf file, or a name on the Hugging Face hub (org/name)")
    path = Path(model)
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise CheckpointError(f"{path}: holds {len(files)} .gguf files and no config.json; name the file")
        return Located(files[0] if files else path, str(model))
    named = NAME.fullmatch(str(model)) if isinstance(model, str) else None
    if named is None or os.path.lexists(path) or named["repo"].endswith(".gguf") or unfinished(path).is_dir():
        return Located(path, str(model))
    if path.parent.is_dir() and not named["revision"]:
        raise CheckpointError(
            f"{model}: no such file or directory, and not looked up on the Hugging Face hub, because {path.parent} is "
            f"a directory here; for the hub's give {model}@main"
        )
    return _fetch(named["repo"], named["revision"], weights)


def dataset(name: str) -> list[Path]:
    """Files of texts of a dataset on the hub, org/name or org/name@revision: .jsonl, .txt and .md in the order of their
    names, of at most `DATASET_BYTES` together; a file that would exceed them is left out. Raises CheckpointError where
    there are none, none fits, or they cannot be fetched."""
    named = NAME.fullmatch(name)
    if named is None:
        raise CheckpointError(f"hub:{name}: is no name of a dataset; give hub:ORG/NAME or hub:ORG/NAME@REVISION")
    repo, revision = named["repo"], named["revision"]
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError:
        raise CheckpointError(
            f"hub:{name}: datasets of the Hugging Face hub need huggingface_hub, which is not installed; "
            f"{install('hub')}; or give the path of a file"
        ) from None
    found: list[Path] = []
    try:
        listed = HfApi().dataset_info(repo, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size for each in listed.siblings or []}
        files = sorted(each for each in sizes if each.endswith((".jsonl", ".txt", ".md")) and each != CARD)
        left = DATASET_BYTES
        for file in files:
            if (size := sizes[file]) is not None and size <= left:
                left -= size
                found.append(Path(hf_hub_download(repo, file, repo_type="dataset", revision=listed.sha)))
    except MemoryError:
        raise
    except Exception as error:  # as in `_fetch`
        raise CheckpointError(
            f"hub:{name}: cannot be fetched from the Hugging Face hub: {_why(error)}; where there is a network: "
            f"hf download --repo-type dataset {repo} --local-dir DIR, then give DIR"
        ) from None
    if not found and files:
        raise CheckpointError(
            f"hub:{name}: each of its {len(files)} files of text has more than {DATASET_BYTES} bytes; fetch one (hf "
            f"download --repo-type dataset {repo} {files[0]} --local-dir DIR), and give a part of it"
        )
    if not found:
        raise CheckpointError(
            f"hub:{name}: the dataset has no .jsonl, .txt or .md file; convert it to JSON lines of "
            '{"text": ...} or {"messages": [...]} and give the file'
        )
    return found


@cache
def _fetch(repo: str, revision: str | None, weights: bool) -> Located:
    told = f"{repo}{f' --revision {revision}' if revision else ''}"
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{repo}: no such file or directory, and names of the Hugging Face hub need huggingface_hub, which is not "
            f"installed; {install('hub')}; or fetch it by hand (hf download {told} --local-dir DIR) and give DIR"
        ) from None
    try:
        # The snapshot's directory is called after the commit that the revision stands for now.
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=PATTERNS if weights else CONFIGS))
    except MemoryError:
        raise
    except Exception as error:  # those of httpx have no base that could be named without importing it
        what = f"revision {revision} of it" if revision else "it"
        raise CheckpointError(
            f"{repo}: no such file or directory here, and {what} cannot be fetched from the Hugging Face hub: "
            f"{_why(error)}; where there is a network: hf download {told} --local-dir DIR, then give DIR"
        ) from None
    if not (path / "config.json").exists():
        raise CheckpointError(f"{repo}: the hub's repository has no config.json, so it is no model that can be read")
    return Located(path, f"{repo}@{path.name}")


def _why(error: Exception) -> str:
    """Why the hub gave nothing."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and it is not in the cache"
    # No answer and nothing in the cache; a connection through a proxy fails by itself.
    if isinstance(error, LocalEntryNotFoundError) or type(error).__name__ in NO_ANSWER:
        return "the hub cannot be reached"
    return f"{type(error).__name__}: {reason(error)[:200]}"
