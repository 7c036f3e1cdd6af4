"""Shapes that depend on data, or that change from step to step."""

from onegraph.check.rules.base import NOT_PERMITTED, SILENT, Origin, Rule, ways


class DataDependentShape(Rule):
    """
    ## What it does
    Finds ops whose result's shape depends on values: `nonzero`, a boolean mask as index, `masked_select`, `unique`,
    one-argument `where`, `bincount`, `repeat_interleave` with a tensor of repeats and no `output_size`.

    ## Why is this bad
    The host must read the count to allocate the result, so it waits for the device, and capture fails. A graph has
    fixed shapes in any case.

    ## Example
    ```python
    import torch


    def factory():
        def step(experts):
            return torch.bincount(experts, minlength=4)

        return step, lambda i: (torch.tensor([0, 1, i % 4, 3], device="cuda"),)
    ```

    ## Use instead
    An op of fixed shape.
    ```python
    import torch


    def factory():
        counts = torch.zeros(4, dtype=torch.int64, device="cuda")
        one = torch.ones(4, dtype=torch.int64, device="cuda")

        def step(experts):
            return counts.zero_().scatter_add_(0, experts, one)

        return step, lambda i: (torch.tensor([0, 1, i % 4, 3], device="cuda"),)
    ```
    """

    hazards = (5,)
    happens = NOT_PERMITTED
    seen = ways("partly", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class ChangingShape(Rule):
    """
    ## What it does
    Finds shapes that change from step to step, first of all a cache that grows with `torch.cat`.

    ## Why is this bad
    A graph replays the shapes of the captured step. The cache of the replays never grows: every step attends to the
    same prefix, without an error.

    ## Example
    ```python
    import torch


    class Cache:
        def __init__(self):
            self.keys = torch.zeros(1, 8, device="cuda")

        def step(self, key):
            self.keys = torch.cat([self.keys, key])
            return self.keys.sum(0)


    def factory():
        return Cache().step, lambda i: (torch.full((1, 8), float(i), device="cuda"),)
    ```

    ## Use instead
    A cache of its final size, written at a position that lives on the device.
    ```python
    import torch


    class Cache:
        def __init__(self):
            self.keys = torch.zeros(64, 8, device="cuda")

        def step(self, key, position):
            self.keys.index_copy_(0, position, key)
            return self.keys.sum(0)


    def factory():
        return Cache().step, lambda i: (
            torch.full((1, 8), float(i), device="cuda"),
            torch.full((1,), i + 1, device="cuda"),
        )
    ```
    """

    hazards = (17,)
    happens = SILENT
    seen = ways("partly", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)
