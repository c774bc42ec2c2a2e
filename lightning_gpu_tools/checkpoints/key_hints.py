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
# One of the two parts of a weight by torch.nn.utils.weight_norm, or by that of torch.nn.utils.parametrizations.
_WEIGHT_NORM = re.compile(r"(?:^|\.)(?:weight_g|parametrizations\.\w+\.original0)$")


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
    saved, own = _normed_layers(unexpected), _normed_layers(missing)
    if saved:
        do = "Create the model with" if own else "Before loading, call"
        function = "torch.nn.utils.parametrizations.weight_norm"
        yield f"It was saved with weight_norm on {list_groups(saved)}. {do} {function} on these layers."
    elif own:
        yield f"The model has weight_norm on {list_groups(own)}. Load the weights before weight_norm is called."


def _normed_layers(keys: Iterable[str]) -> list[str]:
    """Return the modules with these keys whose weight is divided by weight_norm."""
    return [key[: found.start()] for key in keys if (found := _WEIGHT_NORM.search(key))]
