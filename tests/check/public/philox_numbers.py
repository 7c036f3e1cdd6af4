# sglang-omni#419: a sampler takes seed and offset of the generator as numbers; the graph draws the same for ever.
import torch
import triton
import triton.language as tl


@triton.jit
def draw(out, seed, offset, n, B: tl.constexpr):
    o = tl.arange(0, B)
    tl.store(out + o, tl.rand(seed, offset + o), mask=o < n)


@triton.jit
def draw_dev(out, state, n, B: tl.constexpr):
    o = tl.arange(0, B)
    seed = tl.load(state)
    off = tl.load(state + 1)
    tl.store(out + o, tl.rand(seed, (off + o).to(tl.int32)), mask=o < n)


def generator_numbers():
    logits = torch.zeros(4, 16, device="cuda")
    u = torch.zeros(4, device="cuda")
    torch.cuda.init()
    gen = torch.cuda.default_generators[torch.cuda.current_device()]

    def step(x):
        seed, off = gen.initial_seed(), gen.get_offset()
        gen.set_offset(off + 4)
        draw[(1,)](u, seed % (2**31), off, 4, B=4)
        p = torch.softmax(x, -1).cumsum(-1)
        return (p < u[:, None]).sum(-1)

    return step, lambda i: (logits + i,)


def own_counter():
    u = torch.zeros(4, device="cuda")
    st = {"off": 0}

    def step(x):
        st["off"] += 4
        draw[(1,)](u, 7, st["off"], 4, B=4)
        return (torch.softmax(x, -1).cumsum(-1) < u[:, None]).sum(-1)

    return step, lambda i: (torch.zeros(4, 16, device="cuda") + i,)


def on_device():
    u = torch.zeros(4, device="cuda")
    state = torch.tensor([7, 0], device="cuda")

    def step(x):
        draw_dev[(1,)](u, state, 4, B=4)
        state[1:].add_(4)
        return (torch.softmax(x, -1).cumsum(-1) < u[:, None]).sum(-1)

    return step, lambda i: (torch.zeros(4, 16, device="cuda") + i,)


def flashinfer_like(own=False):
    u = torch.zeros(4, device="cuda")
    gen = torch.Generator(device="cuda") if own else None

    def step(x):
        g = gen
        if g is None:
            torch.cuda.init()
            g = torch.cuda.default_generators[0]
        state = g.get_state()
        seed, off = (int(v) for v in state.view(torch.int64))
        g.set_state(torch.tensor([seed, off + 4], dtype=torch.int64).view(torch.uint8))
        draw[(1,)](u, seed % (2**31), off, 4, B=4)
        return (torch.softmax(x, -1).cumsum(-1) < u[:, None]).sum(-1)

    return step, lambda i: (torch.zeros(4, 16, device="cuda") + i,)


def own_generator_state():
    return flashinfer_like(True)


def own_generator_offset():
    u = torch.zeros(4, device="cuda")
    gen = torch.Generator(device="cuda")

    def step(x):
        seed, off = gen.initial_seed(), gen.get_offset()
        gen.set_offset(off + 4)
        draw[(1,)](u, seed % (2**31), off, 4, B=4)
        return (torch.softmax(x, -1).cumsum(-1) < u[:, None]).sum(-1)

    return step, lambda i: (torch.zeros(4, 16, device="cuda") + i,)
