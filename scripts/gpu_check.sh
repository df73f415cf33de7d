#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks on one NVIDIA GPU what continuous integration cannot: `scripts/gpu_check.sh [REPORT]`, default gpu_report.md.
#
# Installs the CUDA build, runs the tests marked `gpu` and the benchmarks on the large sizes, and writes one report, all
# within 25 minutes (LIMIT_MIN). Without what it needs it says what is missing and exits with 2; after a failure with 1.
#   PYTHON  the Python for the environment (default: python3)
#   VENV    the environment (default: .venv-cuda); it is kept, so a second run is faster
set -euo pipefail

report=$(realpath -m -- "${1:-gpu_report.md}")
cd "$(dirname "$0")/.."
venv=${VENV:-.venv-cuda}
deadline=$(($(date +%s) + 60 * ${LIMIT_MIN:-25}))
failed=0
device='
import diffusers, torch, transformers, vllm
from vllm.platforms import current_platform
assert current_platform.is_cuda() and torch.cuda.is_available(), (current_platform, torch.version.cuda)
print(torch.cuda.get_device_name(0), *(f"{m.__name__} {m.__version__}" for m in (vllm, torch, transformers, diffusers)))
'
# Float32 as it is, not rounded to TensorFloat-32; tiny models are fastest on one thread of the CPU.
export NVIDIA_TF32_OVERRIDE=0 TRITON_F32_DEFAULT=ieee OMP_NUM_THREADS=1 VLLM_LOGGING_LEVEL=WARNING PYTHONUNBUFFERED=1

# Prints a line for each thing.
find_missing() {
    local python=${PYTHON:-python3} free
    [ "$(uname -s)" = Linux ] || echo "- Linux"
    if ! command -v nvidia-smi >/dev/null; then
        echo "- an NVIDIA GPU and its driver: there is no nvidia-smi on PATH"
    elif ! nvidia-smi --list-gpus | grep -q GPU; then
        echo "- an NVIDIA GPU: nvidia-smi lists none"
    elif [ "$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)" -lt 16000 ]; then
        echo "- a GPU of 16 GB or more"
    fi
    command -v "$python" >/dev/null || echo "- $python (PYTHON names another)"
    free=$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9)
    [ -e "$venv/.ready-cuda" ] || [ "$free" -ge 20 ] || echo "- 20 GB of disk for the environment; $free GB are free"
}

# run TITLE SECONDS COMMAND...: adds a section to the report; at most SECONDS, and not beyond the deadline.
run() {
    local title=$1 limit=$2 left started status=0 log
    shift 2
    left=$((deadline - $(date +%s)))
    limit=$((limit < left ? limit : left))
    if [ "$limit" -le 0 ]; then
        printf '\n## %s: not run, no time was left\n' "$title" >>"$report"
        failed=1
        return 0
    fi
    echo "==> $title"
    log=$(mktemp)
    started=$(date +%s)
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$log" || status=$?
    {
        printf '\n## %s: ' "$title"
        case $status in
            0) printf 'passed' ;;
            124 | 137) printf 'FAILED, stopped after %s s' "$limit" ;;
            *) printf 'FAILED with status %s' "$status" ;;
        esac
        printf ' (%s s)\n\n```\n' "$(($(date +%s) - started))"
        tail -n 80 "$log"
        printf '```\n'
    } >>"$report"
    rm -f "$log"
    [ "$status" = 0 ] || failed=1
}

missing=$(find_missing)
if [ -n "$missing" ]; then
    printf 'scripts/gpu_check.sh needs, and did not find:\n%s\n' "$missing" >&2
    exit 2
fi

{
    printf '# GPU check of %s\n\n```\n' "$(date -u +'%Y-%m-%d %H:%M UTC')"
    git log -1 --format='commit %h of %cs: %s' || true
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    echo "$(nproc) cores, $(free -g | awk '/^Mem:/ {print $2}') GiB"
    printf '```\n'
} >"$report"
run "Installation" 480 "${PYTHON:-python3}" scripts/set_up.py "$venv" "$venv/.ready-cuda" cuda
if [ "$failed" = 0 ]; then
    run "Device" 120 "$venv/bin/python" -c "$device"
fi
if [ "$failed" = 0 ]; then
    run "Tests" 780 "$venv/bin/python" -m pytest -m gpu --timeout=300 -q tests/gpu
    run "Asynchronous scheduling" 360 "$venv/bin/python" -m pytest --timeout=300 -q tests/engine/test_async_scheduling.py
    for checkpoint in qwen3_omni_moe qwen2_5_omni; do
        run "The pipeline and its slowest stage, $checkpoint" 180 "$venv/bin/python" benchmarks/efficiency.py \
            --quick --parts slowest --size large --checkpoint "$checkpoint"
    done
    run "Diffusion" 180 "$venv/bin/python" benchmarks/diffusion.py --quick
fi
echo "the report: $report"
exit "$failed"
