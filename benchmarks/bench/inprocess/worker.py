"""One rank of a wrapped function that meets the faults of a plan; a program for ours and the peer's.

    python worker.py PLAN FOLDER

PLAN is JSON, see `Plan` in plans.py. What happens when is appended to FOLDER/rank<initial rank>.jsonl, in
seconds of CLOCK_MONOTONIC, which all processes of a machine share. Of ours it imports only what is measured.
"""

import ctypes
import datetime
import gc
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

if os.environ.get("NVRX_BENCH_WHO") == "peer":
    from nvidia_resiliency_ext import inprocess
else:
    from nvrx_slurm import inprocess

PLAN = json.loads(sys.argv[1])
FOLDER = sys.argv[2]
RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])
STEP_S = 0.005
GROUP_TIMEOUT = datetime.timedelta(seconds=30)
MARKS = os.open(os.path.join(FOLDER, f"rank{RANK}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def mark(what, **more):
    line = json.dumps({"mark": what, "t": time.monotonic(), **more})
    os.write(MARKS, f"{line}\n".encode())


def seconds(name):
    return datetime.timedelta(seconds=PLAN[name])


def wrapper():
    timeouts = {}
    if PLAN["soft_s"]:
        timeouts = {"soft_timeout": seconds("soft_s"), "hard_timeout": seconds("hard_s")}
        timeouts["termination_grace_time"] = datetime.timedelta(seconds=1)
    store = {"host_name": "127.0.0.1", "port": int(os.environ["MASTER_PORT"])}
    return inprocess.Wrapper(store_kwargs=store, **timeouts)


def train(call: inprocess.CallWrapper = None):
    iteration = call.iteration
    mark("enter", iteration=iteration)
    if PLAN["group"]:
        store = dist.FileStore(os.path.join(FOLDER, f"store{iteration}"), int(os.environ["WORLD_SIZE"]))
        dist.init_process_group(
            "gloo",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=GROUP_TIMEOUT,
        )
        mark("group", iteration=iteration)
    for _ in range(int(PLAN["steady_s"] / STEP_S)):
        call.ping()
        time.sleep(STEP_S)
    if iteration < PLAN["faults"]:
        if PLAN["victim"] == RANK:
            # The others must be where they are to be met.
            time.sleep(0.3)
            call.ping()
            mark("fault", iteration=iteration)
            strike(PLAN["fault"])
        if PLAN["group"] and PLAN["fault"] != "c_collective":
            dist.all_reduce(torch.ones(1))
        while True:
            call.ping()
            time.sleep(STEP_S)
    if PLAN["fault"] == "pings":
        measure_pings(call)
    mark("return")
    if PLAN["group"]:
        # Without it a rank would leave while others are still connecting to it.
        dist.barrier()
        dist.destroy_process_group()


def strike(fault):
    if fault == "exception":
        raise ValueError("on purpose")
    if fault == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "livelock":
        while True:
            time.sleep(STEP_S)
    if fault == "c_sleep":
        ctypes.CDLL(None).sleep(3600)
    if fault == "c_gil":
        ctypes.PyDLL(None).sleep(3600)
    if fault == "c_collective":
        # The others never take part, and only the end of the group ends it.
        dist.all_reduce(torch.ones(1))
    sys.exit(f"{fault!r} is no fault, or did not strike")


def measure_pings(call):
    ping, count = call.ping, 10_000
    for _ in range(PLAN["repetitions"]):
        began = time.perf_counter_ns()
        for _ in range(count):
            ping()
        mark("pings", ns=(time.perf_counter_ns() - began) / count)


if __name__ == "__main__":
    ballast = [[number] for number in range(PLAN["objects"])]
    gc.collect()
    mark("call", pid=os.getpid())
    try:
        wrapper()(train)()
    finally:
        mark("end")
