"""Ranks that make reports together over gloo, ours or the peer's; run as a program by either's interpreter.

    exchange_ranks.py ours|nvrx WORLD KERNELS REPORTS

All ranks are forked from one process that has imported torch. Prints rank 0's milliseconds of each report.
"""

import json
import os
import sys
import tempfile
import time

import torch.distributed as dist

SECTIONS = ("load", "forward", "backward", "step")


def ours():
    from nvrx_slurm.straggler.exchange import OverTorch
    from nvrx_slurm.straggler.reporting import SCORES, ReportGenerator
    from nvrx_slurm.straggler.statistic import Statistic

    generator, exchange = ReportGenerator(frozenset(SCORES), True, "n0"), OverTorch(120)
    return Statistic, lambda sections, kernels: generator.generate(sections, kernels, exchange)


def nvrx():
    from nvidia_resiliency_ext.straggler.reporting import ReportGenerator
    from nvidia_resiliency_ext.straggler.statistics import Statistic

    scores = ["relative_perf_scores", "individual_perf_scores"]
    generator = ReportGenerator(scores_to_compute=scores, gather_on_rank0=True, node_name="n0")
    return Statistic, generator.generate_report


def report(who, folder, rank, world, kernels, reports):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    statistic, generate = {"ours": ours, "nvrx": nvrx}[who]()

    def summary(value):
        values = {"MIN": value, "MAX": value, "MED": value, "AVG": value, "STD": 0.0, "NUM": 9.0}
        return {statistic[name]: number for name, number in values.items()}

    names = [f"kernel_{index}_blk_128_1_1_grid_64_1_1" for index in range(kernels)]
    of_kernels = {name: summary(1.0 + index + rank) for index, name in enumerate(names)}
    of_sections = {name: summary(1.0 + rank) for name in SECTIONS}
    took = []
    for _ in range(reports):
        dist.barrier()
        begun = time.perf_counter()
        found = generate(of_sections, of_kernels)
        took.append((time.perf_counter() - begun) * 1e3)
    if rank == 0:
        scores = found.gpu_relative_perf_scores
        assert len(scores) == world
        assert min(scores.values()) == scores[world - 1] < scores[0] == 1.0, scores
        json.dump(took, sys.stdout)
        sys.stdout.flush()
    dist.barrier()


def main(who, world, kernels, reports):
    with tempfile.TemporaryDirectory(prefix="nvrx-straggler-") as folder:
        children = []
        for rank in range(1, world):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    report(who, folder, rank, world, kernels, reports)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        report(who, folder, 0, world, kernels, reports)
        for child in children:
            os.waitpid(child, 0)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
