"""Networks as files for other runtimes: ONNX and torch.export, each checked in its own runtime; BatchNorm folding."""

from softprune.export.folding import fold_batch_norms
from softprune.export.onnx_file import to_onnx
from softprune.export.report import ExportReport
from softprune.export.torch_file import to_torch_export

__all__ = ["ExportReport", "fold_batch_norms", "to_onnx", "to_torch_export"]
