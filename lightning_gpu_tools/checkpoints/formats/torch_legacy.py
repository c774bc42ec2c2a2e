"""The format of torch before 1.6: pickles, then the numbers."""

from __future__ import annotations

import mmap
import re
import struct
from typing import BinaryIO

from lightning_gpu_tools.checkpoints.inert_pickle import InertUnpickler
from lightning_gpu_tools.checkpoints.structure import Structure

NAME = "legacy"
# torch.serialization.MAGIC_NUMBER, pickled: in protocol 2 to 5, or 0.
_LEGACY_START = re.compile(
    rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.|L119547037146038801333356L\n\.", re.DOTALL
)


def recognizes(head: bytes) -> bool:
    """Return whether a file begins with torch's magic number."""
    return _LEGACY_START.match(head) is not None


def describe(file: BinaryIO, path: str, size_bytes: int) -> Structure:
    """Describe the pickles, and check that all numbers are present."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # The magic number, the version, the machine that wrote it, the contents, and the keys of the storages.
        readers = [InertUnpickler(data, size_bytes) for _ in range(5)]
        *_, content, keys = [reader.load() for reader in readers]
        named = set().union(*(reader.globals for reader in readers))
        storages = readers[3].storages
        if sorted(keys) != sorted(storages):
            raise ValueError("numbers other than those that it describes")
        place = data.tell()
        places = {}
        for key in keys:  # each storage comes after its length in 8 bytes
            storage = storages[key]
            places[key] = place + 8
            if struct.unpack_from("<q", data, place)[0] != storage.numel:
                raise ValueError("a storage whose length does not match")
            place += 8 + storage.size_bytes
    if place > size_bytes:
        raise ValueError("cut short")
    devices = {storage.location for storage in storages.values()}
    return Structure(file, path, size_bytes, NAME, content, named, devices, places=places, filled=readers[3].filled)
