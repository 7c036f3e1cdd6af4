"""Weights on their way to a device: the bytes that were on disk, and no second copy of them in memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepseek import SIZES, VARIANTS
from models import save_hf
from onegraph.formats.checkpoint import Checkpoint, write_checkpoint
from onegraph.formats.files import CheckpointError
from onegraph.models.config import LlamaConfig
from onegraph.models.deepseek_v4_config import DeepseekV4Config
from onegraph.models.loader import Loader
from onegraph.models.prefetch import BLOCK_BYTES, SLOTS_EACH, THREADS
from onegraph.models.stream import Stream

LAYERS, SIZE = 6, (1024, 8192)  # 16 MB each in bfloat16

# Loads to the device "meta", which keeps nothing: what grows is what loading itself holds.
PROGRAM = r"""
import re, sys
from pathlib import Path
import torch
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.stream import Stream

def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

stream = Stream(torch.device("meta"))
stream(torch.ones(8), torch.float32)
with Checkpoint.open(sys.argv[1]) as checkpoint:
    torch.aminmax(torch.ones(8, dtype=torch.bfloat16))
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is held now: importing torch held more
    before = peak()
    for i in range(int(sys.argv[2])):
        assert stream(checkpoint.tensor(f"{i}.weight"), torch.float32).dtype == torch.float32
        checkpoint.forget()
    print(peak() - before)
"""


def test_loading_holds_a_layer_and_not_the_model(tmp_path: Path) -> None:
    tensors = ((f"{i}.weight", torch.full(SIZE, float(i), dtype=torch.bfloat16)) for i in range(LAYERS))
    write_checkpoint(tmp_path / "model", {}, tensors, shard_bytes=64 << 20)
    run = [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), str(LAYERS)]
    grown = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    layer = 2 * SIZE[0] * SIZE[1]
    assert grown < 2.5 * layer + 2 * (16 << 20), f"{grown >> 20} MB for layers of {layer >> 20} MB"


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=pytest.mark.gpu), "cpu"])
@pytest.mark.parametrize("chunk_bytes", [4, 64, 4096])
def test_every_byte_arrives(device: str, chunk_bytes: int) -> None:
    stream = Stream(torch.device(device), chunk_bytes)
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(-(2**15), 2**15, (37, 19), generator=g).to(torch.int16)
    weight = torch.randn(19, 23, generator=g).bfloat16().t()
    for value, dtype in ((codes, None), (weight, torch.float32), (torch.tensor(2.5), torch.float32), (codes[:0], None)):
        got = stream(value, dtype)
        assert got.device == torch.device(device)
        assert got.cpu().equal(value.to(dtype or value.dtype))


# A DeepSeek-V4 of experts, loaded to the device "meta" likewise.
EXPERTS_PROGRAM = r"""
import re, sys
from pathlib import Path
import torch
from onegraph.formats.checkpoint import Checkpoint
from onegraph.models.deepseek_v4 import DeepseekV4

def peak():
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

with Checkpoint.open(sys.argv[1]) as checkpoint:
    model = DeepseekV4.load(checkpoint, "meta", torch.bfloat16, max_context=64)  # imports what it needs
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    model = DeepseekV4.load(checkpoint, "meta", torch.bfloat16, max_context=64)
    assert len(model.blocks) == checkpoint.config["num_hidden_layers"]
    print(peak() - before)
"""


def test_loading_holds_a_ring_of_blocks_and_not_a_layer(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "num_hash_layers": 0, "compress_ratios": [0], "n_routed_experts": 127}
    sizes |= {"hidden_size": 512, "moe_intermediate_size": 512}
    told = {"model_type": "deepseek_v4", **SIZES, **VARIANTS["flash"], **sizes}
    config = DeepseekV4Config.from_dict(told)
    empty = Loader(Checkpoint(tmp_path, {}, {}), config, torch.bfloat16)
    tensors = ((name, torch.zeros(shape, dtype=torch.bfloat16)) for name, (shape, _) in empty.expected().items())
    write_checkpoint(tmp_path / "model", told, tensors, shard_bytes=128 << 20)
    run = [sys.executable, "-c", EXPERTS_PROGRAM, str(tmp_path / "model")]
    grown = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    layer, ring = 128 * 3 * 512 * 512 * 2, THREADS * SLOTS_EACH * BLOCK_BYTES
    assert grown < ring + (24 << 20) < layer, f"{grown >> 20} MB for a layer of {layer >> 20} MB"


CODES = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e8m0fnu)


@pytest.mark.parametrize("found", CODES, ids=str)
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_never_become_numbers(found: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    """The fault elsewhere: bytes of E8M0 copied into a float parameter, 127 where 1 is meant, and no error."""
    codes = torch.tensor([1, 0, 1], dtype=torch.uint8).to(found)
    with pytest.raises(CheckpointError, match=r"'a\.scale' holds codes of .*; they are never taken"):
        Stream(torch.device("cpu"))(codes, wanted, "a.scale")
    save_hf("llama", tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        config, tensors = checkpoint.config, {name: checkpoint.tensor(name) for name in checkpoint.names}
    name = "model.layers.0.input_layernorm.weight"
    write_checkpoint(tmp_path / "codes", config, (tensors | {name: torch.ones(72).to(found)}).items())
    with Checkpoint.open(tmp_path / "codes") as checkpoint:
        loader = Loader(checkpoint, LlamaConfig.from_dict(config), wanted)
        for read in (loader.tensor, loader.float32):
            with pytest.raises(CheckpointError, match=r"layers\.0\.input_layernorm\.weight' holds codes of"):
                read(name, torch.device("cpu"))
        with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.input_layernorm\.weight' is .*, allowed is"):
            loader.check()


def test_integers_of_another_width_are_the_same_numbers() -> None:
    stream = Stream(torch.device("cpu"))
    assert stream(torch.tensor([1 << 20, 7]), torch.int32).tolist() == [1 << 20, 7]
    assert stream(torch.tensor([0.5]), torch.bfloat16).item() == 0.5
