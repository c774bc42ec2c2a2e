"""A real SLURM on this one machine: two nodes, each with four GPUs that are no devices."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

WHY_NOT = (
    "SLURM is not installed (apt-get install slurm-wlm)"
    if shutil.which("slurmctld") is None
    else "SLURM's daemons need root"
    if os.geteuid() != 0
    else ""
)
# No device is guarded, and nothing waits for more jobs to come.
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
KillWait=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=1000 Gres=gpu:4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=1000 Gres=gpu:4
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start SLURM, and yield the environment that its commands need."""
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(3)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    devices = [folder / f"nvidia{index}" for index in range(4)]
    for device in devices:
        os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))  # as /dev/null
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/nvidia[0-3]\n")
    configuration = _CONFIGURATION.format(folder=folder, ports=ports, host=socket.gethostname().partition(".")[0])
    (folder / "slurm.conf").write_text(configuration)
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    # The cluster gets a key of its own, whose owner can run anything as anybody.
    with open(folder / "munge.key", "wb", opener=lambda path, flags: os.open(path, flags, mode=0o400)) as key:
        key.write(os.urandom(128))
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = ["munged", "--foreground", "--force", *(f"--{name}={folder}/munge.{end}" for name, end in names.items())]
    with (folder / "log").open("w") as log, ExitStack() as daemons:
        for command in (munged, ["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            daemon = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
            daemons.callback(daemon.wait)
            daemons.callback(daemon.terminate)
        wait_for(lambda: _answer(environment, "sinfo", "-ho", "%t").split() == ["idle"], folder / "log")
        yield environment
        _answer(environment, "scancel", "--user=root")
        wait_for(lambda: not _answer(environment, "squeue", "-h"), folder / "log")


def _answer(environment: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=30).stdout


def wait_for(happens: Callable[[], object], log: Path | None = None) -> None:
    """Wait for something that takes well under a second on a quiet machine."""
    deadline = time.monotonic() + 60
    while not happens():
        assert time.monotonic() < deadline, log.read_text()[-3000:] if log else "it has not happened"
        time.sleep(0.05)
