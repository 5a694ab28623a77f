"""`examples/train_gpt.py` that does itself harm when a file says so.

Takes the example's options. After each step rank R looks for the file `rank_R` in $NVRX_SOAK_ORDERS, removes
it, and does what it says: exception, exit, orphan, livelock or blocked.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path


def obey(phase: str, step: int) -> None:
    if phase != "step":
        return
    order = Path(os.environ["NVRX_SOAK_ORDERS"]) / f"rank_{os.environ['RANK']}"
    try:
        what = order.read_text()
        order.unlink()
    except FileNotFoundError:
        return
    match what:
        case "exception":
            raise RuntimeError("ordered to fail")
        case "exit":
            os._exit(3)
        case "orphan":
            subprocess.Popen(["sh", "-c", "trap '' TERM HUP; exec sleep 1000"], start_new_session=True)
            os._exit(4)
        case "livelock":
            while True:
                pass
        case "blocked":
            ctypes.PyDLL(None).sleep(1000)
        case _:
            raise ValueError(f"no such order: {what!r}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import train_gpt

    train_gpt.main(on_phase=obey)
