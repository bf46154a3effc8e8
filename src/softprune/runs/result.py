"""The version of result.json, for those who write it and, without PyTorch, those who read it."""

RESULT_FORMAT = 1
