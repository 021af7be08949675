# quire in a container. docs/operate/processes.md has the steps. The two images differ in torch:
#
#     docker build -t quire .                      for CPUs
#     docker build -t quire:cuda --target cuda .   for NVIDIA GPUs (docker run --gpus all)
#
#     docker run --init -p 127.0.0.1:8000:8000 -v quire:/var/lib/quire quire serve --host 0.0.0.0 MODEL

ARG PYTHON=3.12

# Build the wheel as `make wheel` does. The check fails if the wheel lacks the C++ core, because
# quire would then work but be slow.
FROM python:${PYTHON}-slim AS wheel
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY src src
COPY .ci/check-wheel .ci/check-wheel
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && python .ci/check-wheel /wheels/*.whl

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
# The home directory holds models, packed weights and measurements of the machine.
RUN useradd --uid 10001 --create-home --home-dir /var/lib/quire quire
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["quire"]
CMD ["serve", "--host", "0.0.0.0"]

# triton compiles a launcher for each kernel, so it needs a C compiler.
FROM base AS cuda
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN pip install "$(ls /wheels/*.whl)[otel,events]"
USER quire
WORKDIR /var/lib/quire

# Install torch without CUDA, and delete its headers and tests. The first `quire generate` tests the
# image, and compiles the Python files that a server imports.
FROM base AS cpu
COPY --from=wheel /wheels /wheels
RUN pip install --no-compile --extra-index-url https://download.pytorch.org/whl/cpu "$(ls /wheels/*.whl)[otel,events]" \
    && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')" \
    && rm -rf torch/include torch/share torch/test \
    && find torch/bin -type f ! -name torch_shm_manager -delete \
    && python -c 'import torch; assert torch.version.cuda is None, "this is torch with CUDA"' \
    && HOME=/tmp/first quire generate --max-tokens 8 "Once upon a time" \
    && rm -rf /tmp/first
USER quire
WORKDIR /var/lib/quire
