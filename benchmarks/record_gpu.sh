#!/usr/bin/env bash
# Run the GPU tests, then record the GPU benchmarks of the engine: those of docs/performance.md but for the pair with
# SGLang and what was tuned or tried, and the kernels one by one.
#
#   bash benchmarks/record_gpu.sh LOGS
#
# Records go to benchmarks/results, what the programs print to the folder LOGS. Tests and the kernels' compilation run
# side by side; then one benchmark after the other has the machine to itself. About twenty minutes with 16 cores and an
# H200 (140 GB: nine processes hold the three models at once). With two GPUs the tests of two run too.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=${1:?name a folder for the logs}
mkdir -p "$logs"
results=benchmarks/results
gpus=$(nvidia-smi -L | wc -l)
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
say() { echo "$SECONDS s: $*"; }

capture() { # compile what decode.py runs of these geometries, all at once; what is tuned in such a crowd is not kept
    local name size pids=()
    for name in "$@"; do
        for size in 32 8 1; do
            FLA_CACHE_RESULTS=0 CUDA_VISIBLE_DEVICES=0 python3 benchmarks/decode.py --full --capture-only \
                --geometry "$name" --batch "$size" > "$logs/capture-$name-$size.txt" 2>&1 &
            pids+=($!)
        done
    done
    wait "${pids[@]}"
    say "captured $*"
}

check() { # check NAME WORKERS TESTS...
    local name=$1 workers=$2
    shift 2
    python3 -m pytest -p no:cacheprovider -n "$workers" -m gpu -rf "$@" > "$logs/$name.txt" 2>&1
    say "$name: $(tail -n 1 "$logs/$name.txt")"
}

record() { # record NAME OPTIONS...: of benchmarks/NAME.py, in NAME-h200.json
    local name=$1
    shift
    CUDA_VISIBLE_DEVICES=0 python3 "benchmarks/$name.py" "$@" --out "$results/${name//_/-}-h200.json" \
        > "$logs/$name.txt" 2>&1
    say "$name ended with $?"
}

CUDA_VISIBLE_DEVICES=$((gpus - 1)) check tests 9 tests/kernels tests/engine tests/train/test_gpu.py &
tests=$!
if [ "$gpus" -gt 1 ]; then
    check tests-of-two 4 tests/train/test_two_gpus.py &
    tests="$tests $!"
fi
capture 4b 0.8b
capture 9b
# shellcheck disable=SC2086
wait $tests
record decode --full --start-ups 4b 0.8b 9b
record sampled
record divergence --geometry 0.8b 4b 9b --jobs 4
record delta_programs --geometry 0.8b 4b 9b
record kernels
python3 benchmarks/write_performance.py
