"""What to do about a finding: one table, by rule and construct of the code, for reading, simulation and GPU alike.

Standard library only. Each text says what to write instead; `tests/check/advice` holds, for each, a step that has the
hazard and the same step with the text followed, which the check finds clean.
"""

from onegraph.check import constructs

_MASK = "torch.where(torch.arange(n, device=...) < bound, values, 0)"
_LENGTH = f"shapes of a graph are fixed: work on the whole length and mask what lies past the bound, as in {_MASK}"
_ROUNDS = (
    "run the largest count of rounds, and let torch.where(i < count, new, old) keep what later rounds would change"
)
_CHOOSE = "compute both sides and choose on the device: torch.where(condition, a, b)"
_AFTER = "return the tensor from the step, and read or show it after the replay"
_ASSERT = "torch._assert_async(condition) checks on the device; or check the inputs before the replay"
_OUTSIDE = "make it once where the step is built (register_buffer in a module), and use it in the step"
_INPUT = "hand it to the step as a device tensor, which the caller fills before each replay"
_ROW_COPY = "write it with x.index_copy_(0, index, rows): index is a device tensor [n], rows [n, ...] of x's dtype"
_ONE_HOT = "say num_classes=, so that the largest value need not be read"
_MASK_READ = "keep the full shape: torch.where(mask, x, 0) before a sum; count with mask.sum()"
_LIST = "stack the tensors once where the step is built, and take stacked.index_select(0, index)"
_DRAW = "draw on the device, torch.rand((), device=...): a graph takes new numbers of the default generator each replay"
_LARGEST = "launch the largest grid, and mask in the kernel what lies past the number"
_CAPTURABLE = "make the optimizer with capturable=True: its step count and factors are then device tensors"
_LINALG = "torch.linalg.{0}_ex does not look for errors: take {0}_ex(...).{1}, and look at its info after the replay"

