"""What the driver says of an H200, which every plan was measured on, and of it where portable kernels are forced."""

from dataclasses import replace

from onegraph.ops.cuda.build import PORTABLE_SHARED, PORTABLE_SM, Device

H200 = Device(
    sms=132, shared=227 << 10, sm_shared=228 << 10,
    clusters=(132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7),
)  # fmt: skip
PLAIN = replace(H200, shared=PORTABLE_SHARED, sm_shared=PORTABLE_SM, clusters=(132,) + (0,) * 15)
