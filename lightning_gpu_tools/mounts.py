"""Mounted file systems, from the kernel's mountinfo."""

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

from lightning_gpu_tools.processes import read_kernel_file


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    file_system: str  # type, as the kernel names it: "ext4", "nfs4", "fuse.gcsfuse"
    device: str  # "8:1"; the same for all mounts of one file system
    folder: str  # the folder of the file system that is mounted: "/"
    user_id: int | None  # UID of the mounting user; None except for FUSE, which any user may mount


def read_mounts(process: int | str = "self") -> dict[str, Mount]:
    """Return the mounts that a process sees, by mount point; empty if they are hidden from this user."""
    return parse_mounts(read_kernel_file(f"/proc/{process}/mountinfo"))


def parse_mounts(mountinfo: str) -> dict[str, Mount]:
    """Parse the text of proc_pid_mountinfo(5). A later mount hides an earlier one at the same point."""
    found = {}
    for line in mountinfo.split("\n"):
        words, _, kind = line.partition(" - ")
        fields = words.split(" ")
        if kind and len(fields) > 4:
            # Spaces, tabs, newlines and backslashes are in octal.
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            user = re.search(r"\buser_id=(\d+)", kind.rpartition(" ")[2])  # not in the source, which is free text
            found[point] = Mount(point, kind.split(" ")[0], fields[2], fields[3], int(user[1]) if user else None)
    return found


def mount_of(path: str, mounts: Mapping[str, Mount]) -> Mount | None:
    """Return the mount with the longest mount point that contains a real path; ``None`` if there is none."""
    while path not in mounts and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return mounts.get(path)
