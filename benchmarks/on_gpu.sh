#!/usr/bin/env bash
# Runs the tests marked `gpu` and the benchmarks that need a GPU, and keeps the raw results.
#
#     benchmarks/on_gpu.sh [PART ...]        default: all parts below
#
# Results are written to $RESULTS, by default benchmarks/results. On simulated GPUs, the default is
# benchmarks/results/simulated_gpu, and the results are marked as simulated:
#
#     python -m lightning_gpu_tools.simulated -n 2 -- benchmarks/on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
parts=(tests peaks times advice diagnosis batches step_cost memory pick)
folder=${RESULTS:-benchmarks/results}
if [ -n "${SIMULATED_CUDA:-}" ]; then
    parts=(tests diagnosis step_cost memory pick)
    folder=${RESULTS:-benchmarks/results/simulated_gpu}
    echo "GPUs are simulated: these results do not show a GPU's speed."
fi
[ $# -eq 0 ] || parts=("$@")
mkdir -p "$folder"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv | tee "$folder/gpu_machine.csv"
failed=0
for part in "${parts[@]}"; do
    began=$SECONDS
    case $part in
        # xdist starts a new process after a test that ends its process.
        tests) command=(-m pytest tests/on_gpu -n 1 -v --durations=20 -p no:cacheprovider --junitxml="$folder/gpu_tests.xml") ;;
        peaks) command=(benchmarks/dry_run_peaks.py --output "$folder/gpu_peaks.json") ;;
        times) command=(benchmarks/gpu_times.py --output "$folder/gpu_times.json") ;;
        advice) command=(benchmarks/following_advice.py --reports "$folder/following_advice" --output "$folder/following_advice.json") ;;
        diagnosis) command=(benchmarks/diagnosis_on_gpu.py --seconds 10 --output "$folder/gpu_diagnosis.json") ;;
        batches) command=(benchmarks/largest_batch.py --output "$folder/gpu_largest_batch.json") ;;
        step_cost) command=(benchmarks/step_overhead.py --rounds 20 --steps 499 --tool "monitor + advisor" --output "$folder/gpu_step_overhead.json") ;;
        memory) command=(benchmarks/out_of_memory.py --output "$folder/gpu_out_of_memory.json") ;;
        pick) command=(benchmarks/pick_speed.py --real --output "$folder/gpu_pick_speed.json") ;;
        *) echo "Unknown part: $part" >&2; exit 2 ;;
    esac
    "$python" "${command[@]}" 2>&1 | tee "$folder/gpu_$part.log"
    rc=${PIPESTATUS[0]}
    [ "$rc" = 0 ] || failed=1
    echo "== $part: exit code $rc after $((SECONDS - began)) s"
done
exit $failed
