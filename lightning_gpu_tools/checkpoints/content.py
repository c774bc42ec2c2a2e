"""Where the weights are in what a checkpoint holds; for loaded tensors and for descriptions of tensors alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning_gpu_tools.units import printable

LIGHTNING_VERSION = "pytorch-lightning_version"
# What PortableCheckpointIO adds to a Lightning checkpoint: primitives only, so that weights_only=True reads them.
MANIFEST = "lightning_gpu_tools"
# Entries of a Lightning checkpoint whose keys are the model's: WeightAveraging adds the second.
MODEL_STATES = ("state_dict", "current_model_state")


def likely(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the ``state_dict`` entry alone if there is one: it is meant whenever nobody names another."""
    return {"state_dict": entries["state_dict"]} if "state_dict" in entries else dict(entries)


def all_state_dicts(content: Any, tensor_type: type) -> dict[str, Mapping[str, Any]]:
    """Return every set of weights in a checkpoint's content, by the name of its entry; ``""`` for the content itself.

    That is every dictionary of tensors except an optimizer's state.
    """
    if not isinstance(content, Mapping):
        return {}
    if is_state_dict(content, tensor_type):
        return {"": content}
    if not is_lightning_checkpoint(content):
        return dict(_nested_state_dicts(content, "", 2, tensor_type))
    # Callbacks keep averages a level deeper. The model may have no weights at all.
    return {"state_dict": content["state_dict"]} | dict(_nested_state_dicts(content, "", 3, tensor_type))


def is_state_dict(value: Any, tensor_type: type) -> bool:
    """Whether this is a model's state: tensors by name, apart from extra states and settings of quantised modules."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return False
    if hasattr(value, "_metadata"):  # torch puts it there and keeps it in the file
        return bool(value)
    tensors = 0
    for key, item in value.items():
        if type(item) is tensor_type or isinstance(item, tensor_type):  # the first is true nearly always, and faster
            tensors += 1
        elif isinstance(item, Mapping) and not key.endswith("_extra_state"):
            return False
    return tensors > 0 and 2 * tensors >= len(value)


def is_lightning_checkpoint(content: Any) -> bool:
    """Whether this is what ``Trainer.save_checkpoint`` writes."""
    return (
        isinstance(content, Mapping) and LIGHTNING_VERSION in content and isinstance(content.get("state_dict"), Mapping)
    )


def describe_content(content: Any) -> str:
    """Say what a file holds that holds no weights."""
    if isinstance(content, Mapping):
        names = [printable(name) for name in content]
        return f"a dictionary with {', '.join(names[:8])}" if names else "an empty dictionary"
    return f"a {printable(type(content).__name__)}"


def _nested_state_dicts(
    content: Mapping[str, Any], path: str, depth: int, tensor_type: type
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in content.items():
        if not isinstance(value, Mapping) or not isinstance(name, str) or "param_groups" in value:  # an optimizer's
            continue
        if is_state_dict(value, tensor_type):
            if any(getattr(item, "shape", ()) != () for item in value.values()):  # else they are scores and counters
                yield path + name, value
        elif depth > 1:
            yield from _nested_state_dicts(value, f"{path}{name}.", depth - 1, tensor_type)
