"""Zip files of any tool load to the bit. Archives that two readers could read differently are refused."""

import io
import os
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import records_of, refuse_everywhere, saved, zipped

from lightning_gpu_tools import load_weights
from lightning_gpu_tools.checkpoints.reading import read_checkpoint, verify_checkpoint
from lightning_gpu_tools.errors import BrokenCheckpointError, CheckpointError

CONTENT = OrderedDict(weight=torch.arange(600.0).view(20, 30), bias=torch.linspace(-1, 1, 20))
GOOD = saved(CONTENT)
PLAIN = zipped(records_of(GOOD))


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


# -- what archive tools make of a checkpoint -----------------------------------------------------------------------


class Unseekable(io.BytesIO):
    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        raise io.UnsupportedOperation

    seek = None  # type: ignore[assignment]


def streamed() -> bytes:
    buffer = Unseekable()
    with zipfile.ZipFile(buffer, "w") as archive:  # type: ignore[arg-type]
        for name, data in records_of(GOOD):
            archive.writestr(name, data)
    return buffer.getvalue()


def with_folders() -> bytes:
    """Zip like ``zip -0 -r``."""
    return zipped([("archive/", b""), ("archive/data/", b""), *sorted(records_of(GOOD))])


def large_sizes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in records_of(GOOD):
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(data)
    return buffer.getvalue()


def commented() -> bytes:
    buffer = io.BytesIO(PLAIN)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = b"my best model"
    return buffer.getvalue()


def without_checksums() -> bytes:
    torch.serialization.set_crc32_options(False)
    try:
        return saved(CONTENT)
    finally:
        torch.serialization.set_crc32_options(True)


SOUND = {
    "torch.save": GOOD,
    "zip -0": PLAIN,
    "zip -0 -r": with_folders(),
    "a stream": streamed(),
    "zip64": large_sizes(),
    "a comment": commented(),
    "padding": GOOD + bytes(300),
    "no checksums": without_checksums(),
}


