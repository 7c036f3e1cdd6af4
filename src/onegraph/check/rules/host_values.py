"""Device values that the host reads or branches on."""

from onegraph.check.rules.base import NOT_PERMITTED, Origin, Rule, ways


class DeviceValueReadOnHost(Rule):
    """
    ## What it does
    Finds places where the step brings the value of a device tensor to the host: `.item()`, `.tolist()`, `.cpu()`,
    `.numpy()`, `int(t)`, `float(t)`, `bool(t)`, a tensor as slice bound or `range` argument, `print(t)`, `max(t)`,
    `x in t`.

    ## Why is this bad
    The host must wait for the device to know the value, and a stream that is being captured runs nothing: CUDA refuses
    ("operation not permitted when stream is capturing"). Were it to pass, the value of the captured step would be
    frozen into every replay.

    ## Example
    ```python
    import torch


    def factory():
        cache = torch.zeros(16, 8, device="cuda")

        def step(x, position):
            cache[position.item()] = x
            return cache.sum(0)

        return step, lambda i: (torch.ones(8, device="cuda"), torch.full((1,), i, device="cuda"))
    ```

    ## Use instead
    An op that takes the index as a tensor.
    ```python
    import torch


    def factory():
        cache = torch.zeros(16, 8, device="cuda")

        def step(x, position):
            cache.index_copy_(0, position, x[None])
            return cache.sum(0)

        return step, lambda i: (torch.ones(8, device="cuda"), torch.full((1,), i, device="cuda"))
    ```
    """

    hazards = (1, 2)
    happens = NOT_PERMITTED
    seen = ways("partly", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class BranchOnDeviceValue(Rule):
    """
    ## What it does
    Finds `if`, `while`, `assert`, `and`/`or`/`not` and conditional expressions whose condition is a device tensor.

    ## Why is this bad
    Python needs the truth value on the host, so capture fails. If the condition is known during capture by other means,
    the branch taken then is the only one that replays ever take.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            if x.sum() > 0:
                return x * 2
            return x

        return step, lambda i: (torch.full((4,), i - 1.0, device="cuda"),)
    ```

    ## Use instead
    Compute both sides and choose on the device.
    ```python
    import torch


    def factory():
        def step(x):
            return torch.where(x.sum() > 0, x * 2, x)

        return step, lambda i: (torch.full((4,), i - 1.0, device="cuda"),)
    ```
    """

    hazards = (9, 1)
    happens = NOT_PERMITTED + "; then the branch of the captured step, forever"
    seen = ways("partly", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)
