"""Selecting over the fake driver: reading, ranking and claiming together, in this process and in many."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest
from fake_driver import Driver, gpu, mig, process

from lightning_gpu_tools import LightningGpuToolsError, list_gpus, select_gpus
from lightning_gpu_tools.errors import NotEnoughGpusError
from lightning_gpu_tools.types import GpuSelection

SHOW = 'print(os.environ["CUDA_VISIBLE_DEVICES"])'
pytestmark = pytest.mark.usefixtures("claims_dir")


def indices(selection: GpuSelection) -> list[int]:
    return [reading.index for reading in selection.gpus]


def uuids(driver: Driver, *wanted: int) -> list[str]:
    return [driver.gpus[index].uuid for index in wanted]


def test_each_selection_goes_to_the_gpu_with_the_fewest_claims(driver: Driver) -> None:
    driver.gpus = [gpu(memory_free="40GiB"), gpu(memory_free="30GiB"), gpu(memory_free="70GiB", utilization=99)]
    assert [indices(select_gpus()) for _ in range(4)] == [[0], [1], [2], [0]]


def test_claimed_memory_is_not_given_twice(driver: Driver) -> None:
    driver.gpus = [gpu(memory_free="40GiB"), gpu(memory_free="30GiB")]
    assert [indices(select_gpus(min_free="18GiB")) for _ in range(3)] == [[0], [1], [0]]
    with pytest.raises(NotEnoughGpusError) as caught:
        select_gpus(min_free="18GiB")
    assert caught.value.requested == 1
    assert "4.00 GiB free (36.0 GiB more are claimed), asked for 18.0 GiB" in caught.value.rejected[0]
    assert "12.0 GiB free (18.0 GiB more are claimed), asked for 18.0 GiB" in caught.value.rejected[1]


def test_exclusive_is_refused_where_somebody_is_and_refuses_others(driver: Driver, claims_dir: Path) -> None:
    driver.gpus = [gpu(processes=[process(pid=4711)]), gpu(processes=None), gpu()]
    with select_gpus(exclusive=True) as selection:
        assert indices(selection) == [2]
        with pytest.raises(NotEnoughGpusError, match="claimed exclusively"):
            select_gpus(3)
    selection.release()  # again
    assert [entry.name for entry in claims_dir.iterdir()] == []
    assert indices(select_gpus(2, claim=False)) == [2, 1]


def test_nothing_outside_cuda_visible_devices(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.gpus = [gpu(memory_free=f"{gib}GiB") for gib in (10, 20, 30, 40)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert indices(select_gpus(2)) == [3, 0]
    with pytest.raises(NotEnoughGpusError) as caught:
        select_gpus(3)
    assert str(caught.value).startswith("Asked for 3 GPUs, but 2 of 2 visible GPUs can be used.\n")
    hidden = [reason for reason in caught.value.rejected if "outside CUDA_VISIBLE_DEVICES='0,3'" in reason]
    assert len(hidden) == 2


@pytest.mark.follows("Correct it, or unset it")
def test_a_mask_that_names_nothing_is_explained_and_unset(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.gpus = [gpu()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(NotEnoughGpusError) as caught:
        select_gpus()
    first = str(caught.value).splitlines()[0]
    assert "In CUDA_VISIBLE_DEVICES='2', '2' names no GPU, or one again. This machine has 1 GPU, numbered" in first
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert indices(select_gpus()) == [0]


APPLY_TWO = """
import os
from lightning_gpu_tools import select_gpus
first, second = select_gpus(), select_gpus()  # as in two threads
first.apply()
first.apply()
second.apply()
print(os.environ["CUDA_VISIBLE_DEVICES"])
"""


@pytest.mark.follows("pick them together, with one select_gpus()")
def test_a_second_apply_names_both_and_how_to_use_both(
    driver: Driver, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    driver.gpus = [gpu(), gpu()]
    first, second = uuids(driver, 1, 0)
    answer = run_python("-c", APPLY_TWO)
    assert answer.stdout == f"{second}\n"
    (line,) = answer.stderr.splitlines()
    assert line.startswith(f"All threads of this process see only {second} from now on, instead of {first}. ")
    answer = run_python("-c", f"import os\nfrom lightning_gpu_tools import select_gpus\nselect_gpus(2).apply()\n{SHOW}")
    assert (answer.stdout, answer.stderr) == (f"{first},{second}\n", "")


def test_a_reason_that_many_share_is_given_once(driver: Driver) -> None:
    driver.gpus = [gpu(memory_free="4GiB") for _ in range(6)] + [gpu(mig=[mig(), None, mig()]), gpu(mig=[mig(), mig()])]
    with pytest.raises(NotEnoughGpusError) as caught:
        select_gpus(8)
    assert "\n  4 MIG instances (of GPUs 6 and 7): CUDA shows a process only one" in str(caught.value)
    with pytest.raises(NotEnoughGpusError) as caught:
        select_gpus(min_free="20GiB")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert lines[1] == "  6 GPUs (0 to 5): 4.00 GiB free, asked for 20.0 GiB"
    assert lines[2] == "  4 MIG instances (of GPUs 6 and 7): 10.0 GiB free, asked for 20.0 GiB"
    assert len(caught.value.rejected) == 10
    assert caught.value.rejected[7].startswith(f"MIG instance 6:2 ({driver.gpus[6].mig[2].uuid[:12]}…): 10.0 GiB free")


def test_a_driver_without_gpus_has_not_enough(driver: Driver) -> None:
    driver.gpus = []
    assert list_gpus() == []
    with pytest.raises(NotEnoughGpusError, match="the NVIDIA driver lists none"):
        select_gpus()


def test_apply_shows_this_process_and_its_children_the_gpus(driver: Driver) -> None:
    driver.gpus = [gpu(memory_free="10GiB"), gpu(memory_free="20GiB"), gpu(memory_free="30GiB")]
    selection = select_gpus(2, exclusive=True)
    assert str(selection).startswith(f"Picked GPU 2 ({driver.gpus[2].uuid[:12]}…) with 30.0 GiB free, 0% busy; GPU 1 ")
    selection.apply()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == selection.cuda_visible_devices
    # The job's own claim does not stand in its way, neither here nor in a child.
    assert indices(select_gpus(claim=False)) == [2]
    child = "from lightning_gpu_tools import select_gpus; print(*select_gpus(2).uuids)"
    output = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    assert output.split() == uuids(driver, 2, 1)


EXCLUSIVE_OR_WHY = """
import sys
from lightning_gpu_tools import select_gpus
from lightning_gpu_tools.errors import NotEnoughGpusError
try:
    print(*select_gpus(exclusive=True).uuids, flush=True)
