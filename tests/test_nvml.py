"""nvml.py over the real nvidia-ml-py over the fake driver."""

from __future__ import annotations

import getpass
import os
import subprocess
import sys
import time

import psutil
import pynvml
import pytest
from fake_driver import GIB, gpu, link, mig, process

from lightning_gpu_tools import nvml
from lightning_gpu_tools.errors import NvmlUnavailableError
from lightning_gpu_tools.nvml import messages
from lightning_gpu_tools.nvml.probe import GpuProbe


def read(driver, *gpus):
    driver.gpus = list(gpus)
    return nvml.read_gpus()


def freeze(driver, ago_s: float = 100.0) -> None:
    """Stop the driver's clock at the present; its quantities began this long ago."""
    with driver.change():
        driver.now_s = time.time()
        driver.start_s = driver.now_s - ago_s


# read_gpus


def test_a_reading_has_what_selection_needs(driver):
    (reading,) = read(
        driver,
        gpu(
            memory_free="21GiB",
            utilization=90,
            processes=[process(memory="3GiB")],
            compute_mode="exclusive_process",
            pci=(1, 0x4B, 0),
        ),
    )
    assert reading.index == 0
    assert reading.uuid == driver.gpus[0].uuid
    assert reading.name == "NVIDIA H200"
    assert reading.pci_bus_id == "00000001:4B:00.0"
    assert reading.memory_total_bytes == 80 * GIB
    assert reading.memory_free_bytes == 21 * GIB
    assert reading.utilization_percent == 90
    assert [(one.pid, one.memory_used_bytes) for one in reading.processes] == [(os.getpid(), 3 * GIB)]
    assert reading.compute_mode == "exclusive_process"
    assert reading.mig_mode is False
    assert reading.integrated is False
    assert reading.error is None


def test_gpus_are_in_pci_order_whatever_order_the_driver_gives(driver):
    gpus = read(driver, gpu(pci=(0, 0x80, 0)), gpu(pci=(1, 0x10, 0)), gpu(pci=(0, 0x10, 0)), gpu(pci=(0, 0x10, 1)))
    assert [reading.uuid for reading in gpus] == [driver.gpus[i].uuid for i in (2, 3, 0, 1)]
    assert [reading.index for reading in gpus] == [0, 1, 2, 3]


def test_cuda_visible_devices_hides_nothing(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(read(driver, gpu(), gpu())) == 2


def test_a_machine_without_gpus_has_no_readings(driver):
    assert read(driver) == ()


def test_free_memory_is_the_drivers_word_not_total_minus_used(driver):
    (reading,) = read(driver, gpu(memory_total="80GiB", memory_free="70GiB", memory_reserved=GIB))
    assert reading.memory_free_bytes == 70 * GIB


def test_utilization_is_the_mean_over_the_buffer_not_the_last_moment(driver):
    freeze(driver)
    (reading,) = read(driver, gpu(utilization=[(0, 0), (90, 100)], sample_period_s=0.5, sample_depth=40))
    assert reading.utilization_percent == pytest.approx(50, abs=3)  # idle for 10 s, busy for 10 s


def test_unevenly_spaced_samples_count_by_their_time(driver):
    freeze(driver)
    end_s = driver.now_s
    samples = [(end_s - 2.0, 0), (end_s - 1.5, 0), (end_s - 1.0, 100), (end_s, 40)]
    (reading,) = read(driver, gpu(samples=samples))
    assert reading.utilization_percent == pytest.approx((0.5 * 0 + 0.5 * 0 + 0.5 * 100 + 1.0 * 40) / 2.5)


def test_impossible_and_unordered_samples_do_no_harm(driver):
    freeze(driver)
    end_s = driver.now_s
    samples = [(end_s, 50), (end_s - 1, 4_294_967_295), (end_s - 2, 50), (end_s - 1.5, 101)]
    (reading,) = read(driver, gpu(samples=samples))
    assert reading.utilization_percent == 50


def test_a_buffer_that_was_not_filled_for_long_is_not_the_present(driver):
    freeze(driver)
    stale = [(driver.now_s - 300 + i, 100) for i in range(100)]
    (reading,) = read(driver, gpu(samples=stale, utilization_rate=3))
    assert reading.utilization_percent == 3


def test_a_driver_without_a_buffer_gives_its_momentary_reading(driver):
    with driver.change():
        driver.missing_functions = ["nvmlDeviceGetSamples"]
    (reading,) = read(driver, gpu(utilization=100, utilization_rate=7))
    assert reading.utilization_percent == 7


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"memory_total": None}, "memory_free_bytes"),
        ({"memory_total": None}, "memory_total_bytes"),
        ({"utilization": None}, "utilization_percent"),
        ({"processes": None}, "processes"),
        ({"compute_mode": None}, "compute_mode"),
        ({"mig_capable": False}, "mig_mode"),
    ],
)
def test_what_is_not_supported_is_none_and_no_error(driver, fields, name):
    other, reading = read(driver, gpu(), gpu(**fields))
    assert getattr(reading, name) is None
    assert getattr(other, name) is not None
    assert reading.error is None


