"""A few seconds of work for every GPU of this node, timed and checked; printed as JSON.

Run as a program of its own by the check ``gpu-probe``: the only place in the health checks that imports
torch. Ends with code 3 and a sentence where there is no torch or no GPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_SIZE = 8192
_ROUNDS = 20
_COPY_BYTES = 1 << 30
NOTHING_TO_DO = 3


def main() -> None:
    """Print one entry per GPU: TFLOP/s, GB/s, a checksum, and what an all-reduce over all GPUs gave."""
    try:
        import torch
    except ImportError as error:
        print(f"torch is not installed: {error}")
        sys.exit(NOTHING_TO_DO)
    if not torch.cuda.is_available():
        print("torch sees no GPU")
        sys.exit(NOTHING_TO_DO)
    count = torch.cuda.device_count()
    found = [_work(torch, index) for index in range(count)]
    for entry, total in zip(found, _all_reduce(torch, count), strict=True):
        entry["all_reduce"] = total
    print(json.dumps(found))


def _timed(torch: Any, work: Any, rounds: int) -> float:
    """Return seconds per round."""
    work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(rounds):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / rounds


def _work(torch: Any, index: int) -> dict[str, Any]:
    with torch.cuda.device(index):
        # Made on the processor, so that every GPU has the same.
        generator = torch.Generator().manual_seed(1)
        left = torch.randn(_SIZE, _SIZE, generator=generator).to("cuda", torch.bfloat16)
        product = torch.empty_like(left)
        seconds = _timed(torch, lambda: torch.matmul(left, left, out=product), _ROUNDS)
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        copying = _timed(torch, lambda: target.copy_(source), _ROUNDS)
        return {
            "gpu": index,
            "tflops": 2 * _SIZE**3 / seconds / 1e12,
            "gbps": 2 * _COPY_BYTES / copying / 1e9,
            # Bit by bit: equal GPUs give equal results.
            "checksum": int(product.view(torch.int16).to(torch.int64).sum().item()),
            "model": torch.cuda.get_device_name(index),
        }


def _all_reduce(torch: Any, count: int) -> list[float | None]:
    """Return the sum of 1…count as every GPU has it; None with one GPU."""
    if count < 2:
        return [None] * count
    tensors = [torch.full((1 << 20,), float(index + 1), device=f"cuda:{index}") for index in range(count)]
    torch.cuda.nccl.all_reduce(tensors)
    return [float(tensor.min().item() + tensor.max().item()) / 2 for tensor in tensors]


if __name__ == "__main__":
    main()
