"""loading_checkpoint: a checkpoint was loaded onto the GPU, in addition to the model.

Memory ran out in the call that loads it.
"""

from lightning_gpu_tools.advice.findings import Cause, Findings, new_finding
from lightning_gpu_tools.advice.out_of_memory import ErrorFacts, another_gpu
from lightning_gpu_tools.memory.readings import LOADING_CHECKPOINT


def find(facts: ErrorFacts) -> Findings:
    if facts.oom.phase != LOADING_CHECKPOINT:
        return
    load = "plugins=[PortableCheckpointIO()]" if facts.run.has_trainer else "load_weights(model, path)"
    yield new_finding(
        "The checkpoint was loaded onto the GPU, where the model already was.",
        f"Load it into host memory: torch.load(path, map_location='cpu', mmap=True), or {load}.",
        another_gpu(facts),
    )


CAUSE = Cause(
    says="The checkpoint was loaded onto the GPU, where the model already was",
    change='`map_location="cpu"`, `PortableCheckpointIO`, `load_weights`',
    find=find,
    verified_on="hardware",
)
