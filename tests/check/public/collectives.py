import tempfile

import torch
import torch.distributed as dist


def plain():
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/init", rank=0, world_size=1)
    w = torch.eye(8, device="cuda")

    def step(x):
        y = x @ w
        dist.all_reduce(y)
        return y + 1

    return step, lambda i: (torch.full((2, 8), 1.0 + i, device="cuda"),)


def nccl():
    if not dist.is_initialized():
        dist.init_process_group("nccl", init_method=f"file://{tempfile.mkdtemp()}/init", rank=0, world_size=1)
    w = torch.eye(8, device="cuda")

    def step(x):
        y = x @ w
        dist.all_reduce(y, async_op=True)
        return y + 1

    return step, lambda i: (torch.full((2, 8), 1.0 + i, device="cuda"),)


def _nccl(step):
    if not dist.is_initialized():
        dist.init_process_group("nccl", init_method=f"file://{tempfile.mkdtemp()}/init", rank=0, world_size=1)
    return step, lambda i: (torch.full((2, 8), 1.0 + i, device="cuda"),)


def waited():
    w = torch.eye(8, device="cuda")

    def step(x):
        y = x @ w
        work = dist.all_reduce(y, async_op=True)
        z = x * 2
        work.wait()
        return y + z

    return _nccl(step)


def raced():
    w = torch.eye(8, device="cuda")

    def step(x):
        y = x @ w
        work = dist.all_reduce(y, async_op=True)
        z = y * 2  # read while the group's stream may still write it
        work.wait()
        return y + z

    return _nccl(step)


def late_group():
    made = {}
    calls = []

    def step(x):
        calls.append(1)
        if len(calls) == 1:  # the warm-up, which leaves the second group out
            return x + 1
        if "group" not in made:
            made["group"] = dist.new_group([0])
        dist.all_reduce(x, group=made["group"])
        return x + 1

    return _nccl(step)


def objects():
    def step(x):
        y = x + 1
        dist.barrier()
        found = [None]
        dist.all_gather_object(found, {"rows": 2})
        return y

    return _nccl(step)
