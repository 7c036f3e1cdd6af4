"""Random numbers in a graph."""

from onegraph.check.rules.base import Origin, Rule, ways


class UnregisteredGenerator(Rule):
    """
    ## What it does
    Finds random ops in the step that draw from a `torch.Generator` of their own.

    ## Why is this bad
    Capture knows the default generator only; any other must be registered with
    `graph.register_generator_state(generator)` before capture. Without it the op raises.

    ## Example
    ```python
    import torch


    def factory():
        generator = torch.Generator(device="cuda")

        def step(x):
            return x + torch.rand(4, device="cuda", generator=generator)

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Noise that the caller copies in, or a counter-based generator that takes its seed and counter as tensors.
    ```python
    import torch


    def factory():
        def step(x, noise):
            return x + noise

        return step, lambda i: (torch.full((4,), float(i), device="cuda"), torch.rand(4, device="cuda"))
    ```
    """

    hazards = (21,)
    happens = "RNG op during graph capture but generator is not registered"
    seen = ways("partly", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class RngStateInStep(Rule):
    """
    ## What it does
    Finds `manual_seed`, `get_rng_state`, `set_rng_state` and `fork_rng` in the step.

    ## Why is this bad
    The state of a CUDA generator cannot be read or written while it is being captured; and a replay would not run the
    call anyway.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            torch.cuda.manual_seed(7)
            return x + torch.rand(4, device="cuda")

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Seed before capture.
    ```python
    import torch


    def factory():
        torch.cuda.manual_seed(7)
        noise = torch.rand(4, device="cuda")

        def step(x):
            return x + noise

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (22,)
    happens = "the generator's state cannot be read or set while it is being captured"
    seen = ways("yes", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)
