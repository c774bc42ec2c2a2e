"""Whether a folder is seen by other jobs on this machine: schedulers and containers give a job mounts of its own."""

from __future__ import annotations

import os


def why_private(path: str) -> str | None:
    """Return why the folder is one that other jobs on this machine do not see; ``None`` if nothing says so."""
    own_mounts = _mounts_of("self")
    mount = mount_of(path, own_mounts)
    # Readable by everybody, except where /proc is mounted with hidepid: then it is not known.
    if mount != mount_of(path, _mounts_of("1") or own_mounts):
        return "is private to this job, on a mount of its own"
    markers = ("/.dockerenv", "/run/.containerenv")  # written by Docker; by Podman
    is_contained = any(map(os.path.exists, markers)) or "KUBERNETES_SERVICE_HOST" in os.environ
    if is_contained and mount == mount_of("/", own_mounts):
        return "is private to this container"
    return None


def mount_of(path: str, mounts: str) -> tuple[str, str] | None:
    """Return device and folder in it that are mounted where ``path`` is.

    Args:
        path: An absolute path.
        mounts: Content of ``/proc/PID/mountinfo``, see proc_pid_mountinfo(5).
    """
    found, longest = None, ""
    for line in mounts.splitlines():
        _, _, device, folder, point = line.split(" ")[:5]
        parents = point if point == "/" else f"{point}/"
        if f"{path}/".startswith(parents) and len(point) >= len(longest):  # a later mount hides an earlier one
            found, longest = (device, folder), point
    return found


def _mounts_of(process: str) -> str:
    try:
        with open(f"/proc/{process}/mountinfo", errors="replace") as file:
            return file.read()
    except OSError:  # hidden from this user
        return ""