ADVICE: dict[str, dict[str, str]] = {
    "CG101": {
        "print or log": _AFTER,
        "assert": _ASSERT,
        "clip_grad_norm_": "leave error_if_nonfinite=False; look at the returned norm after the replay",
        "GradScaler": "make the optimizer with fused=True: its kernel looks at the scaler's found_inf on the device",
        "one_hot": _ONE_HOT,
        "launch": f"give the kernel the tensor and read it there with tl.load; {_LARGEST}",
        "loop count": _ROUNDS,
        "branch": _CHOOSE,
        "slice write": _ROW_COPY,
        "slice bound": _LENGTH,
        "list index": _LIST,
        "index write": _ROW_COPY,
        "index": "take it with x.index_select(0, index), where index is a device tensor [n]",
        "size": _LENGTH,
        "tensor of tensors": "torch.stack((a, b)) builds it on the device",
        "Python reduction": "use the tensor's own: t.max(), t.sum(), t.any(); for `v in t`, (t == v).any()",
        "comparison": "(a == b).all() stays on the device; choose with torch.where",
        "operand": "leave the number in its tensor: a 0-d device tensor is added, multiplied or compared like a number",
        "return": _AFTER,
        "numpy": "do the same with torch on the device, or after the replay, outside of the step",
        "": "leave the value on the device, in its tensor; what the host needs of it is read after the replay",
    },
    "CG102": {
        "where": "give torch.where a Python number, or make the 0-d tensor on the device where the step is built",
        "literal": _OUTSIDE,
        "host data": _INPUT,
        "pinned": "copy with non_blocking=True: from pinned memory the host need not wait",
        "copy_": "make its source pinned, pin_memory() where the step is built, and copy with non_blocking=True; "
        "what changes from step to step is handed to the step as an input",
        "move": "move it to the device once where the step is built (register_buffer in a module)",
        "": "make the tensor once where the step is built, or hand it to the step as an input",
    },
    "CG103": {
        "list index": "make the index once as a device tensor where the step is built; evenly spaced rows are a slice",
        "write": "assign with x[i].fill_(number) where i is a number, x.index_fill_(0, i, number) for a tensor; "
        "a tensor that is assigned is made on the device",
        "": "move the index to the device once where the step is built",
    },
    "CG104": {
        "one_hot": _ONE_HOT,
        "repeat_interleave": "say output_size=, the length of the result",
        "unique": "sort, and compare neighbours: new = s[1:] != s[:-1] marks where another value begins",
        "bincount": "count with zeros(n).scatter_add_(0, values, ones), of a fixed n",
        "nonzero": "use the mask itself, torch.where(mask, a, b) with three arguments, in place of its positions",
        "mask write": "x.copy_(torch.where(mask, value, x)); for a number, x.masked_fill_(mask, number)",
        "mask": _MASK_READ,
        "": "use a form of fixed shape: torch.where with three arguments, scatter_add_, a sort",
    },
    "CG105": {
        "inv": _LINALG.format("inv", "inverse"),
        "cholesky": _LINALG.format("cholesky", "L"),
        "solve": _LINALG.format("solve", "result"),
        "histc": "say min= and max=: with them it has nothing to read",
        "isin": "(x[..., None] == wanted).any(-1) compares on the device",
        "normal": "mean + deviation * torch.randn_like(mean) does not look for negative deviations",
        "segment_reduce": "with unsafe=True it does not look whether the lengths add up",
        "grouped_mm": "cast both factors to bfloat16, and back after",
        "product": "a sparse factor is made with .coalesce() where the step is built",
        "": "this op waits in every form: do it outside of the step, and hand its result in as an input",
    },
    "CG106": {
        "event or stream": "let the device wait: current_stream().wait_event(event), or .wait_stream(stream)",
        "": "take it out of the step: the caller synchronizes after the replay",
    },
    "CG107": {
        "pinned allocation": "allocate it once where the step is built",
        "": "ask events and streams after the replay, outside of the step",
    },
    "CG108": {
        "assert": _ASSERT,
        "while": _ROUNDS,
        "and, or, not": "write &, | and ~ (torch.logical_and, logical_or, logical_not) for and, or and not",
        "": _CHOOSE,
    },
    "CG201": {
        "loop count": "run the largest count of rounds, with torch.where(i < count, new, old) and a device tensor "
        "as count; or capture a graph for each count and choose outside of the step",
        "raise": "check it outside of the captured statements, before each replay: a replay runs no Python",
        "": "let a device tensor that the step updates decide, with torch.where; or capture a graph for each case and "
        "choose outside of the step",
    },
    "CG202": {
        "optimizer": _CAPTURABLE,
        "random": _DRAW,
        "launch": "give the kernel a device tensor, which the step updates or the caller fills before each replay, and "
        f"read it there with tl.load; {_LARGEST}",
        "slice write": f"{_ROW_COPY}; the position comes in as an input",
        "slice bound": f"{_LENGTH}; the bound comes in as a device tensor",
        "index write": f"{_ROW_COPY}; the position comes in as an input",
        "index": "take it with x.index_select(0, index), where index is a device tensor [n] that comes in as an input",
        "size": f"{_LENGTH}; the bound comes in as a device tensor",
        "counter": "count in a device tensor that the step updates with add_; or hand the number in as an input",
        "": "hand the number to the step as a 0-d device tensor, which the caller fills before each replay",
    },
    "CG203": {
        "": "make the 0-d tensor on the device; what the host writes is copied into it before each replay",
    },
    "CG204": {"": "hand the contents to the step as an input, which the caller fills before each replay"},
    "CG205": {
        "rebinding": "write into the tensor that is there: state.copy_(new) in place of state = new",
        "": "allocate once where the step is built and write with copy_; a tensor that is new in each step is an "
        "argument of the step",
    },
    "CG206": {"": "keep a reference to the tensor for as long as the graph lives"},
    "CG207": {"": "make the pinned tensor once where the step is built, and leave it untouched until the copy has run"},
    "CG208": {
        "cat": "allocate the final length once and write with index_copy_ at a position in a device tensor",
        "": "pad to one shape where the step is called, and mask what is not used",
    },
    "CG209": {"": "clone the output before the next replay"},
    "CG210": {
        "print or log": "print after the replay, outside of the step",
        "append": "return the tensor; the caller appends a clone of it after the replay",
        "counter": "count in the caller, after the replay, or in a device tensor with add_",
        "return": "return a device tensor; the host's own numbers are known to the caller",
        "": "do it in the caller, after the replay: a replay runs no Python",
    },
    "CG211": {"": "take one path in both cases; do checks and warm-up before capture"},
    "CG212": {
        "refused values": "keep them in range: the caller checks its own count of positions before the replay; on the "
        "device, clamp, or send what is past the end to a row that nobody reads",
        "": "look for host state that the step reads: whatever changes between steps must be a device tensor",
    },
    "CG301": {"": "leave generator= out (every graph knows the default one), or call graph.register_generator_state"},
    "CG302": {"": "seed outside of the step: before capture, and between replays"},
    "CG303": {
        "": "let side streams wait for the current one; give torch.cuda.graph a stream made on the step's device"
    },
    "CG304": {"": "capture on a stream of its own, and stay on the current stream in the step"},
    "CG305": {
        "": "order the streams: side.wait_stream(current) before, current.wait_stream(side) before its results are used"
    },
    "CG306": {"": "run forward and backward inside the capture, after a warm-up on a side stream"},
    "CG307": {
        "mode": "compile in the default mode, or in 'max-autotune-no-cudagraphs': others capture graphs of their own",
        "compile": "compile once where the step is built",
        "": "compile, tune and make handles where the step is built, and run the step before capture",
    },
    "CG308": {"": "allocate with torch before capture, and pass the tensor"},
    "CG309": {"": "do the work in the step's own thread; threads are started outside of it"},
    "CG310": {"": "use tensor collectives of NCCL inside the step, barriers and objects outside"},
    "CG311": {
        "hook": "register hooks once where the step is built",
        "autocast": "enter autocast inside the step, or with cache_enabled=False",
        "": "set the mode once, before capture",
    },
    "CG312": {"": "replay in the order of capture, one at a time, or give each graph a pool of its own"},
    "CG313": {"": "break the reference cycle; collect garbage before capture"},
    "CG314": {
        "": "keep what it writes in a module, as a buffer; host work, reads, changing sizes outside of the function"
    },
    "CG401": {
        "replay": "capture one call of a function, y = step(x), which can be called again at any time; or give check a "
        "factory of that step",
        "declared": "its author says that it cannot be captured: launch it outside of the step",
        "address": "launch what takes the address in a custom op (torch.library.custom_op, with register_fake) and "
        "declare that op with onegraph.check.declare; or check it with --live on a GPU",
        "kernel": "check it with --live on a GPU; or read what its launch does, and declare(kernel) (onegraph.check)",
        "": "check it with --live on a GPU; or read what it launches, and declare it with onegraph.check.declare",
    },
    "CG402": {"": "say after the bracket why the code is right all the same"},
    "CG403": {"": "remove the comment, or name the rule that is found here"},
}
"""code -> construct -> what to do. The order of constructs is the order in which they are looked for; "": any other."""


def fix(code: str, path: str = "", line: int = 0, column: int = 1, *, construct: str = "") -> str:
    """What to do about a finding of `code` at a place (line and column from 1); in general where no place is given.

    `construct` is one that is known already.
    """
    table = ADVICE[code]
    if construct:
        return table[construct]
    return table[constructs.found(tuple(table), code, path, line, column)] if path else table[""]
