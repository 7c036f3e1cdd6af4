"""What CUDA and torch say of a capture that they refuse; `$NAME` in the head of a rule."""

from onegraph.check.report import SILENT

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
PREVIOUS_ERROR = "CUDA error: operation failed due to a previous error during capture"
UNJOINED = "CUDA error: capturing stream has unjoined work"
UNCAPTURED = "CUDA error: dependency created on uncaptured work in another stream"
PAGEABLE = (
    "RuntimeError: Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned"
)
ON_DEFAULT = "RuntimeError: CUDA graphs must be captured on a non-default stream"

__all__ = ["NOT_PERMITTED", "ON_DEFAULT", "PAGEABLE", "PREVIOUS_ERROR", "SILENT", "UNCAPTURED", "UNJOINED"]
