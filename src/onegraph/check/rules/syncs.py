"""Calls that make the host wait, or ask, in the middle of the step."""

from onegraph.check.rules.base import NOT_PERMITTED, Origin, Rule, ways


class OpThatSyncs(Rule):
    """
    ## What it does
    Finds ops that read a device value in their own host code, such as the factorisations of `torch.linalg` that check
    their `info`.

    ## Why is this bad
    Nothing in the call shows it: the op waits for the device, and capture fails. Which ops do is measured on a GPU per
    torch version; the table is part of the package.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            return torch.linalg.inv(x)

        return step, lambda i: (torch.eye(3, device="cuda") * (i + 1),)
    ```

    ## Use instead
    The variant that leaves the check to the caller.
    ```python
    import torch


    def factory():
        def step(x):
            return torch.linalg.inv_ex(x).inverse

        return step, lambda i: (torch.eye(3, device="cuda") * (i + 1),)
    ```
    """

    hazards = (6,)
    happens = NOT_PERMITTED
    seen = ways("partly", "partly", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class ExplicitSynchronize(Rule):
    """
    ## What it does
    Finds `torch.cuda.synchronize()`, `stream.synchronize()` and `event.synchronize()` in the step.

    ## Why is this bad
    Waiting for a device whose work is only being recorded would never end; CUDA refuses and the capture is lost.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            y = x * 2
            torch.cuda.synchronize()
            return y

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Order work with streams and events; the caller synchronises after the replay.
    ```python
    import torch


    def factory():
        def step(x):
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (7,)
    happens = NOT_PERMITTED
    seen = ways("yes", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class QueryOrPinnedAllocation(Rule):
    """
    ## What it does
    Finds `event.query()`, `stream.query()`, `event.elapsed_time()` and pinned host memory allocated inside the step
    (`pin_memory()`, `pin_memory=True`).

    ## Why is this bad
    A query of captured work is not permitted. Allocating pinned memory may make the allocator query its events or
    register memory; torch 2.11 on an H200 was seen to bear it, so that alone is a warning.

    ## Example
    ```python
    import torch


    def factory():
        done = torch.cuda.Event()

        def step(x):
            y = x * 2
            done.record()
            done.query()
            return y

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Ask after the replay, outside the step; inside, order work with `wait_event`.
    ```python
    import torch


    def factory():
        def step(x):
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (8,)
    happens = NOT_PERMITTED
    seen = ways("yes", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)
