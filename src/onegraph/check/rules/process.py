"""What the process around the step must have done before, or must leave alone."""

from onegraph.check.rules.base import NOT_PERMITTED, Origin, Rule, Severity, ways


class StaleAutogradNode(Rule):
    """
    ## What it does
    Finds captures that meet an autograd node made on another stream before capture.

    ## Why is this bad
    The backward pass of such a node runs on the stream where it was made, which the capture does not contain.

    ## Example
    ```python
    import torch


    def factory():
        weight = torch.ones(4, device="cuda", requires_grad=True)
        loss = (weight * 2).sum()

        def step(x):
            (grad,) = torch.autograd.grad(loss, weight, retain_graph=True)
            return x + grad

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Forward and backward inside the same capture.
    ```python
    import torch


    def factory():
        weight = torch.ones(4, device="cuda", requires_grad=True)

        def step(x):
            (grad,) = torch.autograd.grad((weight * x).sum(), weight)
            return x + grad

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (26,)
    happens = NOT_PERMITTED
    seen = ways("no", "yes", "yes")


class LazyInitialisation(Rule):
    """
    ## What it does
    Finds first-use work inside the step: `torch.compile` called there, a kernel that is compiled or autotuned on its
    first call, a workspace made late. Also a function compiled with `mode="reduce-overhead"` or `"max-autotune"`, which
    captures graphs of its own.

    ## Why is this bad
    Compiling, timing and creating handles all allocate and synchronise. They must have happened before capture. A graph
    cannot be captured inside of another: either torch captures what it compiled, or you do.

    ## Example
    ```python
    import torch


    def double(x):
        return x * 2


    def factory():
        def step(x):
            return torch.compile(double)(x)

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Compile at load and run once before capture.
    ```python
    import torch


    def double(x):
        return x * 2


    def factory():
        compiled = torch.compile(double)

        def step(x):
            return compiled(x)

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (27,)
    happens = NOT_PERMITTED
    seen = ways("partly", "partly", "yes")
    shown_by = (Origin.SOURCE, Origin.SIMULATE)


class RawAllocation(Rule):
    """
    ## What it does
    Finds memory taken from CUDA during capture without torch's allocator.

    ## Why is this bad
    `cudaMalloc` synchronises and is not permitted while capturing; memory outside the graph's pool is not kept for it.

    ## Example
    ```python
    import ctypes

    import torch


    def factory():
        runtime = ctypes.CDLL("libcudart.so")

        def step(x):
            pointer = ctypes.c_void_p()
            runtime.cudaMalloc(ctypes.byref(pointer), 1024)
            return x * 2

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    A tensor made before capture.
    ```python
    import torch


    def factory():
        workspace = torch.empty(1024, dtype=torch.uint8, device="cuda")

        def step(x):
            return x * 2 + workspace[0] * 0

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (28,)
    happens = NOT_PERMITTED
    seen = ways("no", "no", "yes")
    shown_by = ()


class CollectiveInCapture(Rule):
    """
    ## What it does
    Finds collectives in the step that need the host: `barrier`, and the object collectives.

    ## Why is this bad
    They pickle, copy to the host and synchronise. The tensor collectives of NCCL can be captured, by all ranks in the
    same order; these cannot.

    ## Example
    ```python
    import torch
    import torch.distributed as dist


    def factory():
        def step(x):
            dist.all_reduce(x)
            dist.barrier()
            return x

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Tensor collectives alone.
    ```python
    import torch
    import torch.distributed as dist


    def factory():
        def step(x):
            dist.all_reduce(x)
            return x

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (30,)
    happens = NOT_PERMITTED + "; or a hang"
    seen = ways("partly", "partly", "yes")
    shown_by = (Origin.SOURCE,)


class AutocastOrModeFlip(Rule):
    """
    ## What it does
    Finds `train()`, `eval()` and hooks being registered in the step, and autocast whose weight cache outlives it.

    ## Why is this bad
    Modes and hooks decide which ops run, so capture and replay may not mean the same step. Autocast entered outside
    keeps converted weights in a cache that is emptied on exit: a graph that read them reads freed memory. Autocast
    entered inside the step is fine.

    ## Example
    ```python
    import torch


    class Step:
        def __init__(self):
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).to("cuda")
            self.seen = 0

        @torch.no_grad()
        def __call__(self, x):
            self.seen += 1
            self.net.train(self.seen % 2 == 0)
            return self.net(x)


    def factory():
        return Step(), lambda i: (torch.full((2, 4), float(i), device="cuda"),)
    ```

    ## Use instead
    Set the mode once, before capture.
    ```python
    import torch


    class Step:
        def __init__(self):
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).to("cuda").eval()

        @torch.no_grad()
        def __call__(self, x):
            return self.net(x)


    def factory():
        return Step(), lambda i: (torch.full((2, 4), float(i), device="cuda"),)
    ```
    """

    hazards = (31,)
    severity = Severity.WARNING
    happens = "an assertion in autocast, or silently stale"
    seen = ways("partly", "partly", "yes")
    shown_by = (Origin.SOURCE,)


class SkippedGraph(Rule):
    """
    ## What it does
    Finds what makes torch leave out, split or record again the CUDA graph of a function that it compiles with
    `mode="reduce-overhead"` or `"max-autotune"`: a written tensor that no module holds, an op or a copy on the CPU, a
    device value read on the host, a shape that depends on values, an argument of changing shape.

    ## Why is this bad
    The function is right and as slow as before. torch says so only with `TORCH_LOGS=cudagraphs` ("skipping cudagraphs
    due to mutated inputs").

    ## Example
    ```python
    import torch


    def count(x, seen):
        seen.add_(x)
        return x * 2


    def factory():
        compiled = torch.compile(count, mode="reduce-overhead")
        seen = torch.zeros(4, device="cuda")

        def step(x):
            return compiled(x, seen)

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```

    ## Use instead
    Return the new value, and write it where no graph of torch's is in the way. (In a step that is captured itself, the
    function is compiled without graphs of its own.)
    ```python
    import torch


    def count(x, seen):
        return x * 2, seen + x


    def factory():
        compiled = torch.compile(count, mode="max-autotune-no-cudagraphs")
        seen = torch.zeros(4, device="cuda")

        def step(x):
            y, now = compiled(x, seen)
            seen.copy_(now)
            return y

        return step, lambda i: (torch.full((4,), float(i), device="cuda"),)
    ```
    """

    hazards = (34,)
    severity = Severity.WARNING
    happens = "no error: torch runs the function without a CUDA graph, or with several"
    seen = ways("no", "yes", "no")
    shown_by = (Origin.SIMULATE,)