@pytest.mark.parametrize("case", SOUND)
def test_whatever_wrote_the_zip_its_weights_load_to_the_bit(case: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(SOUND[case])
    for weights_only in (True, False):
        loaded = read_checkpoint(path, weights_only=weights_only, verify=True)
        assert is_mapped(path)
        assert [*loaded] == [*CONTENT]
        assert all(torch.equal(loaded[name], CONTENT[name]) for name in CONTENT)
        del loaded
    assert verify_checkpoint(str(path))[0].has_checksums is (case != "no checksums")
    model = torch.nn.Linear(30, 20)
    load_weights(model, path)
    assert torch.equal(model.weight, CONTENT["weight"])


# -- damage ----------------------------------------------------------------------------------------------------------


def test_no_flipped_bit_changes_what_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    places = random.Random(0)
    loaded = 0
    for _ in range(150):
        damaged = bytearray(GOOD)
        damaged[places.randrange(len(GOOD))] ^= 1 << places.randrange(8)
        path.write_bytes(damaged)
        try:
            content = read_checkpoint(path, verify=True)
        except CheckpointError:
            continue
        loaded += 1
        assert all(torch.equal(content[name], CONTENT[name]) for name in CONTENT)
    assert loaded, "no bit was without meaning, so nothing was loaded"


# -- files that different readers read differently -------------------------------------------------------------------

OTHER = saved(OrderedDict(weight=torch.zeros(20, 30), bias=torch.zeros(20)))


def repeated(name: str, by: str = "") -> bytes:
    """Add a second record of that name, with the contents of another file."""
    return zipped([*records_of(GOOD), (by or f"archive/{name}", dict(records_of(OTHER))[f"archive/{name}"])])


def edited(
    data: bytes, name: str, *, index: dict[int, bytes] | None = None, header: dict[int, bytes] | None = None
) -> bytes:
    """Overwrite bytes of a record's entry in the index, and of its local header, at offsets within them."""
    changed = bytearray(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        local = archive.getinfo(name).header_offset
    entry = changed.rindex(name.encode()) - 46
    for start, patches in ((entry, index or {}), (local, header or {})):
        for offset, patch in patches.items():
            changed[start + offset : start + offset + len(patch)] = patch
    return bytes(changed)


def aliased() -> bytes:
    """Point the entry of data/1 at the bytes of data/0."""
    with zipfile.ZipFile(io.BytesIO(PLAIN)) as archive:
        target = archive.getinfo("archive/data/0")
    place = struct.pack("<L", target.header_offset)
    size = struct.pack("<3L", target.CRC, target.compress_size, target.file_size)
    return edited(PLAIN, "archive/data/1", index={42: place, 16: size})


def one_after_the_other() -> bytes:
    """Return two archives in one file, each of them whole."""
    buffer = io.BytesIO(zipped(records_of(OTHER)))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.filelist.clear()
        archive.NameToInfo.clear()
        archive.start_dir = len(buffer.getvalue())
        for name, data in records_of(GOOD):
            archive.writestr(name, data)
    return buffer.getvalue()


def inserted(data: bytes) -> bytes:
    """Insert bytes before the index that belong to nothing, and correct its place."""
    end = data.rindex(b"PK\5\6")
    length, start = struct.unpack_from("<2L", data, end + 12)
    assert start + length == end
    return data[:start] + b"hidden" * 9 + data[start:end] + data[end : end + 16] + struct.pack("<LH", start + 54, 0)


def resized(change: Callable[[bytes], bytes]) -> bytes:
    """Change the record of the first block of numbers."""
    return zipped([(name, change(data) if name.endswith("data/0") else data) for name, data in records_of(GOOD)])


ONE = "archive/data/1"
CONTRADICTORY = {
    "two descriptions": repeated("data.pkl"),
    "two blocks of numbers": repeated("data/0"),
    "names that differ in case": repeated("data/0", "archive/Data/0"),
    "two entries for the same bytes": aliased(),
    "another name in the header": edited(PLAIN, ONE, header={30: b"archive/data/7"}),
    "another method in the header": edited(PLAIN, ONE, header={8: b"\x08"}),
    "bytes before the first record": b"PK\3\4" + PLAIN,
    "two archives": one_after_the_other(),
    "bytes between records and index": inserted(PLAIN),
    "stored in fewer bytes": edited(PLAIN, ONE, index={24: struct.pack("<L", 90)}),
    "a record that is a folder": edited(PLAIN, ONE, index={38: b"\x10"}),
    "an entry too few": PLAIN[:-14] + struct.pack("<2H", 2, 2) + PLAIN[-10:],
}
AMBIGUOUS = {
    **{case: (data, "its records and the index at its end do not match") for case, data in CONTRADICTORY.items()},
    "two folders": (repeated("data.pkl", "other/data.pkl"), "more than one folder: archive/ and other/"),
    "encrypted": (edited(PLAIN, ONE, index={8: b"\x01"}), f"has an encrypted record, {ONE}"),
    "compressed": (zipped(records_of(GOOD), zipfile.ZIP_DEFLATED), "another program has compressed.*zip -0 -r"),
    "a record too short": (resized(lambda data: data[:-4]), "its description and its contents do not match"),
    "a record too long": (resized(lambda data: data + bytes(4)), "its description and its contents do not match"),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_zip_that_readers_read_differently_is_refused(case: str, tmp_path: Path) -> None:
    data, match = AMBIGUOUS[case]
    path = tmp_path / "last.ckpt"
    path.write_bytes(data)
    refuse_everywhere(path, match)


# -- what is checked is what is loaded ---------------------------------------------------------------------------------


def test_a_file_replaced_after_the_check_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    path.write_bytes(GOOD)
    other.write_bytes(OTHER)
    from_file = torch.from_file

    def replace_and_map(*args: Any, **kwargs: Any) -> Any:
        os.replace(other, path)
        return from_file(*args, **kwargs)

    monkeypatch.setattr(torch, "from_file", replace_and_map)
    assert torch.equal(read_checkpoint(path, verify=True)["weight"], CONTENT["weight"])
    assert not other.exists()


def test_a_pipe_is_no_checkpoint_and_nobody_waits_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "last.ckpt")
    with pytest.raises(BrokenCheckpointError, match="is a pipe or a device"):
        read_checkpoint(tmp_path / "last.ckpt")
    (tmp_path / "a.ckpt").write_bytes(GOOD[:-50])
    with pytest.raises(BrokenCheckpointError, match="cut short"):  # and it is not named as complete
        read_checkpoint(tmp_path / "a.ckpt")
