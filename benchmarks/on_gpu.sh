#!/usr/bin/env bash
# Everything that needs a GPU, in one command: the tests marked `gpu` and the benchmarks, with their raw results.
#
#     benchmarks/on_gpu.sh [FOLDER FOR THE RESULTS, default benchmarks/results]
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-benchmarks/results}
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$folder/gpu_machine.csv"
python3 -m pytest -m gpu -v --junitxml="$folder/gpu_tests.xml" 2>&1 | tee "$folder/gpu_tests.log"
tests=$?
python3 benchmarks/step_overhead.py --output "$folder/gpu_step_overhead.json"
python3 benchmarks/diagnosis_on_gpu.py --output "$folder/gpu_diagnosis.json"
python3 benchmarks/out_of_memory_on_gpu.py --output "$folder/gpu_out_of_memory.json"
python3 benchmarks/pick_speed.py --real --output "$folder/gpu_pick_speed.json"
exit $tests
