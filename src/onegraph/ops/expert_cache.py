"""Which routed experts lie in GPU memory, decided on the device: experts that a step chose and that are not there are
copied from host memory, inside the step. `nn/expert_cache.py` runs it; docs/how-it-works/expert-cache.md has the why.

A layer has E experts in host memory and S slots on the device. The shape of a call alone decides which of two things
happens, so that a graph holds one of them:

    T * K <= S   every chosen expert gets a slot; the victims are the experts of the smallest score among those not
                 chosen. The result names slots.
    T * K > S    every chosen expert is copied to its own place in a stack of E that layers share; a missing one takes a
                 slot as well where its score is higher than the victim's. The result names experts.

The score is a decayed count of calls, in which the bit length of the number of tokens counts (`ops/calls.py`): one
token 1, a prompt's chunk 5 or so, whose padding chooses the same experts in each row.
"""

import torch
from torch import Tensor

from onegraph.ops.calls import DECAY, GAIN, MAX_EXPERTS, MAX_FIELDS, ExpertCache
from onegraph.ops.registry import Case, Op, nbytes, register


def _cache(call: ExpertCache) -> Tensor:
    experts, resident, score = call.experts, call.resident, call.score
    if not experts.numel():
        return torch.empty_like(experts)
    count, places, device = len(score), len(resident), experts.device
    chosen = experts.clamp(0, count - 1).long()
    tokens = torch.zeros(count, dtype=torch.int32, device=device)
    tokens.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int32))
    score.sub_(score >> DECAY).add_(tokens.float().frexp().exponent << GAIN)

    used, held = tokens > 0, resident.long()
    slot_of = torch.full_like(score, -1).scatter_(0, held, torch.arange(places, dtype=torch.int32, device=device))
    missing, spare = used & (slot_of < 0), ~used[held]
    wanted = torch.where(missing, score, -1).sort(descending=True, stable=True).indices[:places]
    victims = torch.where(spare, score[held], torch.iinfo(torch.int32).max).sort(stable=True).indices
    many = experts.numel() > places
    admitted = missing[wanted] & spare[victims]
    if many:
        admitted &= score[wanted] > score[held[victims]]
    resident.scatter_(0, victims, torch.where(admitted, wanted, held[victims]).int())
    for source, slot, stack in zip(call.host, call.slots, call.shared, strict=True):
        source = source.to(device)
        lead = (-1,) + (1,) * (source.dim() - 1)
        slot[victims] = torch.where(admitted.view(lead), source[wanted], slot[victims])
        if many:
            stack.copy_(torch.where(used.view(lead), source, stack))
    if many:
        return chosen.int()
    slot_of.scatter_(0, resident.long(), torch.arange(places, dtype=torch.int32, device=device))
    return slot_of[chosen]


def _check(call: ExpertCache) -> None:
    op, device, arrived = "expert_cache", call.experts.device, call.arrived
    for name, dims in (("experts", 2), ("resident", 1), ("score", 1)):
        tensor = getattr(call, name)
        if tensor.dtype != torch.int32 or tensor.dim() != dims or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} {tuple(tensor.shape)}; it must be a contiguous int32 of {dims} "
                "dimensions"
            )
    if arrived.dtype != torch.int32 or arrived.numel() != 1:
        raise ValueError(f"{op}: arrived is {arrived.dtype} {tuple(arrived.shape)}; it must be int32 [1], zero")
    if not 1 <= len(call.resident) <= len(call.score) <= MAX_EXPERTS:
        raise ValueError(
            f"{op}: {len(call.resident)} slots for {len(call.score)} experts; allowed are 1 slot to one each, and "
            f"{MAX_EXPERTS} experts"
        )
    if not 1 <= len(call.host) == len(call.slots) == len(call.shared) <= MAX_FIELDS:
        raise ValueError(
            f"{op}: {len(call.host)} tensors on the host, {len(call.slots)} of slots and {len(call.shared)} shared; "
            f"give as many of each, 1 to {MAX_FIELDS}"
        )
    rows = {"host": len(call.score), "slots": len(call.resident), "shared": len(call.score)}
    for i, like in enumerate(call.host):
        for name, count in rows.items():
            tensor, shape = getattr(call, name)[i], (count, *like.shape[1:])
            if tensor.dtype != like.dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{op}: {name}[{i}] is {tensor.dtype} {tuple(tensor.shape)}; it must be a contiguous {like.dtype} "
                    f"{shape}"
                )
            if tensor.device != device and not (name == "host" and tensor.device.type == "cpu" and tensor.is_pinned()):
                cure = "move it there" if name != "host" else "move it there, or pin its memory"
                raise ValueError(f"{op}: {name}[{i}] is on {tensor.device}, the input on {device}; {cure}")