except NotEnoughGpusError as error:
    assert len(error.rejected) == 4 and "claimed exclusively by" in error.rejected[0]
    print("refused", flush=True)
sys.stdin.read()
"""


def test_many_processes_at_once_never_share_an_exclusive_gpu(driver: Driver) -> None:
    driver.gpus = [gpu() for _ in range(4)]
    jobs = [
        subprocess.Popen([sys.executable, "-c", EXCLUSIVE_OR_WHY], stdin=-1, stdout=-1, text=True) for _ in range(8)
    ]
    answers = Counter(job.stdout.readline().strip() for job in jobs if job.stdout)
    for job in jobs:
        job.kill()
        job.communicate()
    assert answers == {"refused": 4, **dict.fromkeys(uuids(driver, *range(4)), 1)}


def compile_libcuda(folder: Path, source: str) -> str:
    (folder / "cuda.c").write_text(source)
    library = str(folder / "libcuda.so.1")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(folder / "cuda.c"), "-o", library]
    subprocess.run(command, check=True)
    return library


@pytest.mark.follows("Pick the GPUs before anything uses CUDA")
def test_gpus_are_picked_before_cuda_starts_as_advised(driver: Driver, tmp_path: Path) -> None:
    driver.gpus = [gpu(), gpu()]
    source = "static int on; int cuInit(int f) { on = 1; return 0; }"
    library = compile_libcuda(tmp_path, f"{source}int cuDeviceGetCount(int *n) {{ *n = 1; return on ? 0 : 3; }}")
    use = f"import ctypes; ctypes.CDLL({library!r}).cuInit(0)\n"
    choose = f"import os; from lightning_gpu_tools import select_gpus; select_gpus().apply(); {SHOW}\n"
    late = subprocess.run([sys.executable, "-c", use + choose], capture_output=True, text=True)
    assert "Pick the GPUs before anything uses CUDA, including torch.cuda.is_available()" in late.stderr
    early = subprocess.run([sys.executable, "-c", choose + use], capture_output=True, text=True)
    assert (early.returncode, early.stdout) == (0, f"{driver.gpus[1].uuid}\n")


@pytest.mark.follows("Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs in CUDA_VISIBLE_DEVICES")
def test_numbers_on_different_products_follow_cudas_own_order(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.gpus = [gpu(name="Tesla T4"), gpu(name="NVIDIA H200"), gpu(name="NVIDIA T400")]
    fastest_first = [driver.gpus[index].uuid for index in (1, 0, 2)]
    rows = ",".join("{" + ",".join(f"0x{b:02x}" for b in UUID(name[4:]).bytes) + "}" for name in fastest_first)
    source = f"""
