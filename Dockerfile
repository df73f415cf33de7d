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
# The versions that the tests run with.
RUN python -m pip install --no-cache-dir --constraint scripts/constraints.txt \
    --extra-index-url https://download.pytorch.org/whl/cpu ".[cpu]" ./packages/coloured_shapes
ENV OMP_NUM_THREADS=1 HF_HOME=/models
RUN useradd --create-home --uid 1000 omni && mkdir /models && chown omni /models
USER 1000
WORKDIR /home/omni
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s CMD ["curl", "-fsS", "http://localhost:8000/health"]
ENTRYPOINT ["vllm-omni", "serve"]
CMD ["shapes"]

# vLLM's image brings CUDA, torch and vLLM of one build; this package and what else it needs are added.
FROM vllm/vllm-openai:v0.32.0 AS cuda
WORKDIR /src
COPY . .
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir ".[cuda]" ./packages/coloured_shapes
ENV HF_HOME=/models
RUN useradd --create-home --uid 2000 omni && mkdir -p /models && chown omni /models
USER 2000
WORKDIR /home/omni
EXPOSE 8000
HEALTHCHECK --start-period=30m --interval=10s CMD ["curl", "-fsS", "http://localhost:8000/health"]
ENTRYPOINT ["vllm-omni", "serve"]
CMD ["Qwen/Qwen3-Omni-30B-A3B-Instruct"]
