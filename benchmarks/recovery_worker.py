"""`examples/train_gpt.py`, with the time of each phase of its start written down.

Takes the example's options. With NVRX_BENCH_MARKS=DIR, DIR/<rank>.jsonl gets one line per mark:
{"mark": "main|imported|process_group|loaded|step", "t": <unix seconds>, "step": n, "cycle": n}
"""

import json
import os
import sys
import time
from pathlib import Path


def mark(phase: str, step: int = 0) -> None:
    """Append one mark. Opened each time: a rank may be killed, or forked, between any two."""
    if not (folder := os.environ.get("NVRX_BENCH_MARKS")):
        return
    cycle = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    line = json.dumps({"mark": phase, "t": time.time(), "step": step, "cycle": cycle})
    with open(Path(folder) / f"{os.environ.get('RANK', '0')}.jsonl", "a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    mark("main")  # before anything heavy is imported
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import train_gpt

    mark("imported")
    train_gpt.main(on_phase=mark)
