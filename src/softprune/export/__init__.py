"""Networks as files for other runtimes (ONNX, torch.export), verified in their runtimes, and BatchNorm folding."""

from softprune.export.folding import fold_batch_norms
from softprune.export.formats import to_onnx, to_torch_export
from softprune.export.writing import ExportReport

__all__ = ["ExportReport", "fold_batch_norms", "to_onnx", "to_torch_export"]
