"""Launches `route.cu` for the few tokens of a decode step; the ops that it stands for run the rest."""

import torch
from torch import Tensor

from onegraph.ops.calls import NormedRoute
from onegraph.ops.cuda import build
from onegraph.ops.cuda.launcher import ALIGNMENT, TYPES, Launch, launch
from onegraph.ops.cuda.workspace import Counters

Result = tuple[Tensor, Tensor, Tensor, Tensor]
THREADS = 256
MAX_TOKENS, MAX_EXPERTS, MAX_HIDDEN = 4, 640, 8192
MAX_CHOSEN, MAX_GROUPS = 32, 32  # a lane each
MAX_ROWS = 4  # of the router, of a block
WORDS = Counters(MAX_TOKENS * (MAX_EXPERTS + 4), lasting=True)  # logits on their way, zeros between launches

ARGUMENTS = build.Arguments(
    pointers=(
        "x",
        "residual",
        "post",
        "norm",
        "gate",
        "bias",
        "scales",
        "total",
        "normed",
        "words",
        "experts",
        "weights",
    ),
    ints=("tokens", "norms"),
    floats=("eps", "factor"),
)
KERNEL = build.Source(
    "route",
    ops=("normed_route",),
    functions=("route",),
    arguments=ARGUMENTS,
    capabilities=build.PORTABLE,
    families=("hopper", "portable"),
    example={
        "TYPE": 2, "NORM": 0, "POST": 2, "GATE": 2, "ADD": 1, "HIDDEN": 4096, "EXPERTS": 512, "TOP_K": 10, "SHARED": 1,
        "GATED": 1, "ROWS": 4, "ONE": 0, "SIGMOID": 1, "NORMALISE": 1, "GROUPS": 8, "TOP_GROUPS": 4,
    },
    otherwise="norm, router and choice are launches of their own",
)  # fmt: skip


def supports(call: NormedRoute) -> bool:
    """Whether `route.cu` runs this call."""
    tokens, hidden = call.x.shape
    sizes = 0 < tokens <= MAX_TOKENS and hidden % 4 == 0 and hidden <= MAX_HIDDEN and call.count <= MAX_EXPERTS
    if call.top_groups < call.groups and call.groups > MAX_GROUPS:
        return False
    read = (call.x, call.residual, call.post, call.norm, call.gate)
    placed = all(t is None or (t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0) for t in read)
    return sizes and placed and call.top_k + call.shared <= MAX_CHOSEN


def pays(call: NormedRoute) -> bool:
    """Whether one launch is quicker than its parts, on an H200. One token, us: hidden size 2048 3.6 for 4.5, 4096 4.5
    for 7.6, 7168 6.5 for 9.5; but 2816 7.0 for 5.2 and 2880 4.2 for 3.6: threads have unlike numbers of columns."""
    return call.x.shape[1] % (4 * THREADS) == 0


def normed_route(call: NormedRoute) -> Result | None:
    """See `onegraph.ops.normed_route.normed_route`; None for what the kernel does not take, or takes too long for."""
    return compute(call) if pays(call) and supports(call) and KERNEL.is_built(call.x.device.index) else None


def compute(call: NormedRoute) -> Result:
    """`call`, which is supported."""
    x, (tokens, hidden), device = call.x, call.x.shape, call.x.device.index
    matrix, sigmoid = call.gate.shape[0], call.groups > 0
    rows = min(-(-matrix // build.device(device).sms), MAX_ROWS)
    total = x.new_empty(0 if call.residual is None else x.shape)
    normed = x.new_empty((call.norms, tokens, hidden))
    experts = torch.empty((tokens, call.top_k + call.shared), dtype=torch.int32, device=x.device)
    weights = torch.empty(experts.shape, dtype=torch.float32, device=x.device)
    defines = {
        "TYPE": TYPES[x.dtype], "NORM": TYPES[call.norm.dtype], "GATE": TYPES[call.gate.dtype],
        "POST": -1 if call.post is None else TYPES[call.post.dtype], "ADD": int(call.residual is not None),
        "HIDDEN": hidden, "EXPERTS": call.count, "TOP_K": call.top_k, "SHARED": int(call.shared),
        "GATED": int(call.gated), "ROWS": rows,
        "ONE": int(tokens == 1), "SIGMOID": int(sigmoid), "NORMALISE": int(call.normalise),
        "GROUPS": call.groups or 1, "TOP_GROUPS": call.top_groups if sigmoid else 1,
    }  # fmt: skip
    launch(
        KERNEL, defines, Launch((-(-matrix // rows), 1, 1), THREADS),
        x=x, residual=call.residual, post=call.post, norm=call.norm, gate=call.gate, bias=call.bias, scales=call.scales,
        total=total, normed=normed, words=WORDS.of(device), experts=experts, weights=weights, tokens=tokens,
        norms=call.norms, eps=call.eps, factor=call.factor,
    )  # fmt: skip
    return total, normed, experts, weights
