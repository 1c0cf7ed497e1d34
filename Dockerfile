# docker build --target cpu -t hybridflow:cpu .
# docker build --target cuda -t hybridflow:cuda .
# docker run --rm -it --gpus all --shm-size 16g -v "$PWD:/data" hybridflow:cuda train recipe.toml

FROM python:3.12-slim AS base
# A C compiler builds the kernels for CPUs and those of Triton, when a run first needs them; KubeRay's probes use wget.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev wget && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/hybridflow
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY recipes recipes
COPY examples examples
COPY launch launch

FROM base AS cpu
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir ${TORCH} && pip install --no-cache-dir ".[lora,tensorboard]"
WORKDIR /data
ENTRYPOINT ["hybridflow"]
CMD ["--help"]

FROM base AS cuda
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[lora,tensorboard,vllm]" "ray[default]"
WORKDIR /data
ENTRYPOINT ["hybridflow"]
CMD ["--help"]