@pytest.mark.parametrize("error", ["NOT_SUPPORTED", "NO_PERMISSION"])
def test_processes_that_may_not_be_seen_are_unknown_not_none_at_all(driver, error):
    (reading,) = read(driver, gpu(errors={"nvmlDeviceGetComputeRunningProcesses": error}))
    assert reading.processes is None
    assert reading.error is None


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("GPU_IS_LOST", "dmesg"),
        ("RESET_REQUIRED", "--gpu-reset"),
        ("TIMEOUT", "did not answer in time"),
        ("UNKNOWN", "'Unknown Error'"),
        ("IRQ_ISSUE", "nvidia-smi"),
    ],
)
@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetSamples", "nvmlDeviceGetComputeMode"])
def test_a_broken_gpu_is_listed_with_the_reason_and_hurts_no_other(driver, function, error, says):
    good, broken, last = read(driver, gpu(), gpu(errors={function: error}), gpu())
    assert says in broken.error
    assert broken.uuid == driver.gpus[1].uuid
    assert broken.memory_free_bytes is None
    assert good.error is last.error is None
    assert last.index == 2


def test_a_gpu_that_cannot_even_be_opened_keeps_its_place(driver):
    gpus = read(driver, gpu(pci=(0, 9, 0)), gpu(lost=True), gpu(pci=(0, 2, 0)), gpu(pci=(0, 5, 0)))
    assert [reading.uuid for reading in gpus] == [
        driver.gpus[2].uuid,
        None,
        driver.gpus[3].uuid,
        driver.gpus[0].uuid,
    ]
    assert [reading.index for reading in gpus] == [0, 1, 2, 3]
    assert "fallen off the bus" in gpus[1].error


def test_a_gpu_without_permission_says_what_to_check(driver):
    (reading,) = read(driver, gpu(errors={"nvmlDeviceGetUUID": "NO_PERMISSION"}))
    assert "/dev/nvidia" in reading.error


def test_a_lost_gpu_is_noticed_and_read_again_when_it_is_back(driver):
    driver.gpus = [gpu(), gpu()]
    with nvml.session():
        assert [reading.error for reading in nvml.read_gpus()] == [None, None]
        with driver.change():
            driver.gpus[0].lost = True
        lost, other = nvml.read_gpus()
        assert "fallen off the bus" in lost.error
        assert other.error is None
        with driver.change():
            driver.gpus[0].lost = False
        assert [reading.error for reading in nvml.read_gpus()] == [None, None]


# Processes


@pytest.mark.skipif(not nvml.pids_are_ours(), reason="inside a PID namespace the driver's numbers name nobody")
def test_a_visible_process_has_a_user_and_a_name(driver):
    (reading,) = read(driver, gpu(processes=[process()]))
    (found,) = reading.processes
    assert found.user == getpass.getuser()
    assert found.name == psutil.Process().name()


def test_a_process_that_is_gone_or_hidden_has_a_pid_only(driver, run_python):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()  # its number is free again
    (reading,) = read(driver, gpu(processes=[process(child.pid, None)]))
    (found,) = reading.processes
    assert (found.pid, found.memory_used_bytes, found.user, found.name) == (child.pid, None, None, None)


def test_inside_another_pid_namespace_the_drivers_numbers_name_nobody(driver, run_python):
    driver.gpus = [gpu(processes=[process(1)])]  # there is a process 1 in every namespace
    code = "from lightning_gpu_tools import nvml; print(nvml.read_gpus()[0].processes[0].user)"
    result = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unshare" in result.stderr:
        pytest.skip(f"no PID namespaces for this user: {result.stderr.strip()}")
    assert result.stdout == "None\n", result.stderr


def test_drawing_and_computing_processes_are_told_apart(driver):
    processes = [process(3, graphics=True), process(2), process(2, graphics=True)]
    (reading,) = read(driver, gpu(processes=processes))
    assert [(one.pid, one.graphics_only) for one in reading.processes] == [(2, False), (3, True)]