#include <string.h>
static unsigned char uuids[3][16] = {{{rows}}};
int cuInit(int flags) {{ return 0; }}
int cuDeviceGetCount(int *count) {{ *count = 3; return 0; }}
int cuDeviceGet(int *device, int ordinal) {{ *device = ordinal; return 0; }}
int cuDeviceGetUuid(void *uuid, int device) {{ memcpy(uuid, uuids[device], 16); return 0; }}
"""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    with pytest.raises(LightningGpuToolsError) as caught:
        select_gpus(2)
    name, order, mask = re.search(r"Set (\w+)=(\w+), or use UUIDs in (\w+)\.", str(caught.value)).groups()
    monkeypatch.setenv(mask, ",".join(uuids(driver, 0, 2)))
    assert indices(select_gpus(2, claim=False)) == [2, 0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    compile_libcuda(tmp_path, source)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert indices(select_gpus(2)) == [2, 1]
    monkeypatch.setenv(name, order)
    assert indices(select_gpus(2)) == [0, 2]


A100, RTX = "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 2080"


def test_unequal_gpus_are_named(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    driver.gpus = [gpu(name=A100), gpu(name=RTX), gpu(name=RTX, utilization=90)]
    assert indices(select_gpus(2, claim=False)) == [1, 0]
    assert caplog.messages == [
        f"The 2 picked GPUs differ ({RTX}, {A100}). Training waits for the slowest in each step."
    ]
    caplog.clear()
    assert indices(select_gpus(2, name=RTX, claim=False)) == [1, 2]
    assert not caplog.records


def test_only_gpus_of_the_named_model_qualify(driver: Driver) -> None:
    driver.gpus = [gpu(name=A100, memory_free="1GiB", utilization=90), gpu(name=RTX), gpu(name="Quadro P400")]
    driver.gpus[2].errors = {"nvmlDeviceGetName": "NOT_SUPPORTED"}
    assert indices(select_gpus(name=" sxm4-80 ", claim=False)) == [0]
    with pytest.raises(NotEnoughGpusError) as caught:
        select_gpus(2, name="a100")
    assert f"is {RTX}, asked for a100" in caught.value.rejected[0]
    assert "is a GPU without a name, asked for a100" in caught.value.rejected[1]


def test_joined_gpus_and_those_on_one_node_are_preferred(driver: Driver) -> None:
    driver.gpus = [gpu(memory_free=f"{gib}GiB", numa_node=node) for gib, node in ((40, 0), (10, 0), (39, 1), (38, 1))]
    assert indices(select_gpus(2, min_free="8GiB", claim=False)) == [2, 3]
    driver.nvlinks = [(0, 2)]
    assert indices(select_gpus(2, min_free="8GiB", claim=False)) == [0, 2]
    driver.gpus[2].utilization = 90
    assert indices(select_gpus(2, claim=False)) == [0, 3]
