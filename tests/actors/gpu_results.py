"""What a GPU test measured, as one JSON line: printed, and appended to the file that REPLAYSSM_GPU_RESULTS names."""

import json
import os
import time
from contextlib import contextmanager

import torch


@contextmanager
def measured(test: str, **case):
    """A dict to put numbers into; written out with the card and the seconds, also when the test fails."""
    numbers: dict[str, object] = {}
    start = time.perf_counter()
    passed = False
    try:
        yield numbers
        passed = True
    finally:
        torch.cuda.synchronize()
        row = {
            "test": test,
            **case,
            **numbers,
            "passed": passed,
            "seconds": round(time.perf_counter() - start, 3),
            "card": torch.cuda.get_device_name(),
        }
        line = json.dumps(row)
        print(line)
        if path := os.environ.get("REPLAYSSM_GPU_RESULTS"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
