"""Reads of one GPU, one after the other."""

import contextlib
import dataclasses
import time
from types import SimpleNamespace

import pytest
from fake_driver import GIB, gpu, mig, process

from lightning_gpu_tools.gpus.metrics import METRICS
from lightning_gpu_tools.gpus.nvml.probe import GpuProbe


class Probe(GpuProbe):
    """A probe of a driver whose clock stands still until it is advanced."""

    def __init__(self, driver, uuid):
        self._machine = driver
        super().__init__(uuid or driver.gpus[0].uuid)

    def read(self):
        """Return a sample whose values are attributes, too, ``None`` if they are missing."""
        sample = super().read()
        names = {metric.source for metric in METRICS} - {"utilization"}
        assert sample.values.keys() <= names | {"driver_memory_bytes"}
        fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        return SimpleNamespace(**fields, **{name: sample.values.get(name) for name in names})

    def after(self, seconds):
        """Let time pass, and read."""
        self._machine.advance(seconds)
        return self.read()


@pytest.fixture
def probe_of(driver, monkeypatch):
    driver.freeze()
    monkeypatch.setattr(time, "time", lambda: driver.now_s)
    with contextlib.ExitStack() as opened:
        yield lambda uuid=None: opened.enter_context(contextlib.closing(Probe(driver, uuid)))


def test_every_sample_of_the_driver_is_seen_once(driver, probe_of):
    driver.gpus = [gpu(utilization=[(0, 10), (101, 60), (103.5, 90)], sample_period_s=0.25)]
    probe = probe_of()
    assert probe.read().utilization == ()  # what was before the first read is not of this run
    seen = []
    for seconds in (1.0, 0.1, 0.05, 4.0, 0.35):
        seen.extend(probe.after(seconds).utilization)
    stamps = [sample.time_s for sample in seen]
    assert stamps == pytest.approx([stamps[0] + 0.25 * i for i in range(len(stamps))], abs=1e-5)
    assert len(seen) in (21, 22, 23)  # 5.5 s
    assert {sample.percent for sample in seen} <= {10, 60, 90, *range(10, 91)}
    assert [seen[0].percent, seen[-1].percent] == [10, 90]


def test_a_buffer_that_runs_dry_is_replaced_by_momentary_readings(driver, probe_of):
    start_s = driver.now_s
    driver.gpus = [gpu(samples=[(start_s, 90)], utilization_rate=0)]
    probe = probe_of()
    probe.read()
    percents = []
    for _ in range(5):
        percents += [sample.percent for sample in probe.after(1).utilization]
    assert percents == [0, 0, 0, 0]  # from the second second on
    driver.gpus[0].samples += [(driver.now_s + 0.9, 80)]
    assert [sample.percent for sample in probe.after(1).utilization] == [80]


def test_counters_and_gauges_have_their_units(driver, probe_of):
    driver.gpus = [
        gpu(
            memory_free="21GiB",
            power_watts=300,
            answers={"nvmlDeviceGetTemperature": 61},
            throttled_power=0.5,
            throttled_thermal=0.25,
            pcie_tx_bytes_per_second=2e9,
            pcie_rx_bytes_per_second=1e9,
            processes=[process(7, "2GiB"), process(8, graphics=True)],
        )
    ]
    probe = probe_of()
    probe.read()
    second = probe.after(10)
    assert (second.memory_used_bytes, second.memory_total_bytes) == (59 * GIB, 80 * GIB)
    assert (second.power_watts, second.temperature_celsius) == (300, 61)
    assert second.energy_joules == pytest.approx(3000)
    throttled = (second.power_capped_percent, second.thermal_throttled_percent, second.throttled_percent)
    assert throttled == pytest.approx((50, 25, 75))
    assert (second.pcie_tx_bytes_per_second, second.pcie_rx_bytes_per_second) == pytest.approx((2e9, 1e9))
    assert [(one.pid, one.memory_used_bytes) for one in second.processes] == [(7, 2 * GIB)]
    assert second.problems == ()


def test_the_clock_is_asked_for_while_something_holds_it_down(driver, probe_of):
    driver.gpus = [gpu(field_values={"74": 7_000_000_000, "75": 0}, answers={"nvmlDeviceGetClockInfo": 1188})]
    probe = probe_of()
    clocks = [probe.read().held_clock_percent, probe.after(1).held_clock_percent]
    driver.gpus[0].field_values = {"74": 8_000_000_000, "75": 0}
    clocks += [probe.after(1).held_clock_percent, probe.after(1).held_clock_percent]
    assert clocks == [None, None, pytest.approx(60), None]


