#!/usr/bin/env bash
# Everything that needs a GPU, in one command: the tests marked `gpu` and the benchmarks, with their raw results.
#
#     benchmarks/on_gpu.sh [FOLDER FOR THE RESULTS, default benchmarks/results]
#
# On the simulated machine the folder is by default benchmarks/results/simulated_gpu, and each result names it:
#
#     python -m lightning_gpu_tools.simulated -n 2 -- benchmarks/on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=benchmarks/results
step_overhead=() on_small_gpu=()
if [ -n "${SIMULATED_CUDA:-}" ]; then
    results=benchmarks/results/simulated_gpu
    step_overhead=(--rounds 14 --tool "monitor + advisor")
    on_small_gpu=("$python" -m lightning_gpu_tools.simulated --gpu t4 -n 2 --)  # its largest batches fit the host
    echo "Simulated GPU, torch's CUDA build: these results say nothing of a GPU's speed."
fi
folder=${1:-$results}
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$folder/gpu_machine.csv"
"$python" -m pytest -m gpu -v --junitxml="$folder/gpu_tests.xml" 2>&1 | tee "$folder/gpu_tests.log"
tests=$?
"$python" benchmarks/step_overhead.py "${step_overhead[@]}" --output "$folder/gpu_step_overhead.json"
"$python" benchmarks/diagnosis_on_gpu.py --output "$folder/gpu_diagnosis.json"
"${on_small_gpu[@]}" "$python" benchmarks/out_of_memory.py --output "$folder/gpu_out_of_memory.json"
"$python" benchmarks/pick_speed.py --real --output "$folder/gpu_pick_speed.json"
exit $tests
