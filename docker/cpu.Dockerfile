# rlgraph on a CPU, from the pinned lock:  docker build -f docker/cpu.Dockerfile -t rlgraph:cpu .
#                                          docker run --rm --shm-size=2g rlgraph:cpu doctor
FROM python:3.11-slim-bookworm

# g++ compiles torch's kernels for this CPU while they run, and the packages without a wheel; libnuma places the threads of vLLM;
# openssl makes the certificates of encrypted connections.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 openssl \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rlgraph
# An index with torch built for CPUs, if the default one has only CUDA builds: --build-arg TORCH_INDEX=URL.
ARG TORCH_INDEX=
COPY requirements/cpu.lock requirements/from_source.lock requirements/
RUN python -m pip install --no-cache-dir --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    -r requirements/cpu.lock -r requirements/from_source.lock

COPY pyproject.toml setup.py README.md LICENSE ./
COPY rlgraph rlgraph
COPY rlgraph_cli rlgraph_cli
COPY recipes recipes
# The import fails the build, rather than the first run, if a package lacks a library.
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && python -c "import torch, vllm, reasoning_gym, rlgraph"

# Not root: the sandbox of tools then works in a user namespace, where the host allows one.
RUN useradd --create-home trainer
USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["rlgraph"]
CMD ["doctor"]