def test_a_counter_that_was_set_back_starts_again(driver, probe_of):
    driver.gpus = [gpu()]
    probe, joules = probe_of(), []
    for millijoules in (900_000, 5_000, 25_000):
        driver.gpus[0].field_values = {"83": millijoules}
        joules.append(probe.after(1).energy_joules)
    assert joules == [None, None, pytest.approx(20)]


def test_a_counter_of_pcie_that_may_wrap_is_not_reported(driver, probe_of):
    driver.gpus = [gpu(pcie_tx_bytes_per_second=1e6, pcie_rx_bytes_per_second=1e6)]
    probe = probe_of()
    assert [probe.after(1).pcie_tx_bytes_per_second for _ in range(2)] == [None, None]
    driver.gpus[0].pcie_rx_bytes_per_second = 1e9  # now one of them has exceeded 32 bits
    assert probe.after(1).pcie_tx_bytes_per_second == pytest.approx(1e6)


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
    assert first.pcie_tx_bytes_per_second is None
    sample = probe.after(4)
    assert sample.sm_active_percent == pytest.approx(25)
    assert (sample.sm_occupancy_percent, sample.tensor_active_percent, sample.dram_active_percent) == (40, 30, 20)
    assert sample.pcie_tx_bytes_per_second == 100 * 2**20  # GPM counts PCIe better than the counter
    assert probe.after(2).sm_active_percent == 0  # since the last read, not since the first


# What may be asked of a MIG instance. All else would be of the whole GPU, if the driver answered.
OF_INSTANCES = """
nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetDeviceHandleFromMigDeviceHandle nvmlDeviceGetGpuInstanceId
nvmlDeviceGetHandleByUUID nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2 nvmlDeviceRegisterEvents
nvmlEventSetCreate nvmlEventSetFree nvmlGpmMetricsGet nvmlGpmMigSampleGet nvmlGpmQueryDeviceSupport nvmlGpmSampleAlloc
nvmlInitWithFlags nvmlDeviceGetPowerManagementLimitConstraints
"""  # the last one is a setting, which is refused


def test_a_mig_instance_has_nothing_of_its_neighbors(driver, probe_of):
    driver.gpus = [gpu(mig=[mig(gpm={1: 70, 2: 35}), mig(gpm={1: 5, 2: 1})], gpm={})]
    probe = probe_of(driver.gpus[0].mig[0].uuid)
    probe.read()
    sample = probe.after(1)
    assert [entry.percent for entry in sample.utilization] == [70]
    assert sample.sm_active_percent == 35
    assert sample.memory_total_bytes == 10 * GIB
    assert sample.power_watts is sample.energy_joules is sample.temperature_celsius is None
    assert sample.problems == ()
    assert {call.function for call in driver.calls()} <= {*OF_INSTANCES.split()}


def test_a_read_takes_few_calls(driver, probe_of):
    driver.gpus = [gpu(utilization=50, gpm={2: 50}, processes=[process(1)]), gpu(mig=[mig(gpm={1: 1})], gpm={})]
    for uuid in (driver.gpus[0].uuid, driver.gpus[1].mig[0].uuid):
        probe = probe_of(uuid)
        probe.read()
        for _ in range(4):
            driver.advance(1)
            driver.forget_calls()
            probe.read()
            assert len(driver.calls()) <= 12, "each call takes some 100 us: see the docstring of GpuProbe"
            assert "nvmlDeviceGetPcieThroughput" not in {call.function for call in driver.calls()}


def test_errors_of_the_gpu_are_named_once_when_they_happen(driver, probe_of):
    driver.gpus = [gpu(xid_events=[(50, 13), (101, 31), (101.5, 999)]), gpu(xid_events=[(101, 79)])]
    probe = probe_of()
    assert probe.read().errors == ()  # what was before the first read is not of this run
    assert probe.after(2).errors == ("Xid 31 (see NVIDIA's Xid catalog)", "Xid 999 (see NVIDIA's Xid catalog)")
    assert probe.after(1).errors == ()


@pytest.mark.parametrize(
    ("refused", "gone"),
    [
        ({"nvmlGpmSampleGet": "NO_PERMISSION"}, "sm_active_percent"),
        ({"nvmlDeviceRegisterEvents": "NO_PERMISSION"}, "errors"),
        ({"nvmlDeviceGetFieldValues": "FUNCTION_NOT_FOUND"}, "energy_joules"),
    ],
)
def test_what_the_driver_refuses_takes_nothing_else_along(driver, probe_of, refused, gone):
    traffic = {"pcie_tx_bytes_per_second": 1e10, "pcie_rx_bytes_per_second": 1e10}
    driver.gpus = [gpu(gpm={2: 50, 20: 100, 21: 100}, errors=refused, xid_events=[(101, 13)], **traffic)]
    probe = probe_of()
    probe.read()
    sample = probe.after(2)
    assert sample.problems == ()
    values = {name: getattr(sample, name) for name in ("sm_active_percent", "errors", "energy_joules")}
    assert not values.pop(gone)
    assert all(values.values()), values
    assert sample.pcie_tx_bytes_per_second > 0