@pytest.mark.skipif(not hasattr(pynvml, "nvmlDeviceGetComputeRunningProcesses_v2"), reason="nvidia-ml-py < 12.550")
def test_an_older_driver_lists_processes_by_its_older_function(driver):
    with driver.change():
        driver.missing_functions = [
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGraphicsRunningProcesses_v3",
        ]
    (reading,) = read(driver, gpu(processes=[process(5)]))
    assert [one.pid for one in reading.processes] == [5]


def test_a_driver_too_old_for_any_process_list_leaves_them_unknown(driver):
    with driver.change():
        driver.missing_functions = [
            f"nvmlDeviceGet{kind}RunningProcesses_v{version}" for kind in ("Compute", "Graphics") for version in (2, 3)
        ]
    (reading,) = read(driver, gpu(processes=[process(5)]))
    assert reading.processes is None
    assert reading.error is None


# MIG


def test_mig_instances_have_readings_of_their_own(driver):
    (reading,) = read(
        driver,
        gpu(
            mig=[mig(memory_total="10GiB", memory_free="4GiB"), mig(gpu_instance=7, compute_instance=2)],
            processes=[process(10, "2GiB", gpu_instance=7)],
        ),
    )
    assert reading.mig_mode is True
    assert reading.utilization_percent is None
    first, second = reading.mig_instances
    assert first.uuid == driver.gpus[0].mig[0].uuid
    assert (first.memory_total_bytes, first.memory_free_bytes) == (10 * GIB, 4 * GIB)
    assert first.processes == ()
    assert first.utilization_percent is None
    assert first.mig_mode is False
    assert [one.pid for one in second.processes] == [10]
    assert (second.mig_gpu_instance_id, second.mig_compute_instance_id) == (7, 2)
    assert second.index == reading.index
    assert second.name == "NVIDIA H200 MIG 1g.10gb"


def test_mig_mode_without_instances_is_a_divided_gpu_with_nothing_to_use(driver):
    (reading,) = read(driver, gpu(mig=[]))
    assert reading.mig_mode is True
    assert reading.mig_instances == ()
    assert reading.error is None


def test_one_broken_mig_instance_hurts_no_other(driver):
    (reading,) = read(driver, gpu(mig=[mig(errors={"nvmlDeviceGetMemoryInfo": "UNKNOWN"}), mig()]))
    broken, good = reading.mig_instances
    assert "Unknown Error" in broken.error
    assert broken.uuid == driver.gpus[0].mig[0].uuid
    assert good.error is None
    assert good.memory_free_bytes == 10 * GIB


def test_a_slot_without_an_instance_hides_no_later_one(driver):
    (reading,) = read(driver, gpu(mig=[None, mig(), None, mig()]))
    assert [one.uuid for one in reading.mig_instances] == [driver.gpus[0].mig[slot].uuid for slot in (1, 3)]


def test_index_of_instances_is_that_of_their_gpu_in_pci_order(driver):
    first, second = read(driver, gpu(pci=(0, 9, 0), mig=[mig()]), gpu(pci=(0, 2, 0)))
    assert (first.mig_mode, second.mig_mode) == (False, True)
    assert second.mig_instances[0].index == 1


# GPUs that share the memory of the host


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "NVIDIA GB10", "memory_total": None, "addressing_mode": "ats"},
        {"name": "NVIDIA GB10", "memory_total": "1GiB"},  # a driver that gives misleading numbers
        {"name": "NVIDIA Thor", "memory_total": None, "addressing_mode": "none"},
        {"name": "Orin (nvgpu)", "memory_total": None, "addressing_mode": None},
        pytest.param(
            {"name": "NVIDIA Something New", "memory_total": None, "addressing_mode": "ats"},
            marks=pytest.mark.skipif(
                not hasattr(pynvml, "nvmlDeviceGetAddressingMode"), reason="nvidia-ml-py < 13.580"
            ),
        ),
    ],
)
def test_an_integrated_gpu_has_the_available_memory_of_the_host(driver, fields):
    (reading,) = read(driver, gpu(**fields))
    host = psutil.virtual_memory()
    assert reading.integrated is True
    assert reading.memory_total_bytes == host.total
    assert abs(reading.memory_free_bytes - host.available) < 2 * GIB


@pytest.mark.parametrize("mode", ["hmm", "none", None])
def test_a_discrete_gpu_that_hides_its_memory_is_not_given_that_of_the_host(driver, mode):
    (reading,) = read(driver, gpu(memory_total=None, addressing_mode=mode))
    assert reading.memory_free_bytes is None
    assert reading.integrated is None