def _case(tokens: int, top_k: int, experts: int, slots: int, *, used_before: bool = False) -> Case:
    """used_before: slots hold other experts than the first ones, and scores differ."""

    def make(device: torch.device, dtype: torch.dtype, g: torch.Generator) -> tuple[object, ...]:
        chosen = torch.rand(tokens, experts, generator=g).argsort(1)[:, :top_k].int().to(device)
        host = [
            torch.randint(-(2**15), 2**15, (experts, 24, 40), generator=g, dtype=torch.int16),
            torch.randn(experts, 24, generator=g),
            torch.randint(0, 256, (experts, 5), generator=g, dtype=torch.uint8),  # no multiple of 16 bytes
        ]
        inside = torch.randperm(experts, generator=g)[:slots] if used_before else torch.arange(slots)
        high = 4 << GAIN if used_before else 1
        score = torch.randint(0, high, (experts,), generator=g, dtype=torch.int32)
        cached, shared = [one[inside].to(device) for one in host], [torch.zeros_like(one).to(device) for one in host]
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        given = [one.to(device) for one in host]
        return chosen.contiguous(), given, cached, shared, inside.int().to(device), score.to(device), arrived

    name = f"{tokens} tokens, {top_k} of {experts}, {slots} slots"
    return Case(name=name + (" used before" if used_before else ""), make=make)


def _bytes(call: ExpertCache) -> int:
    """At most: where no chosen expert has a slot."""
    count = len(call.score)
    return 2 * nbytes(call.experts) + 2 * min(call.experts.numel(), count) * (nbytes(*call.host) // count)


expert_cache = register(
    Op(
        name="expert_cache",
        call=ExpertCache,
        schema="-> Tensor",
        reference=_cache,
        fake=lambda call: torch.empty_like(call.experts),
        kernel="onegraph.ops.cuda.expert_cache:fetch",
        sole=True,  # torch's ops on a GPU do not read host memory
        check=_check,
        cases=(
            _case(1, 4, 16, 8),
            _case(1, 4, 16, 8, used_before=True),
            _case(2, 3, 12, 6, used_before=True),  # all slots are needed
            _case(3, 2, 5, 5),  # too many pairs, and everything has a slot
            _case(5, 4, 40, 12, used_before=True),
            _case(64, 8, 128, 32, used_before=True),
            _case(0, 2, 8, 4),
            _case(1, 8, 512, 300, used_before=True),
        ),
        tolerance={torch.float32: 0.0},
        bytes_moved=_bytes,
        flops=lambda call: 0,
    )
)
"""experts int32 [T, K] that a router chose, host: a layer's weights, tensors [E, ...] in pinned host memory or on the
device -> int32 [T, K]: where each of them lies, in `slots` if T * K <= S, else in `shared`.

slots: tensors [S, ...] as those of `host`, of which slot s holds expert `resident` [s]; shared: [E, ...]. resident
int32 [S], all different; score int32 [E], from 0; arrived int32 [1], 0: all written. A number of an expert outside of 0
to E - 1 is the nearest one. The same inputs give the same slots. Raises ValueError for other shapes and devices.
"""
