"""One module per measurement, each with `measure(lab) -> Section`. They say what they measure in their first line."""

NAMES = ("drain", "dispatch", "inflight", "enqueue", "memory", "flat", "selection", "idle", "startup")