@pytest.mark.parametrize("name", ["NVIDIA GB100", "NVIDIA GB200", "NVIDIA H200"])
def test_a_name_that_only_begins_like_an_integrated_one_is_discrete(driver, name):
    (reading,) = read(driver, gpu(name=name, memory_free="7GiB"))
    assert (reading.integrated, reading.memory_free_bytes) == (False, 7 * GIB)


def test_a_grace_hopper_has_memory_of_its_own(driver):
    (reading,) = read(driver, gpu(memory_free="90GiB", memory_total="96GiB", addressing_mode="ats"))
    assert reading.memory_free_bytes == 90 * GIB
    assert reading.integrated is False


# What it costs


def test_repeated_readings_take_few_calls(driver):
    driver.gpus = [gpu(utilization=30) for _ in range(4)]
    with nvml.session():
        nvml.read_gpus()
        first = driver.calls_by_gpu()
        driver.forget_calls()
        nvml.read_gpus()
        second = driver.calls_by_gpu()
    # In the C library; pynvml needs two for the samples, so that it is 6 calls of pynvml.
    assert set(second.values()) == {7}
    assert set(first.values()) == {10}  # and the one that gives the handle, which has no handle yet
    assert sum(call.function == "nvmlDeviceGetHandleByIndex_v2" for call in driver.calls()) == 0


def test_nothing_is_opened_by_importing(driver, run_python):
    result = run_python("-c", "import lightning_gpu_tools.nvml")
    assert result.returncode == 0, result.stderr
    assert driver.calls() == []


def test_everything_is_closed_again(driver):
    read(driver, gpu())
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


# Sessions


def unavailable(driver, **state) -> str:
    with driver.change():
        vars(driver).update(state)
    with pytest.raises(NvmlUnavailableError) as caught, nvml.session():
        pass
    return str(caught.value)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"library_missing": True}, ["libnvidia-ml.so.1", "nvidia-smi", "--gpus all", "utility"]),
        ({"init_error": "DRIVER_NOT_LOADED"}, ["not loaded", "modprobe"]),
        ({"init_error": "LIB_RM_VERSION_MISMATCH"}, ["updated", "Reboot"]),
        ({"init_error": "NO_PERMISSION"}, ["/dev/nvidiactl"]),
        ({"init_error": "UNKNOWN"}, ["Unknown Error", "nvidia-smi"]),
        ({"missing_functions": ["nvmlInitWithFlags"]}, ["too old"]),
    ],
    ids=lambda value: None if isinstance(value, list) else next(iter(value.values())),
)
def test_without_a_driver_the_message_says_why_and_what_to_do(driver, state, says):
    message = unavailable(driver, **state)
    assert all(part in message for part in says), message


@pytest.mark.parametrize(("platform", "says"), [("darwin", "macOS"), ("win32", "nvml.dll")])
def test_other_systems_get_a_message_of_their_own(driver, monkeypatch, platform, says):
    monkeypatch.setattr(messages.sys, "platform", platform)
    error = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert says in messages.why_unavailable(error)


def test_a_driver_that_fails_later_is_unavailable_too(driver):
    with driver.change():
        driver.errors = {"nvmlDeviceGetCount_v2": "DRIVER_NOT_LOADED"}
    with pytest.raises(NvmlUnavailableError, match="not loaded"):
        nvml.read_gpus()


def test_a_session_survives_an_error_inside_and_closes(driver):
    with pytest.raises(KeyError), nvml.session():
        raise KeyError
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


def test_a_forked_child_reads_in_a_session_of_its_parent(driver, run_python):
    driver.gpus = [gpu(memory_free="21GiB")]
    code = """
import os
from lightning_gpu_tools import nvml
from lightning_gpu_tools.nvml import messages
with nvml.session():
    nvml.read_gpus()
    if (child := os.fork()) == 0:
        with nvml.session():
            print(nvml.read_gpus()[0].memory_free_bytes // 2**30, flush=True)
    else:
        assert os.waitpid(child, 0)[1] == 0
        assert nvml.read_gpus()[0].error is None
"""
    result = run_python("-W", "ignore", "-c", code)
    assert (result.returncode, result.stdout) == (0, "21\n"), result.stderr