def test_the_power_limit_and_how_far_it_can_be_raised(driver, probe_of):
    driver.gpus = [
        gpu(answers={"nvmlDeviceGetPowerManagementLimit": 500_000}),
        gpu(answers={"nvmlDeviceGetPowerManagementLimitConstraints": None}),
    ]
    limits = []
    for card in driver.gpus:
        sample = probe_of(card.uuid).read()
        limits.append((sample.power_limit_watts, sample.power_limit_watts_max))
    assert limits == [(500, 700), (700, None)]


def test_each_process_has_its_own_utilization_where_the_driver_tells(driver, probe_of):
    driver.gpus = [gpu(processes=[process(7, "2GiB", sm=60), process(8, "1GiB", sm=None)])]
    probe = probe_of()
    sample = probe.read()
    sample = probe.after(1)
    assert [(one.pid, one.utilization_percent) for one in sample.processes] == [(7, 60), (8, 0)]
    driver.gpus[0].processes += [process(9)]
    assert [(one.pid, one.utilization_percent) for one in probe.after(1).processes] == [(7, 60), (8, 0), (9, 0)]
    driver.gpus[0].errors = {"nvmlDeviceGetProcessUtilization": "NOT_SUPPORTED"}
    assert len(probe.read().processes) == 3
    driver.gpus[0].processes = []
    assert probe.read().processes == ()


def test_what_is_not_supported_is_asked_for_once(driver, probe_of):
    driver.gpus = [
        gpu(
            power_watts=None,
            answers={"nvmlDeviceGetTemperature": None},
            processes=None,
            utilization=None,
            throttled_thermal=None,
            field_values={"197": "INVALID_ARGUMENT", "198": "INVALID_ARGUMENT"},
        )
    ]
    probe = probe_of()
    assert probe.read().problems == ()
    probe.after(1)
    driver.advance(3)
    driver.forget_calls()
    sample = probe.read()
    assert sample.power_watts is sample.temperature_celsius is sample.processes is sample.energy_joules is None
    assert sample.thermal_throttled_percent is None
    assert sample.throttled_percent == sample.power_capped_percent == 0
    assert sample.utilization == ()
    assert sample.memory_total_bytes == 80 * GIB
    assert sample.problems == ()
    assert sorted(call.function for call in driver.calls()) == [
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetMemoryInfo",
        "nvmlEventSetWait_v2",
    ]


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
        driver.gpus[0].errors = {"nvmlDeviceGetPowerUsage": error} if error else {}
        sample = probe.after(1)
        assert sample.power_watts == power_watts
        assert len(sample.problems) == problems
        assert all("power" in problem and driver.gpus[0].uuid in problem for problem in sample.problems)
        assert len(sample.utilization) == 6  # the others go on


def test_a_gpu_lost_in_mid_run_is_reported_once(driver, probe_of):
    driver.gpus = [gpu(gpm={2: 50})]
    probe = probe_of()
    probe.read()
    driver.gpus[0].lost = True
    lost = probe.after(1)
    assert lost.memory_used_bytes is lost.power_watts is lost.energy_joules is lost.sm_active_percent is None
    assert lost.utilization == ()
    assert len(lost.problems) == 1
    assert "fallen off the bus" in lost.problems[0]
    driver.forget_calls()
    assert probe.read().problems == ()
    functions = [call.function for call in driver.calls()]
    assert functions == ["nvmlEventSetWait_v2", "nvmlDeviceGetHandleByUUID"]  # one try, not one for each metric
    driver.gpus[0].lost = False
    assert probe.after(1).sm_active_percent is None  # not over the time in which it was away
    back = probe.after(1)
    assert back.power_watts == 100
    assert back.sm_active_percent == 50
    assert len(back.utilization) == 6
    assert back.problems == ()


def test_every_metric_is_read_and_maxima_are_maxima(driver, probe_of):
    answers = {2: 50, 3: 40, 5: 30, 10: 20, 20: 100, 21: 100}
    traffic = {"pcie_tx_bytes_per_second": 1e10, "pcie_rx_bytes_per_second": 1e10}
    driver.gpus = [gpu(utilization=50, gpm=answers, throttled_power=0.5, throttled_thermal=0.5, **traffic)]
    probe = probe_of()
    for _ in range(3):
        sample = probe.after(1)
    assert [metric.field for metric in METRICS if getattr(sample, metric.source) in (None, ())] == []
    of_samples = {metric.field: metric.reduction for metric in METRICS if metric.field != metric.source}
    peaks = {reduction for field, reduction in of_samples.items() if field.endswith("_max")}
    assert peaks == {"max"}
