"""From the disk to the GPUs: DeepSeek-V4 in its published layout, random bytes, read by the real loader.

    python benchmarks/load.py --model flash --gb 40 --gpus 1 --dir /tmp/flash

Writes a directory with the names, dtypes and shapes of the published checkpoint, as many layers as `--gb` holds, unless
it is there already. Then prints JSON lines: what the disk gives to reads of the loader's blocks by as many threads
(direct, past the page cache; cold, through it; announced, with a hint before each; cached) and to the loader's own ring
without a device behind it (cold, cached); and the loader's seconds and gigabytes per second with a cold page cache
(`run` cold) and with what is left in it (warm), beside the largest memory of this process and its pinned bytes.
"""

import argparse
import gc
import json
import math
import mmap
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from deepseek import FLASH, PRO, YARN
from onegraph.engine.record import emit, machine
from onegraph.formats.checkpoint import Checkpoint
from onegraph.formats.table import DTYPES
from onegraph.models.deepseek_v4 import DeepseekV4
from onegraph.models.deepseek_v4_published import Table, nbytes, published
from onegraph.models.load import parse_config
from onegraph.models.loader import Loader
from onegraph.models.prefetch import BLOCK_BYTES, THREADS, Prefetch

TINY = {
    "vocab_size": 97, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 128,
    "qk_rope_head_dim": 16, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "num_hash_layers": 1, "moe_intermediate_size": 128, "sliding_window": 16,
    "index_n_heads": 16, "index_head_dim": 32, "index_topk": 8, "compress_ratios": [0, 4, 128, 4, 0],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"flash": FLASH, "pro": PRO, "tiny": TINY}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
POOL_BYTES = 64 << 20


def config_of(model: str, layers: int | None) -> dict[str, Any]:
    """config.json of the published checkpoint, of its first `layers` layers; without the draft layer."""
    config: dict[str, Any] = {
        "model_type": "deepseek_v4",
        "rope_scaling": YARN,
        "expert_dtype": "fp4",
        "quantization_config": FP8,
    }
    config |= MODELS[model]
    count = layers or config["num_hidden_layers"]
    ratios = config["compress_ratios"][:count]  # those behind are of draft layers
    return config | {"num_hidden_layers": count, "compress_ratios": ratios, "num_nextn_predict_layers": 0}


def fitting(model: str, gb: float | None) -> dict[str, Any]:
    """The config of as many layers as `gb` gigabytes hold, at least one."""
    config = config_of(model, None)
    while gb is not None and config["num_hidden_layers"] > 1 and nbytes(published(config)) > gb * 1e9:
        config = config_of(model, config["num_hidden_layers"] - 1)
    return config


# ------------------------------------------------------------------------------------------------------- the directory


