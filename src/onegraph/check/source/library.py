"""Tables of torch's API: what returns a tensor, what returns host values, what a capture does not bear."""

FACTORIES = frozenset(
    [
        "zeros",
        "ones",
        "empty",
        "full",
        "rand",
        "randn",
        "randint",
        "arange",
        "linspace",
        "logspace",
        "eye",
        "randperm",
        "tril_indices",
        "triu_indices",
        "empty_strided",
        "hann_window",
        "hamming_window",
        "scalar_tensor",
        "normal",
        "complex",
        "polar",
    ]
)
"""Made on the device by a kernel; without `device=` on the default device."""

FROM_HOST = frozenset(["tensor", "as_tensor", "asarray", "from_numpy", "frombuffer"])

RANDOM = frozenset(
    [
        "rand",
        "randn",
        "randint",
        "randperm",
        "normal",
        "bernoulli",
        "multinomial",
        "rand_like",
        "randn_like",
        "randint_like",
        "poisson",
    ]
)
RANDOM_METHODS = frozenset(
    ["normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"]
)

NOT_TENSORS = frozenset(
    [
        "is_tensor",
        "numel",
        "is_floating_point",
        "is_complex",
        "finfo",
        "iinfo",
        "Size",
        "device",
        "dtype",
        "get_default_dtype",
        "set_default_dtype",
        "set_default_device",
        "get_default_device",
        "is_grad_enabled",
        "broadcast_shapes",
        "result_type",
        "promote_types",
        "can_cast",
        "set_printoptions",
        "get_num_threads",
        "set_num_threads",
        "use_deterministic_algorithms",
        "is_storage",
        "typename",
        "jit",
        "compile",
        "vmap",
        "Generator",
        "manual_seed",
        "seed",
        "initial_seed",
        "is_inference_mode_enabled",
        "is_autocast_enabled",
        "get_autocast_dtype",
        "save",
        "load",
        "set_float32_matmul_precision",
    ]
)

TRANSFORMS = frozenset(
    f"torch.func.{name}" for name in ("vmap", "grad", "jacrev", "jacfwd", "hessian", "functionalize")
) | {"torch.vmap"}
"""Functions that give back the function they are given, to be called on the same tensors."""

GRAD_MODES = frozenset(["no_grad", "enable_grad", "inference_mode", "set_grad_enabled"])

HOST_READS = frozenset(["equal", "allclose", "is_nonzero"])
"""Functions and methods whose result is a Python bool made from device values."""

DATA_SHAPES = frozenset(
    ["nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "combinations"]
)

PAIRS = frozenset(
    [
        "sort",
        "topk",
        "kthvalue",
        "mode",
        "cummax",
        "cummin",
        "frexp",
        "slogdet",
        "svd",
        "qr",
        "eig",
        "lu_factor",
        "inv_ex",
        "cholesky_ex",
        "aminmax",
        "std_mean",
        "var_mean",
        "triangular_solve",
    ]
)
"""Tuples of tensors, always."""

SPLITS = frozenset(
    [
        "split",
        "chunk",
        "unbind",
        "tensor_split",
        "hsplit",
        "vsplit",
        "dsplit",
        "meshgrid",
        "broadcast_tensors",
        "where1",
    ]
)

CHECKED = frozenset(["inv", "solve", "cholesky", "eig", "eigvals", "lstsq", "lu_factor", "lu", "matrix_exp"])
"""torch.linalg functions that wait for the device on every call, as measured on an H200 (data/sync_ops.json)."""

SOMETIMES_CHECKED = frozenset(["eigh", "eigvalsh", "svd", "svdvals", "pinv", "matrix_rank", "ldl_factor", "ldl_solve"])
"""The same for some sizes and arguments only."""

MASK_OPS = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "isnan",
        "isinf",
        "isfinite",
        "isin",
        "logical_and",
        "logical_or",
        "logical_not",
        "logical_xor",
        "isclose",
        "bool",
        "greater",
        "less",
        "greater_equal",
        "less_equal",
        "not_equal",
        "isneginf",
        "isposinf",
    ]
)

VIEWS = frozenset(
    [
        "view",
        "reshape",
        "t",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
        "expand",
        "narrow",
        "select",
        "flatten",
        "unflatten",
        "contiguous",
        "detach",
        "view_as",
        "expand_as",
        "swapaxes",
        "movedim",
        "diagonal",
        "as_strided",
        "ravel",
        "real",
        "imag",
        "alias",
        "requires_grad_",
        "float",
        "half",
        "double",
        "bfloat16",
        "type_as",
        "mT",
        "T",
        "H",
        "detach_",
        "data",
        "unfold",
    ]
)
"""Results that share the storage, or may (a conversion to the dtype it has already)."""

PLAIN_METHODS = frozenset(
    [
        "size",
        "dim",
        "ndimension",
        "stride",
        "storage_offset",
        "numel",
        "nelement",
        "element_size",
        "data_ptr",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "is_pinned",
        "get_device",
        "type",
        "is_shared",
        "untyped_storage",
        "storage",
        "is_signed",
        "has_names",
        "names",
        "is_set_to",
        "const_data_ptr",
        "__len__",
        "register_hook",
        "record_stream",
        "retain_grad",
        "backward",
    ]
)

PLAIN_ATTRIBUTES = frozenset(
    [
        "dtype",
        "layout",
        "requires_grad",
        "is_leaf",
        "is_sparse",
        "ndim",
        "itemsize",
        "nbytes",
        "is_quantized",
        "is_meta",
        "grad_fn",
        "names",
        "is_mps",
        "is_xpu",
        "__class__",
        "__dict__",
    ]
)

RNG_STATE = frozenset(
    [
        "manual_seed",
        "seed",
        "initial_seed",
        "get_rng_state",
        "set_rng_state",
        "fork_rng",
        "manual_seed_all",
        "seed_all",
        "get_rng_state_all",
        "set_rng_state_all",
        "get_state",
        "set_state",
    ]
)

RNG_SETS = frozenset(["manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"])
"""Of these, what changes the state of a generator that the graph may draw from; reading it was seen to pass (H200)."""

OBJECT_COLLECTIVES = frozenset(
    [
        "barrier",
        "monitored_barrier",
        "all_gather_object",
        "gather_object",
        "scatter_object_list",
        "broadcast_object_list",
        "send_object_list",
        "recv_object_list",
    ]
)

CONSTANT_FALSE = frozenset(
    [
        "torch.jit.is_scripting",
        "torch.jit.is_tracing",
        "torch.onnx.is_in_onnx_export",
        "torch.compiler.is_compiling",
        "torch.compiler.is_dynamo_compiling",
        "torch.compiler.is_exporting",
        "torch._dynamo.is_compiling",
        "torch._C._get_tracing_state",
    ]
)
