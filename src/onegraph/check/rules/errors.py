"""What CUDA and torch say of a capture that they refuse; `$NAME` in the head of a rule."""

from onegraph.check.report import SILENT as SILENT  # which is no error, and stands in heads as others do

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
PREVIOUS_ERROR = "CUDA error: operation failed due to a previous error during capture"
UNJOINED = "CUDA error: capturing stream has unjoined work"
UNCAPTURED = "CUDA error: dependency created on uncaptured work in another stream"
PAGEABLE = (
    "RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned"
)
ON_DEFAULT = "RuntimeError: CUDA graphs must be captured on a non-default stream"
IN_CAPTURE = "RuntimeError: Cannot prepare for replay during capturing stage"
NO_CAPTURE_MODE = "RuntimeError: Attempt to increase offset for a CUDA generator not in capture mode"
