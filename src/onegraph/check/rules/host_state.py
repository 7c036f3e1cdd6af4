"""Host state that the captured step freezes: nothing fails, replays are wrong."""

from onegraph.check.rules.base import SILENT, Origin, Rule, Severity, ways


class HostStateBranch(Rule):
    """
    ## What it does
    Finds branches and loop counts that differ between steps because of host state: a counter, a mode, a Python
    argument. With `--run`, also a `raise` or `assert` that the captured statements come to by now.

    ## Why is this bad
    Capture records one path. Every replay takes it, whatever the counter would say by then, and no error is raised.

    ## Example
    ```python
    import torch


    class Compressor:
        def __init__(self):
            self.seen = 0
            self.state = torch.zeros(4, device="cuda")

        def step(self, x):
            self.seen += 1
            if self.seen % 2 == 0:
                self.state.add_(x)
            return self.state.clone()


    def factory():
        return Compressor().step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    The condition on the device, as fixed work under a mask.
    ```python
    import torch


    class Compressor:
        def __init__(self):
            self.seen = torch.zeros((), dtype=torch.int64, device="cuda")
            self.state = torch.zeros(4, device="cuda")

        def step(self, x):
            self.seen.add_(1)
            self.state.add_(torch.where(self.seen % 2 == 0, x, 0.0))
            return self.state.clone()


    def factory():
        return Compressor().step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (10,)
    happens = SILENT
    seen = ways("partly", "yes", "partly")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class ChangingScalar(Rule):
    """
    ## What it does
    Finds Python numbers that change from step to step and reach a kernel as an argument, a length or a grid.

    ## Why is this bad
    A kernel's scalar arguments are copied into the graph at capture. Position 7 stays position 7 in every replay.

    ## Example
    ```python
    import torch


    def factory():
        def step(x, position):
            return x * position

        return step, lambda i: (torch.ones(4, device="cuda"), i)
    ```

    ## Use instead
    The number in a device buffer that the caller fills before each replay.
    ```python
    import torch


    def factory():
        def step(x, position):
            return x * position

        return step, lambda i: (torch.ones(4, device="cuda"), torch.full((1,), i, device="cuda"))
    ```
    """

    hazards = (11,)
    happens = SILENT
    seen = ways("partly", "yes", "partly")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class CpuScalarOperand(Rule):
    """
    ## What it does
    Finds 0-d CPU tensors as operand of a device op.

    ## Why is this bad
    torch passes such a tensor by value: its content at capture becomes a kernel argument, and later writes to it never
    reach a replay.

    ## Example
    ```python
    import torch


    def factory():
        scale = torch.zeros(())

        def step(x):
            scale.add_(1.0)
            return x * scale

        return step, lambda i: (torch.ones(4, device="cuda"),)
    ```

    ## Use instead
    The same tensor on the device.
    ```python
    import torch


    def factory():
        scale = torch.zeros((), device="cuda")

        def step(x):
            scale.add_(1.0)
            return x * scale

        return step, lambda i: (torch.ones(4, device="cuda"),)
    ```
    """

    hazards = (12,)
    happens = SILENT
    seen = ways("partly", "yes", "partly")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class ChangingHostContents(Rule):
    """
    ## What it does
    Finds host memory that the step fills with other contents each time and copies to the device.

    ## Why is this bad
    A replay repeats the copy from the same address but not the Python code that filled it: the device sees what the
    capture, or whoever wrote last, left there.

    ## Example
    ```python
    import torch


    class Step:
        def __init__(self):
            self.staging = torch.zeros(4).pin_memory()
            self.lengths = torch.zeros(4, device="cuda")
            self.seen = 0

        def __call__(self, x):
            self.seen += 1
            self.staging.fill_(self.seen)
            self.lengths.copy_(self.staging, non_blocking=True)
            return x + self.lengths


    def factory():
        return Step(), lambda i: (torch.ones(4, device="cuda"),)
    ```

    ## Use instead
    An input that the caller copies in before the replay.
    ```python
    import torch


    def factory():
        def step(x, lengths):
            return x + lengths

        return step, lambda i: (torch.ones(4, device="cuda"), torch.full((4,), float(i), device="cuda"))
    ```
    """

    hazards = (13,)
    happens = SILENT
    seen = ways("partly", "yes", "partly")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class PythonSideEffect(Rule):
    """
    ## What it does
    Finds Python effects of the step: counters, appends to a list that outlives it, prints.

    ## Why is this bad
    A replay runs no Python. The counter stands still, the list stays short, nothing is printed.

    ## Example
    ```python
    import torch


    class Step:
        def __init__(self):
            self.tokens = 0

        def __call__(self, x):
            self.tokens += 1
            return x * 2


    def factory():
        return Step(), lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    The effect in the caller, after the replay.
    ```python
    import torch


    class Step:
        def __call__(self, x):
            return x * 2


    def factory():
        return Step(), lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (32,)
    severity = Severity.WARNING
    happens = SILENT
    seen = ways("partly", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class CaptureDependentPath(Rule):
    """
    ## What it does
    Finds calls of `torch.cuda.is_current_stream_capturing()` in the step.

    ## Why is this bad
    The path that is captured is then not the path that was tested eagerly, and nothing compares the two.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            if torch.cuda.is_current_stream_capturing():
                return x * 2
            return x + x

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    One path.
    ```python
    import torch


    def factory():
        def step(x):
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (33,)
    severity = Severity.WARNING
    happens = SILENT
    seen = ways("yes", "yes", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class ReplayDiffersFromEager(Rule):
    """
    ## What it does
    Says that replaying the captured step on other inputs gave another result than running it, and that no other rule
    named the cause. With `--run`, also that an op raises in a replay, or would if it were run now: an index past the
    end, a condition of `torch._assert_async` that does not hold.

    ## Why is this bad
    This is the result that users get. The finding stands at the first op whose replay differs. An index past the end
    stops the GPU with "device-side assert triggered", or goes to memory of somebody else.

    ## Example
    ```python
    import torch

    STATE = {"scale": 0.0}


    def read_scale():
        STATE["scale"] += 1.0
        return STATE["scale"]


    def factory():
        def step(x):
            return x * read_scale()

        return step, lambda i: (torch.ones(4, device="cuda"),)
    ```

    ## Use instead
    State that changes lives on the device.
    ```python
    import torch


    def factory():
        scale = torch.zeros((), device="cuda")

        def step(x):
            scale.add_(1.0)
            return x * scale

        return step, lambda i: (torch.ones(4, device="cuda"),)
    ```
    """

    happens = SILENT
    seen = ways("no", "yes", "yes")
    shown_by = ()
