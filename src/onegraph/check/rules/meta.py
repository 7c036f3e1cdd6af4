"""What the check says about itself: what it could not see, and allowances."""

from onegraph.check.rules.base import Origin, Rule, Severity, ways


class UnverifiedLaunch(Rule):
    """
    ## What it does
    Names launches that simulation cannot look into: Triton kernels, custom ops without a fake, ctypes.

    ## Why is this bad
    It may be fine. But a check that says "safe" about what it has not seen is worth nothing, so it says "unverified";
    `--strict` counts it as an error. What such a launch computes is unknown: a host value that changes and meets it is
    an error, because nothing shows it harmless.

    ## Example
    ```python
    import torch
    import triton
    import triton.language as tl


    @triton.jit
    def double(x, y, n: tl.constexpr):
        i = tl.arange(0, n)
        tl.store(y + i, tl.load(x + i) * 2)


    def factory():
        y = torch.zeros(4, device="cuda")

        def step(x):
            double[(1,)](x, y, 4)
            return y

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Check it on a GPU with `--live`, or, having read the kernel's host code, declare it.
    ```python
    import torch
    import triton
    import triton.language as tl

    from onegraph.check import declare


    @triton.jit
    def double(x, y, n: tl.constexpr):
        i = tl.arange(0, n)
        tl.store(y + i, tl.load(x + i) * 2)


    declare(double, capturable=True)


    def factory():
        y = torch.zeros(4, device="cuda")

        def step(x):
            double[(1,)](x, y, 4)
            return y

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    severity = Severity.UNVERIFIED
    happens = ""
    fix = "check it with --live on a GPU, give the op a fake, or declare it with onegraph.check.declare"
    seen = ways("no", "yes", "yes")
    shown_by = (Origin.SIMULATE,)


class AllowanceWithoutReason(Rule):
    """
    ## What it does
    Finds `# onegraph: allow[CG101]` without a reason after it.

    ## Why is this bad
    The next reader cannot tell a considered exception from a silenced alarm. Such an allowance allows nothing.

    ## Example
    ```python
    import os

    import torch

    DEBUG = "ONEGRAPH_DEBUG" in os.environ


    def factory():
        def step(x):
            if DEBUG:
                print(x.sum().item())  # onegraph: allow[CG101]
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    ```python
    import os

    import torch

    DEBUG = "ONEGRAPH_DEBUG" in os.environ


    def factory():
        def step(x):
            if DEBUG:
                print(x.sum().item())  # onegraph: allow[CG101,CG210] with ONEGRAPH_DEBUG alone, never captured
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    severity = Severity.ERROR
    happens = ""
    fix = "say after the bracket why the code is right all the same"
    seen = ways("yes", "yes", "yes")
    shown_by = (Origin.SOURCE,)


class UnusedAllowance(Rule):
    """
    ## What it does
    Finds allowances whose code does not fire on their line any more, or that name no rule.

    ## Why is this bad
    It would silence the next real finding on that line.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            return x * 2  # onegraph: allow[CG106] the host waits here

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    ```python
    import torch


    def factory():
        def step(x):
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    severity = Severity.WARNING
    happens = ""
    fix = "remove the comment"
    seen = ways("yes", "yes", "yes")
    shown_by = (Origin.SOURCE,)
