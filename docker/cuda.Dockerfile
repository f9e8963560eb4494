# rlgraph on NVIDIA GPUs:  docker build -f docker/cuda.Dockerfile -t rlgraph:cuda .
#                          docker run --rm --gpus all --shm-size=8g rlgraph:cuda doctor
# The versions are those that docs/parallel.md was measured with. The image has a compiler, with which vLLM and torch build kernels while they run.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12-dev python3.12-venv g++ libnuma1 openssl \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH

RUN python -m pip install --no-cache-dir "torch==2.11.0" "vllm==0.26.0" "ray[cgraph]>=2.44" "transformers>=5.16,<5.20"

WORKDIR /opt/rlgraph
COPY pyproject.toml setup.py README.md LICENSE ./
COPY rlgraph rlgraph
COPY rlgraph_cli rlgraph_cli
COPY recipes recipes
RUN python -m pip install --no-cache-dir ".[vllm,data,rewards,tensorboard]"

RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["rlgraph"]
CMD ["doctor"]