def test_a_forked_child_does_not_close_what_its_parent_opened(driver, run_python):
    code = """
import os
from lightning_gpu_tools import nvml
from lightning_gpu_tools.nvml import messages
with nvml.session():
    child = os.fork()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    assert run_python("-W", "ignore", "-c", code).returncode == 0
    assert [call.function for call in driver.calls()] == ["nvmlInitWithFlags", "nvmlShutdown"]


def test_threads_read_at_once(driver):
    from concurrent.futures import ThreadPoolExecutor

    driver.gpus = [gpu(), gpu()]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: len(nvml.read_gpus()), range(40)))
    assert results == [2] * 40
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()


# Topology


def test_links_are_told_for_every_pair(driver):
    driver.gpus = [gpu(), gpu(), gpu(numa_node=1)]
    with driver.change():
        driver.links = [link(0, 1, nvlink=True, level=10)]
    uuids = [card.uuid for card in driver.gpus]
    links = {found.uuids: (found.nvlink, found.topology_level) for found in nvml.read_links(uuids)}
    assert links == {
        tuple(sorted(uuids[:2])): (True, 10),
        tuple(sorted([uuids[0], uuids[2]])): (False, 50),
        tuple(sorted(uuids[1:])): (False, 50),
    }


def test_what_is_not_known_of_a_link_is_none(driver):
    driver.gpus = [gpu(), gpu(), gpu(lost=True)]
    with driver.change():
        driver.links = [link(0, 1, nvlink=None, level=None)]
    links = nvml.read_links([card.uuid for card in driver.gpus])
    assert len(links) == 3
    assert {(found.nvlink, found.topology_level) for found in links} == {(None, None)}


def test_numa_node_is_that_of_the_host_near_the_gpu(driver):
    driver.gpus = [gpu(numa_node=1, memory_numa_node=8), gpu(numa_node=None), gpu(lost=True)]
    nodes = nvml.read_numa_nodes([card.uuid for card in driver.gpus])
    assert list(nodes.values()) == [1, None, None]


def test_cpu_affinity_counts_cpus_above_64(driver):
    driver.gpus = [gpu(cpus=[0, 63, 64, 200]), gpu(cpus=None)]
    assert nvml.read_cpu_affinity(driver.gpus[0].uuid) == frozenset({0, 63, 64, 200})
    assert nvml.read_cpu_affinity(driver.gpus[1].uuid) is None
    assert nvml.read_cpu_affinity("GPU-nobody") is None


# GpuProbe


@pytest.fixture
def probe_of(driver):
    """Open a probe whose clock is the driver's, which stands still until it is advanced."""
    freeze(driver)
    probes = []

    def open_probe(uuid=None, **options):
        probe = GpuProbe(uuid or driver.gpus[0].uuid, clock=lambda: driver.now_s, **options)
        probes.append(probe)
        return probe

    yield open_probe
    for probe in probes:
        probe.close()


def test_every_sample_of_the_driver_is_seen_once(driver, probe_of):
    driver.gpus = [gpu(utilization=[(0, 10), (101, 60), (103.5, 90)], sample_period_s=0.25)]
    probe = probe_of()
    assert probe.read().utilization == ()  # what was before the first look is not of this run
    seen = []
    for seconds in (1.0, 0.1, 0.05, 4.0, 0.35):
        driver.advance(seconds)
        seen.extend(probe.read().utilization)
    stamps = [sample.time_s for sample in seen]
    assert stamps == pytest.approx([stamps[0] + 0.25 * i for i in range(len(stamps))], abs=1e-5)
    assert len(seen) in (21, 22, 23)  # 5.5 s
    assert {sample.percent for sample in seen} <= {10, 60, 90, *range(10, 91)}
    assert [seen[0].percent, seen[-1].percent] == [10, 90]


@pytest.mark.parametrize("failing_looks", [{0}, {1}, {0, 1}, {2}])
def test_a_buffer_that_could_not_be_read_once_gives_every_sample_once_afterwards(driver, probe_of, failing_looks):
    driver.gpus = [gpu(utilization=50, sample_period_s=0.5)]
    probe = probe_of()
    stamps = []
    for look in range(4):
        with driver.change():
            driver.gpus[0].errors = {"nvmlDeviceGetSamples": "UNKNOWN"} if look in failing_looks else {}
        stamps += [sample.time_s for sample in probe.read().utilization]
        driver.advance(2)
    first_good_look = min({0, 1, 2} - failing_looks)
    assert len(stamps) == len(set(stamps)) == 4 * (3 - first_good_look)


def test_a_look_too_early_for_a_sample_invents_none(driver, probe_of):
    driver.gpus = [gpu(utilization=50, sample_period_s=1.0)]
    probe = probe_of()
    probe.read()
    driver.advance(0.001)
    first = probe.read().utilization
    driver.advance(0.001)
    assert len(first) + len(probe.read().utilization) <= 1