def random_bytes(experts: int) -> dict[Any, torch.Tensor]:
    """A pool of valid bytes for each dtype of the layout."""
    g = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (POOL_BYTES,), generator=g, dtype=torch.uint8)

    codes = draw(0, 256)
    small = torch.randn(POOL_BYTES // 8, generator=g) * 0.02
    pools = {
        torch.int8: codes,
        torch.float8_e4m3fn: torch.where((codes & 0x7F) == 0x7F, codes ^ 1, codes),  # no NaN
        torch.float8_e8m0fnu: draw(118, 125),
        torch.bfloat16: small.bfloat16(),
        torch.float32: small,
        torch.int64: torch.randint(0, experts, (POOL_BYTES // 8,), generator=g),
    }
    return {dtype: pool.view(torch.uint8) for dtype, pool in pools.items()}


def shard_of(name: str, layers: int) -> int:
    """The embedding, a shard for each layer, the rest."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found[1]) + 1 if found else 0 if name.startswith("embed") else layers + 1


def write(path: Path, config: dict[str, Any]) -> None:
    """The checkpoint of that config; each shard by a thread, all of it flushed to the disk."""
    table, layers = published(config), config["num_hidden_layers"]
    pools = random_bytes(config.get("n_routed_experts", 256))
    shards: dict[int, Table] = {}
    for name in sorted(table):
        shards.setdefault(shard_of(name, layers), {})[name] = table[name]
    files = {at: f"model-{at + 1:05d}-of-{len(shards):05d}.safetensors" for at in shards}
    temporary = path.with_name(path.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda at: write_shard(temporary / files[at], shards[at], pools), shards))
    weight_map = {name: files[at] for at, names in shards.items() for name in names}
    index = {"metadata": {"total_size": nbytes(table)}, "weight_map": weight_map}
    (temporary / "model.safetensors.index.json").write_text(json.dumps(index))
    (temporary / "config.json").write_text(json.dumps(config))
    temporary.rename(path)


def write_shard(file: Path, table: Table, pools: dict[Any, torch.Tensor]) -> None:
    """In the order that safetensors writes: wide dtypes first, then by name."""
    names = sorted(table, key=lambda name: (-table[name][0].itemsize, name))
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name in names:
        dtype, shape = table[name]
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": KINDS[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for i, name in enumerate(names):
            first, last = header[name]["data_offsets"]
            for piece in pieces(pools[table[name][0]], last - first, i):
                stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())


def pieces(pool: torch.Tensor, size: int, turn: int) -> Iterator[memoryview]:
    """`size` bytes of the pool, from another place each turn."""
    view = pool.numpy().data
    at = turn * 8209 * 8 % len(view)
    while size:
        piece = view[at : at + size]
        yield piece
        size, at = size - len(piece), 0


# ------------------------------------------------------------------------------------------------------------ measuring


def drop_cache(path: Path) -> None:
    """The page cache forgets the files, as far as the system lets it."""
    for file in path.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(path: Path) -> float | None:
    """What of the files is in the page cache, 0 to 1, as `fincore` counts it; None where there is no such program."""
    from onegraph.engine.record import _said

    files = sorted(map(str, path.glob("*.safetensors")))
    said = _said("fincore", "--bytes", "--noheadings", "--output", "RES", *files)
    return None if said is None else sum(map(int, said.split())) / sum(Path(f).stat().st_size for f in files)


def disk(path: Path, limit: int, flags: int, before: Callable[[int, int, int], None] | None = None) -> float:
    """Bytes per second of reads of the loader's size by as many threads, of at most `limit` bytes in all."""
    found = [
        (file, at) for file in sorted(path.glob("*.safetensors")) for at in range(0, file.stat().st_size, BLOCK_BYTES)
    ][: max(1, limit // BLOCK_BYTES)]

    def read(blocks: list[tuple[Path, int]]) -> int:
        count = 0
        with mmap.mmap(-1, BLOCK_BYTES) as memory:  # aligned to a page, as O_DIRECT asks
            for file, at in blocks:
                descriptor = os.open(file, os.O_RDONLY | flags)
                try:
                    if before is not None:
                        before(descriptor, at, BLOCK_BYTES)
                    count += os.preadv(descriptor, [memory], at)
                finally:
                    os.close(descriptor)
        return count

    with ThreadPoolExecutor(THREADS) as threads:
        began = time.perf_counter()
        total = sum(threads.map(read, [found[i::THREADS] for i in range(THREADS)]))
        return total / (time.perf_counter() - began)


def host(path: Path) -> float:
    """Bytes per second that the loader's threads fill its ring with, for a device that takes no time."""
    with Checkpoint.open(path) as checkpoint:
        units = Loader(checkpoint, parse_config(checkpoint.config), torch.bfloat16).units
        began, meta = time.perf_counter(), torch.device("meta")
        ahead = Prefetch({name: checkpoint.info(name) for unit in units for name in unit}, units, pinned=False)
        try:
            for unit in units:
                for name in unit:
                    ahead.take(name, meta)
                ahead.drop()
        finally:
            ahead.close()
        return sum(checkpoint.info(name).nbytes for unit in units for name in unit) / (time.perf_counter() - began)


def peak_bytes() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def load(path: Path, devices: list[torch.device], context: int) -> dict[str, Any]:
    """One load, and what it took."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is held now
    gpu = devices[0].type == "cuda"
    held, began, read = peak_bytes(), time.perf_counter(), 0

    def progress(done: int, total: int) -> None:
        nonlocal read
        read = total

    with Checkpoint.open(path) as checkpoint:
        opened = time.perf_counter()
        model = DeepseekV4.load(checkpoint, devices, torch.bfloat16, max_context=context, progress=progress)
        for device in devices if gpu else ():
            torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    kept = sum(buffer.nbytes for buffer in model.buffers())
    row: dict[str, Any] = {
        "seconds": round(seconds, 3), "open_seconds": round(opened - began, 3), "gb": round(read / 1e9, 3),
        "gb_per_second": round(read / seconds / 1e9, 3), "model_gb": round(kept / 1e9, 3),
        "host_peak_mb": (peak_bytes() - held) >> 20,
    }  # fmt: skip
    if gpu:
        row["pinned_mb"] = torch.cuda.host_memory_stats()["allocated_bytes.peak"] >> 20
        row["gpu_peak_gb"] = [round(torch.cuda.max_memory_reserved(device) / 1e9, 2) for device in devices]
    del model
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="flash")
    parser.add_argument("--gb", type=float, help="at most; the whole model unless given")
    parser.add_argument("--dir", type=Path, required=True, help="made if it is not there")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=2, help="warm ones")
    parser.add_argument("--disk-gb", type=float, default=8.0, help="what the disk is measured with")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--keep", action="store_true", help="the directory, for the next time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = fitting(args.model, args.gb)
    began = time.perf_counter()
    if not args.dir.exists():
        write(args.dir, config)
        print(f"wrote {args.dir} in {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    devices = (
        [torch.device("cuda", i) for i in range(args.gpus)] if args.device == "cuda" else [torch.device(args.device)]
    )
    with Checkpoint.open(args.dir) as checkpoint:
        layers, tensors = checkpoint.config["num_hidden_layers"], len(checkpoint.names)
    about = {"bench": "load", "model": args.model, "layers": layers, "tensors": tensors, "gpus": len(devices)}
    about |= {"threads": THREADS, "cores": len(os.sched_getaffinity(0)), **machine(devices[0])}
    limit = int(args.disk_gb * 1e9)

    def announced(descriptor: int, at: int, size: int) -> None:
        os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_WILLNEED)

    ways: dict[str, Callable[[], float]] = {
        "direct": lambda: disk(args.dir, limit, os.O_DIRECT),
        "cold": lambda: disk(args.dir, limit, 0),
        "announced": lambda: disk(args.dir, limit, 0, announced),
        "ring": lambda: host(args.dir),
        "cached": lambda: disk(args.dir, min(limit, 4 << 30), 0),
        "ring_cached": lambda: host(args.dir),
    }
    rates: dict[str, float | None] = {}
    for way, measure in ways.items():
        if not way.endswith("cached"):
            drop_cache(args.dir)
        try:
            rates[way] = round(measure() / 1e9, 3)
        except OSError as error:  # tmpfs has no O_DIRECT
            rates[way] = None
            print(f"disk, {way}: {error}", file=sys.stderr)
    emit({**about, "run": "disk", "gb_per_second": rates}, args.out)
    drop_cache(args.dir)
    for run in ("cold", *["warm"] * args.runs):
        share = cached_share(args.dir)
        emit({**about, "run": run, "cached_share": share, **load(args.dir, devices, args.context)}, args.out)
    if not args.keep:
        shutil.rmtree(args.dir)


if __name__ == "__main__":
    main()
