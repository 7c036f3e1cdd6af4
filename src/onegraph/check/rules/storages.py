"""Addresses that a graph holds on to."""

from onegraph.check.rules.base import SILENT, Origin, Rule, Severity, ways


class ReboundStorage(Rule):
    """
    ## What it does
    Finds inputs, parameters, buffers and state tensors that the step, or the caller between steps, binds to another
    storage.

    ## Why is this bad
    A graph replays addresses. After `self.state = new`, eager code reads the new tensor; the replay reads the old
    address, which may be stale or already hold something else.

    ## Example
    ```python
    import torch


    class Step:
        def __init__(self):
            self.state = torch.zeros(4, device="cuda")

        def __call__(self, x):
            self.state = self.state * 0.5 + x
            return self.state.clone()


    def factory():
        return Step(), lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Write in place.
    ```python
    import torch


    class Step:
        def __init__(self):
            self.state = torch.zeros(4, device="cuda")

        def __call__(self, x):
            self.state.mul_(0.5).add_(x)
            return self.state.clone()


    def factory():
        return Step(), lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (14,)
    happens = SILENT
    seen = ways("partly", "yes", "partly")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class FreedExternalTensor(Rule):
    """
    ## What it does
    Finds tensors from outside the graph that the step reads and that nobody keeps alive until the replay.

    ## Why is this bad
    The graph holds an address, not a reference. Once the tensor is freed, the allocator gives its memory to someone
    else and the replay reads that.

    ## Example
    ```python
    import torch


    def factory():
        holder = [torch.ones(4, device="cuda")]

        def step(x):
            if holder:
                return x + holder.pop()
            return x + torch.ones(4, device="cuda")

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Keep what the graph reads for as long as the graph lives.
    ```python
    import torch


    def factory():
        held = torch.ones(4, device="cuda")

        def step(x):
            return x + held

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (15,)
    happens = SILENT
    seen = ways("no", "partly", "yes")
    shown_by = ()


class FreedPinnedSource(Rule):
    """
    ## What it does
    Finds pinned host memory that the step copies from and that is freed or refilled before the replay has read it.

    ## Why is this bad
    The copy is replayed from the same host address. If that memory was freed or holds the next step's data by then, the
    device gets the wrong contents.

    ## Example
    ```python
    import torch


    def factory():
        def step(x):
            staging = torch.full((4,), 2.0, pin_memory=True)
            return x + staging.to("cuda", non_blocking=True)

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Pinned memory that lives as long as the graph.
    ```python
    import torch


    def factory():
        staging = torch.full((4,), 2.0).pin_memory()

        def step(x):
            return x + staging.to("cuda", non_blocking=True)

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (16,)
    happens = SILENT
    seen = ways("no", "partly", "yes")
    shown_by = (Origin.SIMULATE,)


class OutputReadLate(Rule):
    """
    ## What it does
    Finds outputs of a step that are kept and read after a later step.

    ## Why is this bad
    Every replay writes its output to the same address. A list of ten outputs is ten times the last one.

    ## Example
    ```python
    import torch


    class Step:
        def __init__(self):
            self.previous = None

        def __call__(self, x):
            y = x * 2
            total = y if self.previous is None else y + self.previous
            self.previous = y
            return total


    def factory():
        return Step(), lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Copy what must survive into a tensor of its own.
    ```python
    import torch


    class Step:
        def __init__(self):
            self.previous = torch.zeros(4, device="cuda")

        def __call__(self, x):
            y = x * 2
            total = y + self.previous
            self.previous.copy_(y)
            return total


    def factory():
        return Step(), lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (18,)
    happens = SILENT
    seen = ways("partly", "partly", "yes")
    shown_by = (Origin.SIMULATE,)


class SharedPoolOrder(Rule):
    """
    ## What it does
    Finds graphs that share a memory pool and are replayed in another order than captured, or at the same time.

    ## Why is this bad
    Graphs of one pool reuse each other's memory. In another order, one overwrites what the other has yet to read.

    ## Example
    ```python
    import torch


    def capture(first, second):
        one, two = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(one):
            a = first()
        with torch.cuda.graph(two, pool=one.pool()):
            b = second()
        two.replay()
        one.replay()  # b lies where the first graph keeps its temporaries
        return a, b
    ```

    ## Use instead
    The order of capture, or a pool each.
    ```python
    import torch


    def capture(first, second):
        one, two = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(one):
            a = first()
        with torch.cuda.graph(two):
            b = second()
        one.replay()
        two.replay()
        return a, b
    ```
    """

    hazards = (20,)
    happens = SILENT
    seen = ways("no", "partly", "yes")
    shown_by = ()


class FreedOutsideCapture(Rule):
    """
    ## What it does
    Finds tensors made during capture whose last reference goes away outside it, while the capture is still running.

    ## Why is this bad
    The allocator sees an allocation of the graph's pool released by someone else: "Attempting uncaptured free of a
    captured allocation".

    ## Example
    ```python
    import gc

    import torch


    def factory():
        def step(x):
            loop = [x * 2]
            loop.append(loop)  # freed by the collector, whenever that runs
            return loop[0] + 1

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    No reference cycles through the step's tensors; `gc.collect()` before capture.
    ```python
    import torch


    def factory():
        def step(x):
            return x * 2 + 1

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (19,)
    severity = Severity.ERROR
    happens = "Attempting uncaptured free of a captured allocation"
    seen = ways("no", "no", "yes")
    shown_by = ()