def test_a_buffer_that_runs_dry_is_replaced_by_momentary_readings(driver, probe_of):
    start_s = driver.now_s
    driver.gpus = [gpu(samples=[(start_s, 90)], utilization_rate=0)]
    probe = probe_of()
    probe.read()
    percents = []
    for _ in range(5):
        driver.advance(1)
        percents += [sample.percent for sample in probe.read().utilization]
    assert percents == [0, 0, 0, 0]  # from the second second on
    with driver.change():
        driver.gpus[0].samples.append((driver.now_s + 0.9, 80))
    driver.advance(1)
    assert [sample.percent for sample in probe.read().utilization] == [80]


def test_counters_and_gauges_have_their_units(driver, probe_of):
    driver.gpus = [
        gpu(
            memory_free="21GiB",
            power_watts=300,
            temperature_celsius=61,
            throttled_power=0.5,
            throttled_thermal=0.25,
            pcie_tx_bytes_per_second=2e9,
            pcie_rx_bytes_per_second=1e9,
            processes=[process(7, "2GiB"), process(8, graphics=True)],
        )
    ]
    probe = probe_of()
    first = probe.read()
    driver.advance(10)
    second = probe.read()
    assert (second.memory_used_bytes, second.memory_total_bytes) == (59 * GIB, 80 * GIB)
    assert (second.power_watts, second.temperature_celsius) == (300, 61)
    assert second.energy_joules - first.energy_joules == pytest.approx(3000)
    assert second.power_capped_s - first.power_capped_s == pytest.approx(5)
    assert second.thermal_throttled_s - first.thermal_throttled_s == pytest.approx(2.5)
    assert second.throttled_s - first.throttled_s == pytest.approx(7.5)
    assert second.pcie_tx_bytes - first.pcie_tx_bytes == pytest.approx(2e10)
    assert second.pcie_rx_bytes - first.pcie_rx_bytes == pytest.approx(1e10)
    assert [(one.pid, one.memory_used_bytes) for one in second.processes] == [(7, 2 * GIB)]
    assert second.problems == ()


def test_pcie_counters_of_32_bits_are_not_believed(driver, probe_of):
    driver.gpus = [gpu(field_values={"197": 3_000_000_000, "198": 3_900_000_000})]
    probe = probe_of()
    assert probe.read().pcie_tx_bytes is None
    with driver.change():
        driver.gpus[0].field_values = {"197": 2**32 + 5, "198": 0}
    sample = probe.read()
    assert (sample.pcie_tx_bytes, sample.pcie_rx_bytes) == (2**32 + 5, 0)


def test_gpm_gives_means_over_the_whole_interval(driver, probe_of):
    driver.gpus = [
        gpu(
            gpm={2: [(0, 100), (101, 0)], 3: 40, 5: 30, 10: 20, 20: 100, 21: 1},
            pcie_tx_bytes_per_second=1e12,
            pcie_rx_bytes_per_second=1e12,
        )
    ]
    probe = probe_of()
    first = probe.read()
    assert first.sm_active_percent is None
    assert first.pcie_tx_bytes is None  # GPM counts PCIe better than the counter, and not from the same start
    driver.advance(4)
    sample = probe.read()
    assert sample.sm_active_percent == pytest.approx(25)
    assert (sample.sm_occupancy_percent, sample.tensor_active_percent, sample.dram_active_percent) == (40, 30, 20)
    driver.advance(2)
    later = probe.read()
    assert later.sm_active_percent == 0  # since the last look, not since the first
    assert later.pcie_tx_bytes - sample.pcie_tx_bytes == pytest.approx(200 * 2**20, abs=20)


def test_gpm_waits_for_its_shortest_interval_and_loses_nothing(driver, probe_of):
    driver.gpus = [gpu(gpm={2: [(0, 0), (100.06, 100)]})]
    probe = probe_of()
    probe.read()
    driver.advance(0.06)
    assert probe.read().sm_active_percent is None
    driver.advance(0.06)
    assert probe.read().sm_active_percent == pytest.approx(50)


def test_gpm_can_be_left_alone(driver, probe_of):
    driver.gpus = [gpu(gpm={2: 50})]
    probe = probe_of(gpm=False)
    probe.read()
    driver.advance(1)
    assert probe.read().sm_active_percent is None
    assert not any("Gpm" in call.function for call in driver.calls())


