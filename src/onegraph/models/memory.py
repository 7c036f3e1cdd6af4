"""Whether a model and its cache fit into a GPU's memory, told before either is made."""

import torch

from onegraph.models.loader import Loader

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


def check_weights(loader: Loader, device: torch.device, ranks: int = 1) -> None:
    """Raises ValueError with the sums where the weights, or a rank's share of them, do not fit.

    What is read becomes the model, so that besides there is a layer at most, whose parts are joined, and what the file
    has in a wider dtype.
    """
    weights = sum(loader.device_bytes().values()) // ranks
    wider = max(0, sum(loader.unit_bytes) // ranks - weights)
    beside = max(loader.unit_bytes, default=0) // ranks + min(loader.landing_bytes, wider)
    if weights + beside > (free := free_memory(device)):
        raise ValueError(
            f"the weights take {weights / GB:.2f} GB on {device}, and {beside / GB:.2f} more while they are "
            f"read; {free / GB:.2f} GB are free there: take fewer bits (embedding and head can be quantized too), or "
            "more GPUs"
        )


def check_cache(needed: int, device: torch.device, *, rows: int, tokens: int, exact: bool) -> None:
    """Raises ValueError with the sums where a cache of `needed` bytes does not fit.

    rows: of a batch. tokens: that its pages hold. exact: whether it is in the model's dtype.
    """
    if needed > (free := free_memory(device)):
        size = f"{rows} rows, {tokens} tokens of {needed / tokens / 1e3:.1f} kB"
        codes = ", or keep it in codes (kv 'turboquant:4')" if exact else ""
        raise ValueError(
            f"the cache takes {needed / GB:.2f} GB on {device} ({size}); {free / GB:.2f} GB are free there: take fewer "
            f"or shorter rows (max_batch, max_context, cache_tokens){codes}"
        )
