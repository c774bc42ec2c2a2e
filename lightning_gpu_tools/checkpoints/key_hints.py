"""Advice for keys that only a checkpoint or only a model has, if they show which tool has changed one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from lightning_gpu_tools.checkpoints.key_tree import list_groups

# Names of the two factors in peft, loralib and diffusers.
_LORA = re.compile(r"(?<![A-Za-z])lora[._](?:A|B|down|up|embedding_A|embedding_B)(?![A-Za-z])")
# A model by get_peft_model.
_PEFT = re.compile(r"^base_model\.model\.|\.base_layer\.")
_FSDP = re.compile(r"(?:^|\.)_?flat_param(?:_\d+)?$")
# Functions of torch.nn.utils that divide a weight, and names of its parts. This weight_norm also loads the older one's.
_DIVIDED_BY = {
    "parametrizations.weight_norm": re.compile(r"(?:^|\.)(?:weight_g|parametrizations\.\w+\.original[01])$"),
    "parametrizations.spectral_norm": re.compile(r"(?:^|\.)parametrizations\.\w+\.0\._[uv]$"),
    "spectral_norm": re.compile(r"(?:^|\.)weight_(?:orig|u)$"),
}


def hints(missing: Iterable[str], unexpected: Iterable[str]) -> Iterator[str]:
    """Yield what to do about keys that a checkpoint lacks, and about its own keys, under the model's names."""
    missing, unexpected = [*missing], [*unexpected]
    if any(map(_LORA.search, unexpected)):
        yield (
            "The checkpoint holds LoRA weights, which modify a base model. Merge them first (peft: "
            "merge_and_unload()), or load them with peft."
        )
    elif any(_LORA.search(key) or _PEFT.search(key) for key in missing):
        yield "The model has been changed by peft. Load the weights before get_peft_model."
    if any(map(_FSDP.search, unexpected)):
        yield (
            "The checkpoint holds FSDP's flat parameters, each with parts of several weights. During training, save "
            "the full weights from torch.distributed.checkpoint.state_dict.get_model_state_dict with "
            "StateDictOptions(full_state_dict=True)."
        )
    saved = {function: _layers(pattern, unexpected) for function, pattern in _DIVIDED_BY.items()}
    own = {function: _layers(pattern, missing) for function, pattern in _DIVIDED_BY.items()}
    for function, layers in saved.items():
        if layers:
            do = "Create the model with" if any(own.values()) else "Before loading, call"
            name = function.rpartition(".")[2]
            yield f"It was saved with {name} on {list_groups(layers)}. {do} torch.nn.utils.{function} on these layers."
    for function, layers in own.items():
        if layers and not any(saved.values()):
            name = function.rpartition(".")[2]
            yield f"The model has {name} on {list_groups(layers)}. Load the weights before {name} is called."


def _layers(pattern: re.Pattern[str], keys: Iterable[str]) -> list[str]:
    """Return the modules with parameters of these names, without repeats."""
    matches = ((key, pattern.search(key)) for key in keys)
    return [*dict.fromkeys(key[: match.start()] for key, match in matches if match)]