def test_a_mig_instance_has_utilization_by_gpm_and_nothing_of_its_neighbours(driver, probe_of):
    driver.gpus = [gpu(mig=[mig(gpm={1: 70, 2: 35}), mig(gpm={1: 5, 2: 1})], gpm={})]
    probe = probe_of(driver.gpus[0].mig[0].uuid)
    probe.read()
    driver.advance(1)
    sample = probe.read()
    assert [entry.percent for entry in sample.utilization] == [70]
    assert sample.sm_active_percent == 35
    assert sample.memory_total_bytes == 10 * GIB
    assert sample.power_watts is sample.energy_joules is sample.temperature_celsius is None
    assert sample.problems == ()


def test_a_look_takes_few_calls(driver, probe_of):
    driver.gpus = [gpu(utilization=50, gpm={2: 50}, processes=[process(1)]), gpu(mig=[mig(gpm={1: 1})], gpm={})]
    for uuid in (driver.gpus[0].uuid, driver.gpus[1].mig[0].uuid):
        probe = probe_of(uuid)
        probe.read()
        for _ in range(4):
            driver.advance(1)
            driver.forget_calls()
            probe.read()
            assert len(driver.calls()) <= 12
            assert "nvmlDeviceGetPcieThroughput" not in {call.function for call in driver.calls()}


def test_errors_of_the_gpu_are_named_once_when_they_happen(driver, probe_of):
    driver.gpus = [gpu(xid_events=[(50, 13), (101, 31), (101.5, 999)]), gpu(xid_events=[(101, 79)])]
    probe = probe_of()
    assert probe.read().errors == ()  # what was before the first look is not of this run
    driver.advance(2)
    first, second = probe.read().errors
    assert first.startswith("Xid 31 (memory page fault")
    assert second.startswith("Xid 999 (see the Xid catalogue")
    driver.advance(1)
    assert probe.read().errors == ()
    with driver.change():
        driver.gpus[0].ecc_errors = 2
    assert probe.read().errors == ("2 uncorrectable ECC error(s) of the GPU's memory",)
    assert probe.read().errors == ()


def test_a_gpu_that_falls_off_the_bus_still_tells_its_last_error(driver, probe_of):
    driver.gpus = [gpu(xid_events=[(101, 79), (103, 31)])]
    probe = probe_of()
    probe.read()
    with driver.change():
        driver.gpus[0].lost = True
    driver.advance(1.5)
    sample = probe.read()
    assert sample.errors == ("Xid 79 (the GPU has fallen off the bus)",)
    assert sample.memory_used_bytes is None
    with driver.change():
        driver.gpus[0].lost = False
    driver.advance(1)
    assert probe.read().errors == ()  # found again, so events are collected again
    driver.advance(1)
    assert probe.read().errors == ("Xid 31 (memory page fault, most often a bug of the program)",)


def test_events_that_are_not_permitted_are_asked_for_once_and_leave_nothing_open(driver, probe_of):
    driver.gpus = [gpu(errors={"nvmlDeviceRegisterEvents": "NO_PERMISSION"}, ecc_errors=None)]
    with probe_of() as probe:
        for _ in range(3):
            assert (probe.read().errors, probe.read().problems) == ((), ())
    functions = [call.function for call in driver.calls()]
    assert functions.count("nvmlDeviceRegisterEvents") == 1
    assert functions.count("nvmlEventSetCreate") == functions.count("nvmlEventSetFree") == 1


def test_each_process_has_its_own_utilization_where_the_driver_tells(driver, probe_of):
    driver.gpus = [gpu(processes=[process(7, "2GiB", sm=60), process(8, "1GiB", sm=None)])]
    probe = probe_of()
    assert [one.utilization_percent for one in probe.read().processes] == [None, None]
    driver.advance(1)
    assert [(one.pid, one.utilization_percent) for one in probe.read().processes] == [(7, 60), (8, 0)]
    with driver.change():
        driver.gpus[0].processes.append(process(9))
    driver.advance(1)
    assert [(one.pid, one.utilization_percent) for one in probe.read().processes] == [(7, 60), (8, 0), (9, None)]
    with driver.change():
        driver.gpus[0].errors = {"nvmlDeviceGetProcessUtilization": "NOT_SUPPORTED"}
    assert len(probe.read().processes) == 3
    with driver.change():
        driver.gpus[0].processes = []
    assert probe.read().processes == ()


