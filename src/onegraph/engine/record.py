"""A measured row: where it was measured, by which command on which commit, and the name that documents cite.

Every line of `benchmarks/results` is such a row (`tests/test_figures.py`), and every script that measures prints them.
"""

import hashlib
import json
import math
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from onegraph import __version__
from onegraph.ops import family

Row = dict[str, Any]

# What an id says of its row, as far as the row has it.
SAID = (
    "{bench}", "{op}", "{run}", "{name}", "{cases}", "{way}", "{shape}", "{k}x{n}", "{dim}x{wide}", "{bits}b",
    "{layers}l", "{tokens}t", "{batch}x{context}", "{kv}", "{cache}", "{mode}",
)  # fmt: skip


def machine(device: torch.device | str) -> Row:
    """What every row carries: date, versions, device, the command that measured it, and the commit it ran on."""
    device = torch.device(device)
    row: Row = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "onegraph": __version__, "torch": torch.__version__}
    row |= {"python": platform.python_version(), "command": command_line(), "commit": commit()}
    if device.type != "cuda":
        return row | {"device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads"}
    import triton

    row |= {"device": torch.cuda.get_device_name(device), "triton": triton.__version__, "cuda": torch.version.cuda}
    query = "--query-gpu=driver_version", "--format=csv,noheader", f"--id={device.index or 0}"
    return row | {"driver": _said("nvidia-smi", *query)}


def command_line() -> str:
    """This process's command as a person would type it, without where its rows were written."""
    script, words, root = Path(sys.argv[0]).absolute(), sys.argv[1:], Path(__file__).parents[3]
    forced = f"{family.VARIABLE}={family.FORCED} " if family.FORCED else ""
    kept = [w for i, w in enumerate(words) if "--out" not in (w, words[i - 1] if i else "") and w[:6] != "--out="]
    if script.suffix != ".py":
        return forced + shlex.join([script.name, *kept])
    shown = script.relative_to(root) if root in script.parents else script
    return f"{forced}PYTHONPATH=src python3 " + shlex.join([str(shown), *kept])


@lru_cache(maxsize=1)
def commit() -> str:
    """The checkout's commit, with "-dirty" where files differ from it; outside of a checkout the package's version."""
    here = Path(__file__)
    tracked = _said("git", "-C", str(here.parent), "ls-files", here.name)
    made = _said("git", "-C", str(here.parent), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*")
    return made if tracked and made else __version__


def with_id(row: Row) -> Row:
    """The row with its `id` in front: what was measured, and four digits of the digest of everything it holds."""
    rest = {key: value for key, value in row.items() if key != "id"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:4]
    words = []
    for form in SAID:
        with suppress(KeyError):
            words.append(form.format_map(rest).removeprefix("onegraph "))
    return {"id": re.sub(r"[^a-z0-9.]+", "-", " ".join([*words, digest]).lower()), **rest}


def emit(row: Row, out: Path | None = None) -> None:
    """Prints the row with its id as a JSON line, and appends it to the file `out`. A figure that is not finite (a
    perplexity may overflow) is null: JSON has no infinity."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    line = json.dumps(with_id(plain), allow_nan=False)
    print(line, flush=True)
    if out:
        with out.open("a") as file:
            file.write(line + "\n")


def _said(*command: str) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
