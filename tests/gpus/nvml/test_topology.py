"""How GPUs are joined to each other and to the host."""

from __future__ import annotations

from fake_driver import gpu, link

from lightning_gpu_tools.gpus import nvml


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
