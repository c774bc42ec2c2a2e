"""Reading GPUs by the real nvidia-ml-py over the fake driver."""

import getpass
import os
import subprocess
import sys

import pytest
from fake_driver import GIB, gpu, mig, process

from lightning_gpu_tools.gpus import nvml


def read(driver, *gpus):
    driver.gpus = list(gpus)
    return nvml.read_gpus()


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
    assert (reading.index, reading.uuid, reading.name) == (0, driver.gpus[0].uuid, "NVIDIA H200")
    assert reading.pci_bus_id == "00000001:4B:00.0"
    assert (reading.memory_total_bytes, reading.memory_free_bytes) == (80 * GIB, 21 * GIB)
    assert reading.utilization_percent == 90
    assert [(one.pid, one.memory_used_bytes) for one in reading.processes] == [(os.getpid(), 3 * GIB)]
    assert reading.compute_mode == "exclusive_process"
    assert reading.mig_mode is False
    assert reading.error is None


def test_utilization_is_the_mean_over_the_buffer(driver):
    driver.freeze()
    (reading,) = read(driver, gpu(utilization=[(0, 0), (90, 100)], sample_period_s=0.5, sample_depth=40))
    assert reading.utilization_percent == pytest.approx(50, abs=3)  # idle for 10 s, busy for 10 s


def test_a_stale_buffer_is_not_the_present(driver):
    driver.freeze()
    stale = [(driver.now_s - 300 + i, 100) for i in range(100)]
    (reading,) = read(driver, gpu(samples=stale, utilization_rate=3))
    assert reading.utilization_percent == 3
    end_s = driver.now_s  # and impossible and unordered samples do no harm
    samples = [(end_s, 50), (end_s - 1, 4_294_967_295), (end_s - 2, 50), (end_s - 1.5, 101)]
    assert read(driver, gpu(samples=samples))[0].utilization_percent == 50


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"utilization": None}, "utilization_percent"),
        ({"mig_capable": False}, "mig_mode"),
        ({"errors": {"nvmlDeviceGetComputeRunningProcesses": "NO_PERMISSION"}}, "processes"),
    ],
)
def test_what_is_not_supported_is_none_and_no_error(driver, fields, name):
    other, reading = read(driver, gpu(), gpu(**fields))
    assert getattr(reading, name) is None
    assert getattr(other, name) is not None
    assert reading.error is None


@pytest.mark.parametrize(("error", "says"), [("GPU_IS_LOST", "dmesg"), ("UNKNOWN", "'Unknown Error'")])
def test_a_broken_gpu_is_listed_in_its_place_with_the_reason(driver, error, says):
    gpus = read(
        driver,
        gpu(pci=(0, 9, 0)),
        gpu(lost=True),
        gpu(pci=(0, 2, 0)),
        gpu(errors={"nvmlDeviceGetUUID": "NO_PERMISSION"}),
        gpu(errors={"nvmlDeviceGetMemoryInfo": error}),
    )
    first, second, broken = (driver.gpus[position].uuid for position in (2, 0, 4))
    assert [reading.uuid for reading in gpus] == [first, None, second, None, broken]
    assert [reading.index for reading in gpus] == [0, 1, 2, 3, 4]
    assert [bool(reading.error) for reading in gpus] == [False, True, False, True, True]
    assert "fallen off the bus" in gpus[1].error
    assert "/dev/nvidia" in gpus[3].error
    assert says in gpus[4].error
    assert (gpus[4].pci_bus_id, gpus[4].memory_free_bytes) == ("00000000:50:00.0", None)


# Processes


@pytest.mark.skipif(not nvml.pids_are_ours(), reason="inside a PID namespace the driver's numbers name nobody")
@pytest.mark.parametrize(
    ("name", "shown"),
    [("a训练模型进程", r"a训练模型\udce8\udcbf"), ("\x1b[2J\x07", r"\x1b[2J\x07")],
    ids=["cut-in-a-character", "escapes"],
)
def test_a_visible_process_has_a_user_and_a_name_that_harms_no_terminal(driver, name, shown):
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, sys.argv[1].encode()); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, name], stdin=-1, stdout=-1, text=True) as child:
        child.stdout.readline()
        (reading,) = read(driver, gpu(processes=[process(child.pid)]))
        child.kill()
    assert [(one.user, one.name) for one in reading.processes] == [(getpass.getuser(), shown)]


def test_a_gone_or_hidden_process_has_a_pid_only(driver, run_python):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()  # its number is free again
    (reading,) = read(driver, gpu(processes=[process(child.pid, None)]))
    (found,) = reading.processes
    assert (found.pid, found.memory_used_bytes, found.user, found.name) == (child.pid, None, None, None)


def test_inside_another_pid_namespace_the_drivers_numbers_name_nobody(driver, run_python):
    driver.gpus = [gpu(processes=[process(1)])]  # there is a process 1 in every namespace
    code = "from lightning_gpu_tools.gpus import nvml; print(nvml.read_gpus()[0].processes[0].user)"
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


# MIG


def test_mig_instances_have_readings_of_their_own_and_a_broken_one_hurts_no_other(driver):
    parts = [
        mig(memory_total="10GiB", memory_free="4GiB"),
        mig(gpu_instance=7),
        mig(errors={"nvmlDeviceGetMemoryInfo": "UNKNOWN"}),
    ]
    gpus = read(driver, gpu(pci=(0, 9, 0), mig=parts, processes=[process(10, "2GiB", gpu_instance=7)]), gpu(mig=[]))
    assert [reading.mig_mode for reading in gpus] == [True, True]
    reading = next(reading for reading in gpus if reading.mig_instances)
    first, second, broken = reading.mig_instances
    assert [one.uuid for one in reading.mig_instances] == [one.uuid for one in driver.gpus[0].mig]
    assert (first.memory_total_bytes, first.memory_free_bytes, first.processes) == (10 * GIB, 4 * GIB, ())
    assert reading.utilization_percent is first.utilization_percent is first.error is None
    assert first.mig_mode is False
    assert [one.pid for one in second.processes] == [10]
    assert second.index == reading.index
    assert second.name == "NVIDIA H200 MIG 1g.10gb"
    assert "Unknown Error" in broken.error


def test_a_container_that_has_one_instance_of_a_gpu_sees_it(driver):
    """As in Kubernetes, where the GPU itself may not be read."""
    (reading,) = read(driver, gpu(closed=True, mig=[None, mig(memory_free="4GiB")]))
    assert (reading.error, reading.mig_mode, reading.memory_free_bytes) == (None, True, None)
    (instance,) = reading.mig_instances
    assert (instance.uuid, instance.memory_free_bytes) == (driver.gpus[0].mig[1].uuid, 4 * GIB)
