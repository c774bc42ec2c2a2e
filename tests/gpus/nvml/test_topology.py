"""Connections of GPUs to each other and to the host."""

from __future__ import annotations

from fake_driver import gpu, link

from lightning_gpu_tools.gpus import nvml


def test_pairs_joined_by_nvlink_are_known(driver):
    driver.gpus = [gpu(), gpu(), gpu(), gpu(lost=True)]
    driver.links = [link(0, 1, nvlink=True), link(1, 2, nvlink=None), link(2, 3, nvlink=True)]
    uuids = [card.uuid for card in driver.gpus]
    assert nvml.read_nvlinks(uuids) == {tuple(sorted(uuids[:2]))}


def test_the_numa_node_is_that_of_the_host(driver):
    driver.gpus = [gpu(numa_node=1), gpu(numa_node=None), gpu(lost=True)]
    nodes = nvml.read_numa_nodes([card.uuid for card in driver.gpus])
    assert list(nodes.values()) == [1, None, None]
