"""Streams, devices and threads of a capture."""

from onegraph.check.rules.base import Origin, Rule, Severity, ways


class WrongStreamOrDevice(Rule):
    """
    ## What it does
    Finds work that goes to another stream or device than the one captured: a side stream that has not waited for the
    captured one, `torch.cuda.set_device` in the step, `torch.cuda.graph` on a second GPU without `stream=`.

    ## Why is this bad
    Such work runs at once, during capture, and never again: the graph is empty or lacks a part of the step.
    `torch.cuda.graph` without `stream=` uses one capture stream for the process, made on whichever device was current
    first, so on another GPU it captures nothing.

    ## Example
    ```python
    import torch


    def factory():
        side = torch.cuda.Stream()
        total = torch.zeros(4, device="cuda")
        weight = torch.full((4,), 3.0, device="cuda")

        def step(x):
            with torch.cuda.stream(side):
                total.add_(weight)
            torch.cuda.current_stream().wait_stream(side)
            return x + total

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Let the side stream wait for the captured one first. On another GPU, give `torch.cuda.graph` a stream made there:
    `torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:1"))`.
    ```python
    import torch


    def factory():
        side = torch.cuda.Stream()
        total = torch.zeros(4, device="cuda")
        weight = torch.full((4,), 3.0, device="cuda")

        def step(x):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                total.add_(weight)
            torch.cuda.current_stream().wait_stream(side)
            return x + total

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (23,)
    happens = "The CUDA Graph is empty; or a part of the step is silently missing"
    seen = ways("partly", "partly", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class DefaultStreamCapture(Rule):
    """
    ## What it does
    Finds captures on the default stream, and steps that switch to it.

    ## Why is this bad
    The legacy default stream synchronises with every other and cannot be captured.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            with torch.cuda.stream(torch.cuda.default_stream()):
                return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    The current stream, which is the captured one.
    ```python
    import torch


    def factory():
        def step(x):
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (24,)
    happens = "CUDA graphs must be captured on a non-default stream"
    seen = ways("yes", "partly", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class UnjoinedFork(Rule):
    """
    ## What it does
    Finds work that the step sends to another stream without waiting for it, waits for an event or stream from outside
    of the capture, and memory that two streams use, one writing, while no wait and no event orders them.

    ## Why is this bad
    A side stream joins the capture only by waiting for the captured stream, and must be waited for before capture ends:
    otherwise "unjoined work" or a dependency on work that is not captured. What two streams do between fork and join
    runs in any order: where both use the same memory, the result depends on which was first.

    ## Example
    ```python
    import torch


    def factory():
        side = torch.cuda.Stream()
        total = torch.zeros(4, device="cuda")

        def step(x):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                total.add_(x)
            return x + 1

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Fork and join.
    ```python
    import torch


    def factory():
        side = torch.cuda.Stream()
        total = torch.zeros(4, device="cuda")

        def step(x):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                total.add_(x)
            torch.cuda.current_stream().wait_stream(side)
            return x + 1

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (25,)
    happens = "capturing stream has unjoined work; dependency created on uncaptured work in another stream; or a race"
    seen = ways("partly", "partly", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class OtherThreadCall(Rule):
    """
    ## What it does
    Finds threads that the step starts, and work that a thread or pool launches for it.

    ## Why is this bad
    In the default capture mode, an unsafe CUDA call of any other thread (an allocation, a synchronisation) breaks the
    capture; and what the thread does is not part of the graph.

    ## Example
    ```python
    import threading

    import torch


    def factory():
        def step(x):
            worker = threading.Thread(target=torch.cuda.synchronize)
            worker.start()
            worker.join()
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    No threads inside the step; `capture_error_mode="thread_local"` where others must run beside it.
    ```python
    import torch


    def factory():
        def step(x):
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (29,)
    severity = Severity.WARNING
    happens = "operation failed due to a previous error during capture, or silently stale"
    seen = ways("partly", "partly", "yes")
    shown_by = (Origin.SOURCE,)
