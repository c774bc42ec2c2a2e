"""Mounted file systems, from the kernel's text and from this machine."""

import os
import subprocess
from pathlib import Path

import pytest

from lightning_gpu_tools.processes import mount_of, parse_mounts, read_mounts

# As the kernel writes them: a container, whose root is an overlay, with a bind mount of a folder and of a file.
MOUNTINFO = r"""2048 1024 0:300 / / rw,relatime master:77 - overlay overlay rw,lowerdir=/l/A:/l/B,upperdir=/d,workdir=/w
2049 2048 0:24 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
2050 2048 0:25 / /dev/shm rw,nosuid - tmpfs shm rw,size=65536k
2051 2048 8:1 /var/lib/etc-hosts /etc/hosts rw,relatime - ext4 /dev/sda1 rw
2052 2048 8:17 /users/ada /home/ada rw,relatime shared:5 master:2 - xfs /dev/sdb1 rw,attr2
2053 2048 0:51 / /data rw,relatime shared:9 - nfs4 10.0.0.9:/export rw,vers=4.2,hard
2054 2053 0:52 / /data/scratch rw - lustre 10.0.0.7@tcp:/scratch rw,flock
2055 2048 0:53 / /buckets/my\040images rw,nosuid,nodev - fuse.gcsfuse user_id=0 rw,user_id=1000,group_id=0
2056 2048 0:54 / /old rw - ext4 /dev/sdc rw
2057 2056 0:55 / /old rw - nfs filer:/old rw
a line of a new kernel
"""


@pytest.mark.parametrize(
    ("path", "point", "file_system"),
    [
        ("/home/ada/set/a.png", "/home/ada", "xfs"),
        ("/home/adam", "/", "overlay"),
        ("/buckets/my images/0.tar", "/buckets/my images", "fuse.gcsfuse"),
        ("/old/a", "/old", "nfs"),  # the later mount hides the earlier one
    ],
)
def test_a_file_is_on_the_innermost_mount(path: str, point: str, file_system: str) -> None:
    mount = mount_of(path, parse_mounts(MOUNTINFO))
    assert mount is not None
    assert (mount.point, mount.file_system) == (point, file_system)


def test_a_mount_has_device_folder_and_fuse_user() -> None:
    mounts = parse_mounts(MOUNTINFO)
    assert mounts["/home/ada"][2:] == ("8:17", "/users/ada", None)
    assert mounts["/buckets/my images"].user_id == 1000


def test_the_file_system_of_this_folder_matches_df(tmp_path: Path) -> None:
    mount = mount_of(os.path.realpath(tmp_path), read_mounts())
    assert mount is not None
    df = subprocess.run(["df", "--output=fstype", tmp_path], capture_output=True, text=True, check=True)
    assert mount.file_system == df.stdout.split()[-1]
