#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks on one NVIDIA GPU what continuous integration cannot:
#
#   scripts/gpu_check.sh [--bundle FOLDER] [--again] [REPORT]
#
# Makes an environment with vLLM's CUDA build, from the package index or from a bundle (scripts/gpu_bundle.py), and runs
# parts in order of value, each with a time limit of its own: the first tell most, and all end within 25 minutes
# (LIMIT_MIN). Each part prints one line, and writes its result and log to build/gpu/COMMIT at once. Run again, it goes
# on: parts that passed are not repeated, unless with --again. The report is written after each part; its default name
# is docs/gpu/DATE_DEVICE.md, and docs/devices.md gets a link to it. Without what it needs it says what is missing and exits with 2; after a failure with 1.
#   PYTHON  the Python for the environment (default: python3)
#   VENV    the environment (default: .venv-cuda); it is kept, so a second run is faster
set -euo pipefail

bundle=
again=
while [ $# -gt 0 ]; do
    case $1 in
        --bundle) bundle=$(realpath -- "${2:?--bundle needs a folder}") && shift ;;
        --again) again=yes ;;
        -*) echo "scripts/gpu_check.sh: there is no option $1" >&2 && exit 2 ;;
        *) report=$(realpath -m -- "$1") ;;
    esac
    shift
done
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=$(realpath -m -- "${VENV:-.venv-cuda}")
deadline=$(($(date +%s) + 60 * ${LIMIT_MIN:-25}))
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
state=build/gpu/$commit
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
    local free
    [ "$(uname -s)" = Linux ] || echo "- Linux"
    if ! command -v nvidia-smi >/dev/null; then
        echo "- an NVIDIA GPU and its driver: there is no nvidia-smi on PATH"
    elif ! nvidia-smi --list-gpus | grep -q GPU; then
        echo "- an NVIDIA GPU: nvidia-smi lists none"
    elif [ "$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)" -lt 16000 ]; then
        echo "- a GPU of 16 GB or more"
    fi
    command -v "$python" >/dev/null || echo "- $python (PYTHON names another)"
    [ -z "$bundle" ] || [ -e "$bundle/bundle.json" ] || echo "- a bundle in $bundle: it has no bundle.json"
    free=$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9)
    [ -e "$venv/.ready-cuda" ] || [ "$free" -ge 20 ] || echo "- 20 GB of disk for the environment; $free GB are free"
}

# part NAME SECONDS TITLE COMMAND...: at most SECONDS, and not beyond the deadline. Its result is a line in
# $state/NAME.result.
part() {
    local name=$1 limit=$2 title=$3 left started status=0 result
    shift 3
    if [ -z "$again" ] && grep -qs '^passed' "$state/$name.result"; then
        echo "$title: $(cat "$state/$name.result"), before"
        return 0
    fi
    left=$((deadline - $(date +%s)))
    limit=$((limit < left ? limit : left))
    if [ "$limit" -le 0 ]; then
        result="not run, no time was left"
        : >"$state/$name.log"
        failed=1
    else
        started=$(date +%s)
        timeout --kill-after=10 "$limit" "$@" >"$state/$name.log" 2>&1 </dev/null || status=$?
        case $status in
            0) result=passed ;;
            124 | 137) result="FAILED, stopped after $limit s" ;;
            *) result="FAILED with status $status" ;;
        esac
        result="$result ($(($(date +%s) - started)) s)"
        [ "$status" = 0 ] || failed=1
    fi
    echo "$result" >"$state/$name.result"
    echo "$title" >"$state/$name.title"
    echo "$name" >>"$state/order"
    echo "$title: $result"
    write_report
}

