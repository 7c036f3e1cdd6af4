"""Checkpoints that only transformers runs, as earlier versions wrote them, load to the same bits: tests/fixtures/hf.

A file that is there is never written again. `python tests/integrations/hf/test_hf_forms.py FAMILY` (src, tests on the
path) writes one of a family of `test_hf_quantize.FAMILIES`, once.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_hf_quantize import load, made, source

from onegraph.formats.checkpoint import CARD
from onegraph.integrations.hf.experts import CodedStack
from onegraph.integrations.hf.modules import CodedLinear

FOLDER = Path(__file__).parents[2] / "fixtures" / "hf"
DECODED = "decoded.json"


def digests(model: Any) -> dict[str, str]:
    """Of each weight in codes, by its name, the SHA-256 of what they stand for in float32; of the others of itself."""
    found, coded = {}, []
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, CodedLinear):
                found[name] = module.plain(torch.float32).weight
            elif isinstance(module, CodedStack):
                found[name] = module.plain(torch.float32)
            else:
                continue
            coded.append(f"{name}.")
        others = {n: t.float() for n, t in model.named_parameters() if not n.startswith(tuple(coded))}
    return {
        name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in (found | others).items()
    }


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_a_file_decodes_to_the_same_bits(name: str) -> None:
    assert digests(load(FOLDER / name)) == json.loads((FOLDER / name / DECODED).read_text())


def write(family: str) -> None:
    out = FOLDER / f"e8p-1-{family.lower()}"
    if out.exists():
        raise SystemExit(f"{out}: is there already, and stands for the files that people have; give it a new name")
    with tempfile.TemporaryDirectory() as folder:
        source(family, Path(folder) / "model")
        made(Path(folder))
        FOLDER.mkdir(exist_ok=True)
        shutil.copytree(Path(folder) / "out", out)
    for file in (CARD, "tokenizer.json", "SHA256SUMS", "generation_config.json"):  # no part of the form
        (out / file).unlink(missing_ok=True)
    (out / DECODED).write_text(json.dumps(digests(load(out)), indent=1) + "\n")


if __name__ == "__main__":
    for family in sys.argv[1:]:
        write(family)
