"""What the check says about itself: what it could not see, and allowances."""

from onegraph.check.rules.base import Origin, Rule, Severity, ways


class UnverifiedLaunch(Rule):
    """
    ## What it does
    Names launches that nothing here looks into: kernels of CuPy, CuTe DSL, cuda.core or NVRTC, custom ops without a
    Python body, addresses that are handed out, and Triton kernels that Triton's interpreter cannot run (inline
    assembly, too many programs); the message says why. Other Triton kernels are run and compared as any op. With
    `--run`, also a graph of which no replay is compared with eager.

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
        v = tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=f,f", [tl.load(x + i)], tl.float32, True, 1)
        tl.store(y + i, v)


    def factory():
        y = torch.zeros(4, device="cuda")

        def step(x):
            double[(1,)](x, y, 4)
            return y

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Check it on a GPU with `--live`, or, having read the kernel's host code, declare it. A kernel of another library is
    declared as the custom op that launches it (`torch.library.custom_op`, `register_fake`), or by the name in the
    message.
    ```python
    import torch
    import triton
    import triton.language as tl

    from onegraph.check import declare


    @triton.jit
    def double(x, y, n: tl.constexpr):
        i = tl.arange(0, n)
        v = tl.inline_asm_elementwise("add.f32 $0, $1, $1;", "=f,f", [tl.load(x + i)], tl.float32, True, 1)
        tl.store(y + i, v)


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
    seen = ways("partly", "yes", "yes")
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
    seen = ways("yes", "yes", "yes")
    shown_by = (Origin.SOURCE,)
