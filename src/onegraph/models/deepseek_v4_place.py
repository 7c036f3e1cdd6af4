"""Which device holds which layers: contiguous runs, balanced by bytes; what does not fit is refused with the sums."""

from collections.abc import Sequence

from onegraph.models.memory import GB

RESERVE = 2 << 30  # bytes for graphs, workspaces and kernels


def place(layers: Sequence[int], ends: tuple[int, int], free: Sequence[int]) -> list[int]:
    """The number of layers on each device.

    Args:
        layers: bytes of each layer.
        ends: bytes that the first device holds besides (the embedding), and the last one (the head).
        free: bytes that each device can take.

    The largest share of a device's free memory is as small as contiguous runs allow, and every device gets a layer.
    Raises ValueError with the sums where nothing fits.
    """
    devices = len(free)
    if not 1 <= devices <= len(layers):
        raise ValueError(f"{devices} devices for {len(layers)} layers; give 1 to {len(layers)}")
    extra = [0] * devices
    extra[0] += ends[0]
    extra[-1] += ends[1]
    total = sum(layers) + sum(ends)
    low, high = 0.0, max(2.0, 2 * total / max(1, min(free)))
    best: list[int] | None = None
    for _ in range(50):
        share = (low + high) / 2
        found = _fill(layers, [share * f - e for f, e in zip(free, extra, strict=True)])
        best, low, high = (found, low, share) if found is not None else (best, share, high)
    if best is None or high > 1.0:
        have = " + ".join(f"{f / GB:.1f}" for f in free)
        raise ValueError(
            f"the model needs {total / GB:.1f} GB ({len(layers)} layers of up to {max(layers) / GB:.2f} GB, "
            f"embedding {ends[0] / GB:.2f}, head {ends[1] / GB:.2f}), the devices have {have} GB free: take "
            "more devices, or a smaller dtype"
        )
    return best


def _fill(layers: Sequence[int], room: Sequence[float]) -> list[int] | None:
    """Layers from the first device on, as many as fit and leave one for each device behind; None if some are left."""
    counts, at = [], 0
    for i, space in enumerate(room):
        behind, count = len(room) - 1 - i, 0
        while at < len(layers) - behind and layers[at] <= space:
            space -= layers[at]
            at, count = at + 1, count + 1
        if not count:
            return None
        counts.append(count)
    return counts if at == len(layers) else None
