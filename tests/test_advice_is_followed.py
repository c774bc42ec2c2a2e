"""Each message that names a command, an option, an argument, or a value has a test that does what it says.

Such a test produces the message, takes from it what it advises, does that, and sees what was promised. It is marked
with a part of the message as it stands in the source: ``@pytest.mark.follows("part of the message")``.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "lightning_gpu_tools"

FOLDERS = ("advice", "loaders", "checkpoints", "selection", "gpus", "trainer")

# What a reader can type: an option, an argument with its value, a call, a command, or a variable of the environment.
_CAN_BE_TYPED = re.compile(
    r"""
    (?<![\w-])--[a-z][a-z-]+
    | \b[a-z_]+=[\w'"{(\[]
    | \b[\w.]+\(\)
    | \b(?:[A-Z]\w+|torch\.\w+)\((?!s\))
    | \b[A-Z_]{6,}=
    | \b(?:pip\ install|lightning-gpu-tools|torchrun|sudo|docker\ run|ps\ aux|python3?\ -m|py-spy|nvidia-smi|zip\ -)
    """,
    re.VERBOSE,
)
_MIN_WORDS = 4  # fewer are a name, a format, or a key
# Fields of a cause that describe its messages, for the docs; so do instances of Variant.
_DESCRIPTIONS = {"says", "change", "rows"}
# Texts of this kind that advise nothing, or nothing that a test here can do, with the reason.
_EXCEPTIONS = {
    "[Ee]rror(?: \\[CUDA\\])?: out of memory": "a pattern for errors of others",
    "cuda.cuInit(0) == 0": "a program",
    "LIGHTNING_GPU_TOOLS=advise has no effect": "the beginning of a warning",
    "/dev/shm is too small for their batches": "needs another container",
    "no_sync() in 3 of 4 batches": "a part of the message of communication",
    "(CUDA graphs)": "compiled kernels compute nothing on simulated GPUs",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": "what torch and NCCL print of a network that does not respond",
    "Fetch the file: git lfs pull": "needs Git LFS and a server",
    "nvidia-smi -q -d PERFORMANCE": "needs a hot GPU",
    "(nvidia-smi -pl) steadies the clocks": "needs a hot GPU",
    "Check nvidia-smi dmon": "needs a MIG instance",
    "check `nvidia-smi` and `dmesg`": "asks the driver of a real GPU",
    "Does `nvidia-smi` work?": "asks the driver of a real GPU",
    "Try `sudo modprobe nvidia`": "changes the driver of a real GPU",
    "run `nvidia-smi --gpu-reset` as root": "changes a real GPU",
    "change it with `nvidia-smi -c DEFAULT`": "changes a real GPU",
    "create one (`nvidia-smi mig -cgi ... -C`)": "changes a real GPU",
    "Containers need `--gpus all` and `utility` in NVIDIA_DRIVER_CAPABILITIES": "needs a container",
    "Merge them first (peft: ": "needs peft",
    "Load the weights before get_peft_model": "needs peft",
}


class Message(NamedTuple):
    """A text of the package, with ``{}`` for each value that is filled in."""

    file: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(PACKAGE)}:{self.line}: {self.text}"


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None and right is None else f"{left or '{}'}{right or '{}'}"
    return None


def _docstrings(tree: ast.AST) -> set[int]:
    return {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def _messages(file: Path) -> Iterator[Message]:
    tree = ast.parse(file.read_text())
    left_out = _docstrings(tree)

    def below(node: ast.AST) -> Iterator[Message]:
        if id(node) in left_out or (isinstance(node, ast.keyword) and node.arg in _DESCRIPTIONS):
            return
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Variant":
            return
        text = _text(node)
        if text is not None and len(text.split()) >= _MIN_WORDS and _CAN_BE_TYPED.search(text):
            yield Message(file, node.lineno, text)  # type: ignore[attr-defined]
        parts = ast.iter_child_nodes(node)
        if text is not None:  # a text's own parts are in it; only texts within its values are others
            parts = (part for one in ast.walk(node) if isinstance(one, ast.FormattedValue) for part in [one.value])
        for part in parts:
            yield from below(part)

    yield from below(tree)


def _followed() -> Iterator[str]:
    """Return the texts that tests follow."""
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.follows":
                yield from ast.literal_eval(ast.List(node.args, ast.Load()))


def test_each_message_with_advice_is_followed() -> None:
    parts = [*_followed(), *_EXCEPTIONS]
    messages = (
        message
        for folder in FOLDERS
        for file in sorted((PACKAGE / folder).rglob("*.py"))
        for message in _messages(file)
    )
    not_followed = [message for message in messages if not any(part in message.text for part in parts)]
    assert not not_followed, "No test follows:\n" + "\n".join(map(str, not_followed))


def test_what_is_followed_is_a_message() -> None:
    nodes = (node for file in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    texts = "\n".join(text for node in nodes if (text := _text(node)) is not None)
    gone = [part for part in {*_followed(), *_EXCEPTIONS} if part not in texts]
    assert not gone, "No message has:\n" + "\n".join(gone)
