#!/usr/bin/env bash
# What to run on a machine with a GPU, most important first, within eight minutes: build, tests, benchmarks. Needs torch, triton, pytest and,
# for the extension, nvcc and a C++ compiler; rich and matplotlib are used where they are installed.
#
#   bash bench/gpu_check.sh [--dry-run] [--steps build,tests,kernels,block,training,plot]
#
# Everything lands in $OUT (bench/results/gpu-NAME): summary.txt with a line a step, log.txt, a JSON file a benchmark, report.png. Each step
# has a limit of its own and ends sooner where the total (LIMIT seconds) is spent; what a step has measured by then is kept.
# --dry-run goes the same way on a CPU, with tiny shapes under Triton's interpreter and four times the limits, and builds into a temporary
# folder.
set -uo pipefail
cd "$(dirname "$0")/.."

DRY=0
STEPS=build,tests,kernels,block,training,plot
while [ $# -gt 0 ]; do
    case "$1" in
        --dry-run) DRY=1 ;;
        --steps) STEPS="${2:?--steps must name steps}"; shift ;;
        *) echo "usage: bash bench/gpu_check.sh [--dry-run] [--steps ${STEPS}]" >&2; exit 2 ;;
    esac
    shift
done

PYTHON="${PYTHON:-python3}"
LIMIT="${LIMIT:-$((DRY ? 1800 : 470))}"
export PYTHONUNBUFFERED=1
# The interpreter is for machines without a GPU, and the tests' own settings leave a choice made here alone.
export TRITON_INTERPRET="$DRY"
if [ "$DRY" = 1 ]; then
    NAME=dry-run
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
else
    NAME="gpu-$("$PYTHON" -c 'import re, torch; print(re.sub(r"\W+", "-", torch.cuda.get_device_name()).lower())')" || {
        echo "gpu_check: $PYTHON has no torch that finds a GPU; --dry-run needs none" >&2
        exit 2
    }
    # An nvcc on the PATH may be a script that calls the real one; the toolkit itself is what a build needs.
    [ -n "${CUDA_HOME:-}" ] || { [ -x /usr/local/cuda/bin/nvcc ] && export CUDA_HOME=/usr/local/cuda; }
fi
OUT="${OUT:-bench/results/$NAME}"
mkdir -p "$OUT"
: >"$OUT/log.txt"
: >"$OUT/summary.txt"
TEMPORARY="$(mktemp -d)"
trap 'rm -rf "$TEMPORARY"' EXIT
FAILED=0

# step NAME SECONDS COMMAND...: run it if it was asked for, within its limit and the total's, and note how it ended.
step() {
    local name="$1" seconds=$(($2 * (DRY ? 4 : 1))) start=$SECONDS result
    shift 2
    case ",$STEPS," in *",$name,"*) ;; *) return ;; esac
    [ $((LIMIT - SECONDS)) -lt "$seconds" ] && seconds=$((LIMIT - SECONDS))
    if [ "$seconds" -le 5 ]; then
        result="not run: the time is spent"
    else
        printf '\n===== %s: %s\n' "$name" "$*" | tee -a "$OUT/log.txt"
        BUDGET=$((seconds * 3 / 4)) timeout --kill-after=5 "$seconds" "$@" 2>&1 | tee -a "$OUT/log.txt"
        case "${PIPESTATUS[0]}" in
            0) result=passed ;;
            124 | 137) result="cut off after $seconds s" ;;
            *) result=failed ;;
        esac
    fi
    [ "$result" = passed ] || FAILED=1
    printf '%-10s %-24s %4d s\n' "$name" "$result" $((SECONDS - start)) >>"$OUT/summary.txt"
}

build() {
    if [ "$DRY" = 1 ]; then
        "$PYTHON" setup.py --quiet build_ext --build-lib "$TEMPORARY/lib" --build-temp "$TEMPORARY/temp" && ls "$TEMPORARY"/lib/ckpt_ext/_C*
    else
        "$PYTHON" setup.py --quiet build_ext --inplace --build-temp "$TEMPORARY/temp" &&
            "$PYTHON" -c 'from ckpt_ext import extension; found = extension.status(); print(found); assert found.loaded and found.cuda'
    fi
}

# Files are named, not found: collecting the rest would ask for packages that may be missing here.
tests() {
    local workers=() marker=gpu files
    files="$(grep -l 'mark\.gpu' tests/test_*.py)"
    if [ "$DRY" = 1 ]; then
        marker="not gpu" files="$(ls tests/test_gpu_*.py)"
    elif "$PYTHON" -c 'import xdist' 2>/dev/null; then
        workers=(-n 8) # compiling kernels takes most of the time
    fi
    # shellcheck disable=SC2086
    "$PYTHON" -m pytest -q -W default -m "$marker" "${workers[@]}" $files 2>&1 | tee "$TEMPORARY/tests"
    local ended=${PIPESTATUS[0]}
    # Tests that are all skipped end well, too.
    [ "$ended" = 0 ] && grep -q ' passed' "$TEMPORARY/tests"
}

bench() {
    "$PYTHON" -m "bench.$1" --budget "$BUDGET" --out "$OUT" --no-plot "${@:2}"
}

# `timeout` starts programs, so a function reaches it through a shell of its own.
export -f build tests bench
export DRY PYTHON OUT TEMPORARY
in_shell() { step "$1" "$2" bash -o pipefail -c '"$@"' "$1" "${@:3}"; }

in_shell build 100 build
in_shell tests 130 tests
in_shell kernels 90 bench kernels
in_shell block 130 bench block --lengths 8192 32768 131072
in_shell training 60 bench training
in_shell plot 20 "$PYTHON" -m bench.plot "$OUT"

echo
cat "$OUT/summary.txt"
echo "results: $OUT"
exit $FAILED
