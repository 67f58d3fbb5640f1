"""Reliability, proven: faults are injected into real processes, a history is written, and a checker reads it.

    python -m tests.chaos --faults 1000 --seed 1          rounds of scenarios until so many faults were injected
    python -m tests.chaos --list                          the scenarios
    python -m tests.chaos.checker HISTORY...              check histories again (they are JSON lines)
    python -m tests.chaos.scale lines                     a long input, or `crowd`: much in flight; memory stays flat
    python -m tests.chaos.soak --minutes 30               slopes of memory, descriptors and keys

`checker` shares no code with the product: it sees JSON only.
"""
