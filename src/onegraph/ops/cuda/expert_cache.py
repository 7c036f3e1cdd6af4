"""Launches `expert_cache.cu`."""

from torch import Tensor, empty_like

from onegraph.ops.calls import DECAY, GAIN, MAX_FIELDS, ExpertCache
from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch

THREADS = 512
BLOCKS = 64  # that read host memory: half a megabyte under way, which PCIe needs. Copies within the GPU take all SMs
LISTS = "host", "slots", "shared", "bytes"

ARGUMENTS = build.Arguments(
    pointers=(
        *(f"{name}[{i}]" for name in LISTS for i in range(MAX_FIELDS)),
        "experts", "found", "resident", "score", "arrived",
    ),
    ints=("pairs", "count", "places"),
)  # fmt: skip
DEFINES = {"DECAY": DECAY, "GAIN": GAIN}
KERNEL = build.Source(
    "expert_cache",
    ops=("expert_cache",),
    functions=("expert_cache",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    example=DEFINES,
    sole=True,
)


def fetch(call: ExpertCache) -> Tensor:
    """See `onegraph.ops.expert_cache.expert_cache`."""
    found, count = empty_like(call.experts), len(call.score)
    if not found.numel():
        return found
    addresses = ([each.data_ptr() for each in some] for some in (call.host, call.slots, call.shared))
    lists = dict(zip(LISTS, (*addresses, [each.nbytes // count for each in call.host]), strict=True))
    fields = {
        f"{name}[{i}]": given[i] if i < len(given) else None for name, given in lists.items() for i in range(MAX_FIELDS)
    }
    sms, many = build.device(found.device.index).sms, found.numel() > len(call.resident)
    launch(
        KERNEL, DEFINES, Launch((sms if many else min(sms, BLOCKS), 1, 1), THREADS), **fields, experts=call.experts,
        found=found, resident=call.resident, score=call.score, arrived=call.arrived, pairs=found.numel(), count=count,
        places=len(call.resident),
    )  # fmt: skip
    return found
