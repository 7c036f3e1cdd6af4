"""Whether a model and its cache fit into memory, told before either is made, and what of a GPU's buys time."""

import resource
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch

from onegraph.models.loader import Loader
from onegraph.ops import family
from onegraph.ops.ahead import Ahead

GB = 1e9


def free_memory(device: torch.device, reserve: int = 0) -> int:
    """Bytes that this process may still take on the device, less `reserve` for what else it needs; no bound on a CPU.

    What torch holds and nobody uses counts as free; a bound set by `torch.cuda.set_per_process_memory_fraction` counts.
    """
    if device.type != "cuda":
        return 1 << 50
    at = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(at)
    used, held = torch.cuda.memory_allocated(at), torch.cuda.memory_reserved(at)
    allowed = int(torch.cuda.get_per_process_memory_fraction(at) * total)
    return max(0, min(free + held - used, allowed - used) - reserve)


def gpu_memory(device: torch.device) -> int:
    """Bytes of memory that the GPU has, whoever uses them."""
    return torch.cuda.mem_get_info(device)[1]


def free_cache_memory(device: torch.device, reserve: int = 0) -> int:
    """As `free_memory`; on a CPU what the system has. Linux grants more, and its OOM killer then ends the process."""
    if device.type == "cpu" and (free := system_memory()) is not None:
        return free
    return free_memory(device, reserve)


def system_memory() -> int | None:
    """Bytes of the machine's memory that this process may still take; None where the system does not say."""
    found = []
    status = _table(Path("/proc/self/status"))
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY and used in status:
            found.append(soft - 1024 * status[used])
    if (free := _table(Path("/proc/meminfo")).get("MemAvailable")) is not None:
        found.append(1024 * free)
    group = Path("/sys/fs/cgroup")
    try:  # a container's limit; its page cache can be taken back
        limit_of, used_now = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        found.append(limit_of - used_now + _table(group / "memory.stat").get("inactive_file", 0))
    except (OSError, ValueError):
        pass  # no such group, or "max"
    return max(0, min(found)) if found else None


def resident() -> int:
    """Bytes of memory that this process takes now: Python, torch, and what they loaded; 0 where the system does not
    say."""
    return 1024 * _table(Path("/proc/self/status")).get("VmRSS", 0)


def _table(file: Path) -> dict[str, int]:
    """Lines "name: number" of a file that the kernel writes."""
    try:
        lines = [line.replace(":", " ").split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def check_weights(loader: Loader, device: torch.device, ranks: int = 1) -> None:
    """Raises ValueError with the sums where the weights, or a rank's share of them, do not fit.

    What is read becomes the model, so that besides there is a layer at most, whose parts are joined, what the file has
    in a wider dtype, and a linear in float32 where some are decoded.
    """
    weights = loader.weight_bytes // ranks
    experts = loader.expert_memory
    elsewhere = 0 if experts is None else experts.device_bytes  # read into host memory, and in no unit
    wider = max(0, sum(loader.unit_bytes) // ranks - (weights - elsewhere))
    sizes = (n * k for layer, (n, k, _) in loader.layers().items() if layer in loader.decoded)
    beside = max(loader.unit_bytes, default=0) // ranks + min(loader.landing_bytes, wider) + 4 * max(sizes, default=0)
    if weights + beside > (free := free_memory(device)):
        raise ValueError(
            f"the weights take {weights / GB:.2f} GB on {device}, and {beside / GB:.2f} more while they are "
            f"read; {free / GB:.2f} GB are free there: take fewer bits (embedding and head can be quantized too), or "
            "more GPUs"
        )


def simulated(device: torch.device) -> bool:
    """Whether `onegraph check` plays this GPU, for which nothing can be built."""
    return type(torch.empty(0, device=device)) is not torch.Tensor


def decode_unread(loader: Loader, device: torch.device, ranks: int = 1, ahead: Ahead | None = None) -> list[str]:
    """Have linears in codes made dense that no kernel of this GPU reads, if memory allows; warns of either in a line.

    A call of theirs runs Triton's kernel or decodes the whole weight, which takes longer than the dense weight would.
    Nothing is done where a family of kernels is asked for (`ops/family.py`).

    ahead: compiles kernels while weights are read, and expects that they can be had: ask `kernels_as_expected` then.
    Returns the linears that no kernel reads.
    """
    if not _has_kernels(device):
        return []
    with nullcontext() if ahead is None else ahead.expected():
        unread = loader.unread(device)
    if unread:
        _decode(loader, device, ranks, unread)
    return unread


def kernels_as_expected(loader: Loader, device: torch.device, ahead: Ahead, unread: list[str]) -> bool:
    """Whether `decode_unread`, which has found `unread`, finds the same once the kernels are compiled."""
    if not _has_kernels(device):
        return True
    with ahead.active(()):
        return loader.unread(device) == unread


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and not family.FORCED and not simulated(device)


def _decode(loader: Loader, device: torch.device, ranks: int, unread: list[str]) -> None:
    """See `decode_unread`."""
    coded = loader.device_bytes()
    loader.decoded = frozenset(unread)
    dense = loader.device_bytes()
    more, dtype = sum(dense[layer] - coded[layer] for layer in unread) / ranks, str(loader.dtype).removeprefix("torch.")
    n, k, _ = loader.layers()[unread[0]]
    which = f"{unread[0]} ({n} x {k}, {loader.format_of(unread[0])})" + (
        f" and {len(unread) - 1} others" if unread[1:] else ""
    )
    says = f"no kernel of {device} multiplies by the codes of {which} in {dtype}: "
    try:
        check_weights(loader, device, ranks)
    except ValueError:
        loader.decoded = frozenset()
        says += f"slower than unquantized, and {more / GB:.2f} GB to decode them are not free"
    else:
        says += f"decoded at load, which takes {more / GB:.2f} GB more"
    hint = "" if loader.dtype in (torch.bfloat16, torch.float16) else "; bfloat16 and float16 have kernels"
    warnings.warn(says + hint, stacklevel=4)


def check_cache(needed: int, device: torch.device, *, rows: int, tokens: int, exact: bool) -> None:
    """Raises ValueError with the sums where a cache of `needed` bytes does not fit.

    rows: of a batch. tokens: that its pages hold. exact: whether it is in the model's dtype.
    """
    if needed > (free := free_cache_memory(device)):
        size = f"{rows} sequences, {tokens} tokens of {needed / tokens / 1e3:.1f} kB"
        codes = ", or quantize it (kv_cache_dtype 'turboquant:4')" if exact else ""
        raise ValueError(
            f"the cache takes {needed / GB:.2f} GB on {device} ({size}); {free / GB:.2f} GB are free there: take fewer "
            f"or shorter sequences (max_num_seqs, max_model_len, kv_cache_tokens, gpu_memory_utilization){codes}"
        )