# All results of this commit so far: a table, and the end of each log.
write_report() {
    local name link
    mkdir -p "$(dirname "$report")"
    {
        printf '# GPU check of %s\n\n```\n' "$(date -u +'%Y-%m-%d %H:%M UTC')"
        git log -1 --format='commit %h of %cs: %s' 2>/dev/null || true
        nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
        echo "$(nproc --all) cores, $(free -g | awk '/^Mem:/ {print $2}') GiB"
        printf '```\n\n| part | result |\n|---|---|\n'
        for name in $(awk '!seen[$0]++' "$state/order"); do
            printf '| %s | %s |\n' "$(cat "$state/$name.title")" "$(cat "$state/$name.result")"
        done
        for name in $(awk '!seen[$0]++' "$state/order"); do
            printf '\n## %s\n\n```\n' "$(cat "$state/$name.title")"
            tail -n 60 "$state/$name.log"
            printf '```\n'
        done
    } >"$report.part"
    mv "$report.part" "$report"
    link="](gpu/$(basename "$report"))"
    if [ "$(dirname "$report")" = "$PWD/docs/gpu" ] && ! grep -qF "$link" docs/devices.md; then
        printf '\n- [%s%s\n' "$(basename "$report" .md)" "$link" >>docs/devices.md
    fi
}

set_up() {
    if [ -n "$bundle" ]; then
        "$python" scripts/gpu_bundle.py install "$bundle" "$venv" && touch "$venv/.ready-cuda"
    else
        "$python" scripts/set_up.py "$venv" "$venv/.ready-cuda" cuda
    fi
}

tests() { "$venv/bin/python" -m pytest --timeout=300 -q -p no:cacheprovider "$@"; }
benchmark() { "$venv/bin/python" "benchmarks/$1.py" --quick "${@:2}"; }

missing=$(find_missing)
if [ -n "$missing" ]; then
    printf 'scripts/gpu_check.sh needs, and did not find:\n%s\n' "$missing" >&2
    exit 2
fi
name=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1 | tr -cs '[:alnum:]\n' -)
report=${report:-$PWD/docs/gpu/$(date -u +%F)_${name%-}.md}
mkdir -p "$state"
[ -z "$again" ] || rm -f "$state"/*
export -f set_up tests benchmark
export bundle python venv
models=tests/model_executor/models

if [ ! -e "$venv/.ready-cuda" ]; then
    rm -f "$state/install.result"
fi
part install 480 "Installation" bash -ec set_up
part device 90 "Device" "$venv/bin/python" -c "$device"
if [ "$failed" = 0 ]; then
    part text 120 "Text" bash -ec 'tests tests/gpu/test_text.py'
    part qwen3_omni 180 "Qwen3-Omni, eager" bash -ec 'tests tests/gpu/test_omni_models.py -k "qwen3_omni_moe and eager"'
    part qwen3_omni_graphs 240 "Qwen3-Omni, CUDA graphs" \
        bash -ec 'tests tests/gpu/test_omni_models.py -k "qwen3_omni_moe and graphs"'
    part qwen2_5_omni 300 "Qwen2.5-Omni" bash -ec 'tests tests/gpu/test_omni_models.py -k qwen2_5_omni'
    part diffusion 180 "Diffusion" bash -ec 'tests tests/gpu/test_diffusion.py'
    part speech 240 "Text to speech" \
        bash -ec "tests $models/csm $models/qwen3_tts $models/higgs_audio_v2 $models/vibevoice"
    part async 180 "Asynchronous scheduling" bash -ec 'tests tests/engine/test_async_scheduling.py'
    versus="benchmark serve --parts vllm offline --sizes large --concurrency 1 64 256"
    part versus_v1 240 "Text beside plain vLLM, V1 model runner" \
        env VLLM_USE_V2_MODEL_RUNNER=0 bash -ec "$versus --async-scheduling"
    part versus_v2 240 "Text beside plain vLLM, V2 model runner" \
        env VLLM_USE_V2_MODEL_RUNNER=1 bash -ec "$versus --async-scheduling"
    part versus_sync 240 "Text beside plain vLLM, V1 model runner, step by step" \
        env VLLM_USE_V2_MODEL_RUNNER=0 bash -ec "$versus --no-async-scheduling"
    part large_omni 420 "Qwen3-Omni, large, with 1, 8 and 64 clients, beside transformers" bash -ec 'benchmark streaming --part large'
    part failure 240 "Kill, restart and memory" bash -ec 'tests tests/gpu/test_memory.py tests/gpu/test_failure.py'
    part bfloat16 180 "bfloat16" bash -ec 'tests tests/gpu/test_omni_variants.py'
    part diffusion_speed 180 "Diffusion beside diffusers" bash -ec 'benchmark diffusion'
fi
echo "the report: $report"
exit "$failed"
