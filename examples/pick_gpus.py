"""Pick the GPU with the most free memory, claim it, and train on it.

    python examples/pick_gpus.py

Without an NVIDIA GPU, the example prints the reason and trains on the CPU.
"""

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_gpu_tools import FreeMemoryCUDAAccelerator, list_gpus, select_gpus
from lightning_gpu_tools.errors import NotEnoughGpusError, NvmlUnavailableError


def main() -> None:
    try:
        for gpu in list_gpus():
            print(f"GPU {gpu.index} {gpu.name}: {gpu.memory_free_bytes} bytes free, {gpu.utilization_percent}% busy")
        # A preview, without a claim.
        print(select_gpus(min_free="1GiB", claim=False).reason)
    except (NvmlUnavailableError, NotEnoughGpusError) as error:
        print(f"No GPU: {error}")
    # This is also False if torch was built without CUDA.
    usable = FreeMemoryCUDAAccelerator.is_available()
    accelerator = FreeMemoryCUDAAccelerator(min_free="1GiB") if usable else "cpu"
    trainer = Trainer(accelerator=accelerator, devices=1, max_steps=10, logger=False, enable_checkpointing=False)
    trainer.fit(BoringModel())
    print(f"Trained on {trainer.strategy.root_device}.")


if __name__ == "__main__":
    main()
