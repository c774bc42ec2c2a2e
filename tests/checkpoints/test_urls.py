"""URLs that cannot be opened: the reason and what to do, with a real server and with packages that are missing."""

import functools
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import Exploit
from lightning.pytorch import LightningModule
from torch import nn

from lightning_gpu_tools import PortableCheckpointIO, load_from_checkpoint, load_weights
from lightning_gpu_tools.errors import UnreachableError, UnsafeCheckpointError

Run = Callable[..., tuple[int, str, str]]
WEIGHTS = nn.Linear(2, 2).state_dict()


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)


class Handler(SimpleHTTPRequestHandler):
    """Serves a folder, but for one name."""

    def send_head(self) -> Any:
        return self.send_error(403) if "forbidden" in self.path else super().send_head()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path)) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def refused(url: str, run: Run, tmp_path: Path) -> str:
    """Return what every way to open a URL says about it."""
    words = set()
    for way in (
        lambda: load_weights(nn.Linear(2, 2), url),
        lambda: load_from_checkpoint(Lit, url),
        lambda: PortableCheckpointIO().load_checkpoint(url),
    ):
        with pytest.raises(UnreachableError) as caught:
            way()
        words.add(str(caught.value))
    for action in (["inspect", url], ["verify", url], ["convert", url, tmp_path / "a.pt"]):
        code, _, error = run(*action)
        assert code == 1
        words.add(error.removeprefix("lightning-gpu-tools: ").rstrip())
    assert len(words) == 1
    return words.pop()


def test_weights_from_a_url_are_only_weights(server: str, tmp_path: Path) -> None:
    target = nn.Linear(2, 2)
    torch.save(WEIGHTS, tmp_path / "good.pt")
    load_weights(target, f"{server}/good.pt?X-Amz-Signature={'a' * 300}")  # longer than a name of a file can be
    assert torch.equal(target.weight, WEIGHTS["weight"])
    torch.save({"state_dict": WEIGHTS, "x": Exploit(tmp_path / "it ran")}, tmp_path / "bad.pt")
    assert load_weights(target, f"{server}/bad.pt").unread == ("posix.mkdir",)
    with pytest.raises(UnsafeCheckpointError, match=rf"{server}/bad\.pt holds more than plain data"):
        load_from_checkpoint(Lit, f"{server}/bad.pt")
    assert not (tmp_path / "it ran").exists()
    with pytest.raises(FileNotFoundError, match=rf"Checkpoint file not found: {server}/gone\.pt"):
        load_weights(target, f"{server}/gone.pt")


def test_a_servers_refusal_is_the_reason(server: str, run: Run, tmp_path: Path) -> None:
    words = refused(f"{server}/forbidden.ckpt", run, tmp_path)
    assert "forbidden.ckpt cannot be opened: the server answers 403 Forbidden" in words
    assert words.endswith(". Check the URL and your access to it, or use a local file.")


def test_a_host_that_does_not_answer_is_named(run: Run, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        for protocol, words in {"http": "Cannot connect to host 127.0.0.1", "ftp": "Connection refused"}.items():
            assert words in refused(f"{protocol}://127.0.0.1:{port}/a.pt", run, tmp_path)
    assert "foo://a.pt cannot be opened: Protocol not known: foo. Check" in refused("foo://a.pt", run, tmp_path)


@pytest.mark.follows("To install it: pip install")
def test_a_missing_package_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "s3://bucket/a.ckpt"
    monkeypatch.setitem(sys.modules, "s3fs", None)
    words = refused(url, run, tmp_path)
    assert f"{url} cannot be opened: Install s3fs to access S3. To install it: pip install s3fs." in words
    torch.save(WEIGHTS, tmp_path / "a.pt")
    code, _, error = run("convert", tmp_path / "a.pt", url)
    assert (code, "Install s3fs to access S3" in error) == (1, True)
    with pytest.raises(OSError, match="Install s3fs"):
        PortableCheckpointIO().save_checkpoint({}, url)
