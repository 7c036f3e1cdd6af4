"""Launches `expert_cache.cu`."""

from torch import Tensor, empty_like

from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import Launch, launch
from onegraph.ops.expert_cache import DECAY, GAIN, MAX_FIELDS, MOST_SCORE, MOST_TOKENS

THREADS = 512
LISTS = "host", "slots", "shared", "bytes"

ARGUMENTS = build.Arguments(
    pointers=(
        *(f"{name}[{i}]" for name in LISTS for i in range(MAX_FIELDS)),
        "experts", "found", "resident", "score", "arrived",
    ),
    ints=("pairs", "count", "places"),
)  # fmt: skip
DEFINES = {"DECAY": DECAY, "GAIN": GAIN, "MOST_TOKENS": MOST_TOKENS, "MOST_SCORE": MOST_SCORE}
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


def fetch(
    experts: Tensor, host: list[Tensor], slots: list[Tensor], shared: list[Tensor], resident: Tensor, score: Tensor,
    arrived: Tensor,
) -> Tensor:  # fmt: skip
    """See `onegraph.ops.expert_cache.expert_cache`."""
    found = empty_like(experts)
    if not experts.numel():
        return found
    count = len(score)
    addresses = ([each.data_ptr() for each in some] for some in (host, slots, shared))
    lists = dict(zip(LISTS, (*addresses, [each.nbytes // count for each in host]), strict=True))
    fields = {
        f"{name}[{i}]": given[i] if i < len(given) else None for name, given in lists.items() for i in range(MAX_FIELDS)
    }
    launch(
        KERNEL, DEFINES, Launch((build.device(experts.device.index).sms, 1, 1), THREADS), **fields, experts=experts,
        found=found, resident=resident, score=score, arrived=arrived, pairs=experts.numel(), count=count,
        places=len(resident),
    )  # fmt: skip
    return found
