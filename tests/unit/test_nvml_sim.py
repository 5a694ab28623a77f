"""The simulated driver behind the real nvidia-ml-py: any answer, and any state file, is taken as one."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from health_world import CHECKS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_node import SMALL, SimulatedNode, in_child, library, load_simulator

from nvrx_slurm.agent.gpus import GpuError
from nvrx_slurm.agent.location import DomainError, NvmlFabric, find_domain
from nvrx_slurm.agent.nvml import open_gpus
from nvrx_slurm.devcluster.hardware import Shape
from nvrx_slurm.devcluster.hardware.nvml_sim import CALLS, parse_state, state_text
from nvrx_slurm.health.nvml import NvmlCode, NvmlError, RealNvml
from nvrx_slurm.health.runner import run_one
from nvrx_slurm.health.stage import Stage
from nvrx_slurm.health.unavailable import UnavailableError

OF_CHECKS = [name for name in CHECKS if name.startswith(("gpu-", "nvlink-", "nic-affinity"))]
CODES = [*NvmlCode, 31, 12345]
READINGS = {
    ("gpu-lost", NvmlCode.GPU_IS_LOST),
    ("gpu-lost", NvmlCode.RESET_REQUIRED),
    ("gpu-driver", NvmlCode.LIB_RM_VERSION_MISMATCH),
}
"""Error codes that say what the check looks for."""
Told = list[tuple[int, str, str, str]]


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    return SimulatedNode(tmp_path)


def of_driver(node: SimulatedNode, ask: Callable[[RealNvml], object]) -> object:
    """Return what ``ask`` gets from the driver, in a process that has it loaded."""

    def work() -> object:
        load_simulator(node.hardware.nvml_state)
        return ask(RealNvml())

    return in_child(work, object)


@pytest.mark.parametrize("call", CALLS)
def test_no_error_of_any_call_breaks_a_check_or_fails_a_node(node: SimulatedNode, call: str) -> None:
    node.baseline()

    def work() -> Told:
        found: Told = []
        for code in CODES:
            node.inject(f"nvml.{call}={int(code)}")
            for name in OF_CHECKS:
                if CHECKS[name].opt_in:
                    continue
                fit = CHECKS[name].settings(**({"enabled": False} if name == "gpu-mig" else {}))
                results = run_one(CHECKS[name], node.node(Stage.PROLOG), fit).results
                found += [(code, name, result.status.value, result.evidence) for result in results]
        return found

    told = in_child(work, Told)
    assert {code for code, *_ in told} == set(map(int, CODES))
    assert {name for _, name, *_ in told} == {name for name in OF_CHECKS if not CHECKS[name].opt_in}
    assert [one for one in told if "the check itself failed" in one[3] or not one[3]] == []
    assert {(name, code) for code, name, status, _ in told if status == "fail"} <= READINGS


@pytest.mark.parametrize("code", ["GPU_IS_LOST", "UNKNOWN", "NOT_SUPPORTED", "TIMEOUT", "12345"])
def test_an_agent_takes_any_error_of_any_call_as_one(node: SimulatedNode, code: str) -> None:
    def work() -> list[str]:
        load_simulator(node.hardware.nvml_state)
        said = []
        for call in CALLS:
            node.inject(f"nvml.{call}={code}")
            try:
                gpus = open_gpus(["0", "GPU-00000001"])
                said += [f"{gpu.used_mb():.0f} {len(gpu.processes())} {gpu.pci_address}" for gpu in gpus]
            except GpuError as error:
                said.append(str(error))
            try:
                said.append(str(len(NvmlFabric().gpus())))
            except DomainError as error:
                said.append(str(error))
            node.inject(f"nvml.{call}=ok")
        return said

    assert len(in_child(work, list[str])) >= 2 * len(CALLS)


def test_what_an_agent_asks_is_answered(node: SimulatedNode) -> None:
    node.inject("gpu.1.process=77", "gpu.1.memory_used=100")

    def work() -> list[object]:
        load_simulator(node.hardware.nvml_state)
        gpu = open_gpus(["GPU-00000001"])[0]
        fabric = NvmlFabric().gpus()
        return [gpu.pci_address, gpu.used_mb(), dict(gpu.processes()), len(fabric), fabric[0].registered]

    assert in_child(work, list[object]) == ["0000:22:00.0", 700.0, {"77": 600.0}, 2, True]


def test_the_nvlink_domain_of_a_rack_is_told_as_it_is(node: SimulatedNode) -> None:
    for gpu in range(2):
        node.hardware.set_nvml(f"gpu.{gpu}.fabric_uuid", "3b00" + "11" * 14)
        node.hardware.set_nvml(f"gpu.{gpu}.fabric_clique", "7")

    def work() -> str:
        load_simulator(node.hardware.nvml_state)
        return find_domain({}, NvmlFabric())

    assert in_child(work, str) == "3b001111-1111-1111-1111-111111111111.7"


def test_more_processes_than_asked_for_are_all_told(node: SimulatedNode) -> None:
    node.inject(*(f"gpu.0.process={pid}" for pid in range(1, 41)))
    assert of_driver(node, lambda nvml: nvml.processes(0)) == list(range(1, 41))


def test_every_call_sees_the_state_as_it_is_then(node: SimulatedNode) -> None:
    def ask(nvml: RealNvml) -> list[int]:
        seen = []
        for count in range(3):
            node.inject(f"gpu.1.ecc_uncorrectable={count}")
            seen.append(nvml.uncorrected_ecc(1))
        return seen

    assert of_driver(node, ask) == [0, 1, 2]


def test_a_gpu_that_is_gone_is_not_listed_and_the_next_moves_up(node: SimulatedNode) -> None:
    before = of_driver(node, lambda nvml: [nvml.uuid(gpu) for gpu in range(nvml.count())])
    node.inject("gpu.0.gone")
    after = of_driver(node, lambda nvml: [nvml.uuid(gpu) for gpu in range(nvml.count())])
    assert isinstance(before, list)
    assert after == before[1:]


def test_threads_may_ask_while_the_state_changes(node: SimulatedNode) -> None:
    def ask(nvml: RealNvml) -> list[str]:
        trouble: list[str] = []
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                try:
                    nvml.remapped_rows(1)
                    nvml.nvlink_errors(0, 1)
                except NvmlError as error:
                    trouble.append(str(error))

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for count in range(200):
            node.inject(f"nvlink.0.1.recovery={count}")
        over.set()
        for thread in threads:
            thread.join()
        return trouble

    assert of_driver(node, ask) == []


def test_what_the_simulator_does_not_answer_is_a_function_that_is_not_found(node: SimulatedNode) -> None:
    def work() -> int:
        import pynvml

        load_simulator(node.hardware.nvml_state)
        pynvml.nvmlInit()
        try:
            pynvml.nvmlDeviceGetSerial(pynvml.nvmlDeviceGetHandleByIndex(0))
        except pynvml.NVMLError as error:
            return int(error.value)
        return 0

    assert in_child(work, int) == NvmlCode.FUNCTION_NOT_FOUND


def test_a_handle_that_is_none_is_an_invalid_argument(node: SimulatedNode) -> None:
    def work() -> list[int]:
        load_simulator(node.hardware.nvml_state)
        lib = ctypes.CDLL("libnvidia-ml.so.1")
        count = ctypes.c_uint()
        before = lib.nvmlDeviceGetMigMode(None, ctypes.byref(count), ctypes.byref(count))
        lib.nvmlInit_v2()
        wrong = [None, ctypes.c_void_p(8), ctypes.c_void_p(2**63)]
        return [before] + [
            lib.nvmlDeviceGetMigMode(one, ctypes.byref(count), ctypes.byref(count)) for one in wrong
        ]

    assert in_child(work, list[int]) == [NvmlCode.UNINITIALIZED] + [NvmlCode.INVALID_ARGUMENT] * 3


KEYS = [
    "gpus",
    "links",
    "driver",
    "gpu.0.uuid",
    "gpu.1.pci",
    "gpu.0.ecc",
    "gpu.0.processes",
    "gpu.0.gone",
    "gpu.1.lost",
    "gpu.1.fabric_state",
    "gpu.0.fabric_uuid",
    "gpu.0.link.1.up",
    "error.nvmlDeviceGetUUID",
    "gpu.0.memory_used_mib",
    "gpu.0.field.230",
    "gpu.1.throttle",
]
NONSENSE = st.one_of(
    st.integers().map(str), st.text(max_size=20), st.sampled_from(["9" * 300, "1:2 3:4 x", "a" * 32, "-1"])
)
LINES = st.lists(st.tuples(st.sampled_from(KEYS), NONSENSE), max_size=8)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines=LINES, junk=st.binary(max_size=200), cut=st.integers(0, 300))
def test_any_state_file_gives_readings_or_errors(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, str]], junk: bytes, cut: int
) -> None:
    node = SimulatedNode(tmp_path_factory.mktemp("node"))
    whole = node.hardware.nvml_state.read_bytes()
    changed = whole.removesuffix(b"end\n") + "".join(f"{k} {v}\n" for k, v in lines).encode(errors="replace")
    contents = [changed + b"end\n", junk, whole[:cut], b"nvml-sim 1\n" + junk + b"\nend\n"]

    def ask() -> Told:
        found: Told = []
        for content in contents:
            node.hardware.nvml_state.write_bytes(content)
            for name in ("gpu-count", "gpu-lost", "gpu-ecc", "gpu-memory", "nvlink-links", "gpu-fabric"):
                results = run_one(CHECKS[name], node.node(), CHECKS[name].defaults).results
                found += [(0, name, result.status.value, result.evidence) for result in results]
        return found

    told = in_child(ask, Told)
    assert len(told) >= 6 * len(contents)
    assert [one for one in told if "the check itself failed" in one[3]] == []


@settings(deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z.0-9]{1,20}", fullmatch=True), st.from_regex(r"[ -~]{0,20}", fullmatch=True)
    )
)
def test_the_state_file_is_read_as_it_was_written(values: dict[str, str]) -> None:
    assert parse_state(state_text(values)) == values


@given(st.text(max_size=60), st.integers(0, 60))
def test_what_is_no_state_file_is_refused(text: str, cut: int) -> None:
    whole = state_text({"gpus": "2", "driver": "1"})
    for other in (text, whole[: min(cut, len(whole) - 1)]):
        with pytest.raises(ValueError, match=r"."):
            parse_state(other)


def test_a_program_finds_the_library_by_its_path_alone(node: SimulatedNode) -> None:
    """As the dynamic linker does on a node."""
    code = "from nvrx_slurm.health.nvml import RealNvml; print(RealNvml().count())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"LD_LIBRARY_PATH": str(library().parent), "NVRX_NVML_SIM_STATE": str(node.hardware.nvml_state)},
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    assert done.stdout == f"{SMALL.gpus}\n"


def test_the_largest_node_fits_into_the_state_file(tmp_path: Path) -> None:
    node = SimulatedNode(tmp_path, Shape(gpus=16, links=36, nics=32))
    for gpu in range(16):
        node.inject(*(f"nvlink.{gpu}.{link}=down" for link in range(36)))
    assert of_driver(node, lambda nvml: [nvml.nvlink_active(15, 35), nvml.count()]) == [False, 16]


def test_without_a_driver_nvml_does_not_start(node: SimulatedNode) -> None:
    node.hardware.nvml_state.unlink()

    def work() -> str:
        load_simulator(node.hardware.nvml_state)
        try:
            RealNvml()
        except (NvmlError, UnavailableError) as error:
            return str(error)
        return ""

    assert in_child(work, str) == "NVML_ERROR_DRIVER_NOT_LOADED"
