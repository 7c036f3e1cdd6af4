"""Which kernels ops may run: `ONEGRAPH_KERNELS`, read once, when ops are imported.

    hopper      CUDA sources that need clusters or what else came with compute capability 9.0
    portable    CUDA sources for every card from 8.0 on; on a newer one as they are compiled for 8.0
    triton      none of the above
    reference   torch's own, op by op

Unset, an op runs the first of hopper, portable and triton that its GPU can have. Set, it runs the one that is named;
an op that has none of it runs Triton's kernel, or the reference; what GPUs hand each other has one kernel, which runs
whatever is set. `onegraph env` prints what that comes to.
"""

import os
from typing import Literal, get_args

Family = Literal["hopper", "portable", "triton", "reference"]
FAMILIES: tuple[Family, ...] = get_args(Family)
VARIABLE = "ONEGRAPH_KERNELS"


def _read(value: str | None) -> Family | None:
    """Raises ValueError for a family that there is not."""
    if not value:
        return None
    for family in FAMILIES:
        if value == family:
            return family
    raise ValueError(f"{VARIABLE} is {value!r}; allowed: {', '.join(FAMILIES)}, or unset for the best there is")


FORCED: Family | None = _read(os.environ.get(VARIABLE))


def allowed(family: Family) -> bool:
    """Whether a CUDA source of this family may run."""
    return FORCED in (None, family)