def test_what_is_not_supported_is_asked_for_once(driver, probe_of):
    driver.gpus = [
        gpu(
            power_watts=None,
            temperature_celsius=None,
            processes=None,
            utilization=None,
            throttled_thermal=None,
            field_values={"197": "INVALID_ARGUMENT", "198": "INVALID_ARGUMENT"},
        )
    ]
    probe = probe_of()
    assert probe.read().problems == ()
    driver.advance(1)
    probe.read()
    driver.advance(3)
    driver.forget_calls()
    sample = probe.read()
    assert sample.power_watts is sample.temperature_celsius is sample.processes is sample.energy_joules is None
    assert sample.thermal_throttled_s is None
    assert sample.throttled_s == sample.power_capped_s
    assert sample.utilization == ()
    assert sample.memory_total_bytes == 80 * GIB
    assert sample.problems == ()
    assert sorted(call.function for call in driver.calls()) == [
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetMemoryInfo",
        "nvmlEventSetWait_v2",
    ]


def test_an_old_driver_leaves_gaps_and_no_problem(driver, probe_of):
    driver.gpus = [gpu(utilization_rate=44)]
    with driver.change():
        driver.missing_functions = [
            "nvmlDeviceGetSamples",
            "nvmlDeviceGetFieldValues",
            "nvmlGpmQueryDeviceSupport",
        ]
    probe = probe_of()
    assert probe.read().utilization == ()
    driver.advance(1)
    sample = probe.read()
    assert [entry.percent for entry in sample.utilization] == [44]
    assert sample.energy_joules is None
    assert sample.processes == ()
    assert sample.problems == ()


def test_a_failing_metric_is_absent_told_once_and_comes_back(driver, probe_of):
    driver.gpus = [gpu()]
    probe = probe_of()
    probe.read()
    for error, power_watts, problems in (
        ("UNKNOWN", None, 1),
        ("UNKNOWN", None, 0),
        (None, 100, 0),
        ("TIMEOUT", None, 1),
    ):
        with driver.change():
            driver.gpus[0].errors = {"nvmlDeviceGetPowerUsage": error} if error else {}
        driver.advance(1)
        sample = probe.read()
        assert sample.power_watts == power_watts
        assert len(sample.problems) == problems
        assert all("power" in problem and driver.gpus[0].uuid in problem for problem in sample.problems)
        assert len(sample.utilization) == 6  # the others go on


def test_a_failing_counter_hurts_no_other(driver, probe_of):
    driver.gpus = [gpu(field_values={"75": "UNKNOWN"})]
    probe = probe_of()
    sample = probe.read()
    assert sample.energy_joules is not None
    assert sample.thermal_throttled_s is None
    assert len(sample.problems) == 1
    assert probe.read().problems == ()


def test_a_gpu_lost_in_mid_run_is_told_once_and_read_again_when_it_is_back(driver, probe_of):
    driver.gpus = [gpu(gpm={2: 50})]
    probe = probe_of()
    probe.read()
    with driver.change():
        driver.gpus[0].lost = True
    driver.advance(1)
    lost = probe.read()
    assert lost.memory_used_bytes is lost.power_watts is lost.energy_joules is lost.sm_active_percent is None
    assert lost.utilization == ()
    assert len(lost.problems) == 1
    assert "fallen off the bus" in lost.problems[0]
    driver.forget_calls()
    assert probe.read().problems == ()
    functions = [call.function for call in driver.calls()]
    assert functions == ["nvmlEventSetWait_v2", "nvmlDeviceGetHandleByUUID"]  # one try, not one for each metric
    with driver.change():
        driver.gpus[0].lost = False
    driver.advance(1)
    assert probe.read().sm_active_percent is None  # not over the time in which it was away
    driver.advance(1)
    back = probe.read()
    assert back.power_watts == 100
    assert back.sm_active_percent == 50
    assert len(back.utilization) == 6
    assert back.problems == ()


def test_an_unknown_gpu_is_a_problem_not_an_exception(driver, probe_of):
    driver.gpus = [gpu()]
    sample = probe_of("GPU-nobody").read()
    assert sample.memory_used_bytes is None
    assert len(sample.problems) == 1
    assert "nvidia-smi -L" in sample.problems[0]


def test_a_closed_probe_leaves_nothing_open(driver, probe_of):
    driver.gpus = [gpu(gpm={2: 1})]
    with probe_of() as probe:
        probe.read()
    probe.close()  # again: nothing happens
    functions = [call.function for call in driver.calls()]
    assert functions.count("nvmlGpmSampleAlloc") == functions.count("nvmlGpmSampleFree") == 2
    assert functions.count("nvmlInitWithFlags") == functions.count("nvmlShutdown") == 1
    assert len(probe.read().problems) == 1  # closed: nothing can be read, and nothing is raised


def test_without_a_driver_there_is_no_probe(driver):
    with driver.change():
        driver.library_missing = True
    with pytest.raises(NvmlUnavailableError):
        GpuProbe("GPU-x")
