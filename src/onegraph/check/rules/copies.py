"""Host data that the step brings to the device."""

from onegraph.check.rules.base import PAGEABLE, Origin, Rule, ways


class PageableCopyInStep(Rule):
    """
    ## What it does
    Finds constants built on the device from host data inside the step (`torch.tensor([...], device="cuda")`) and
    CPU tensors that the step moves there (`.to(device)`, `.cuda()`, `copy_`).

    ## Why is this bad
    The source is pageable host memory. Such a copy synchronises, so capture refuses it; and each step would pay for it.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            shifts = torch.tensor([1, 2, 4, 8], device=x.device)
            return (x[:, None] // shifts) % 2

        return step, lambda i: (torch.full((4,), i, device="cuda"),)
    ```

    ## Use instead
    Build the constant once, at load.
    ```python
    import torch


    def factory():
        shifts = torch.tensor([1, 2, 4, 8], device="cuda")

        def step(x):
            return (x[:, None] // shifts) % 2

        return step, lambda i: (torch.full((4,), i, device="cuda"),)
    ```
    """

    hazards = (3,)
    happens = PAGEABLE
    seen = ways("partly", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class HostIndex(Rule):
    """
    ## What it does
    Finds device tensors indexed by a Python list or a CPU tensor, and single elements assigned from a Python number.

    ## Why is this bad
    The list becomes a CPU tensor that is copied to the device: a pageable copy that cannot be seen in the code.
    `t[3] = 1.0` on a vector copies the number in the same way.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            return x[[0, 2]]

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    An index tensor made at load, or a slice.
    ```python
    import torch


    def factory():
        chosen = torch.tensor([0, 2], device="cuda")

        def step(x):
            return x[chosen]

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (4,)
    happens = PAGEABLE
    seen = ways("partly", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)
