# The server, for a GPU (the default) or for CPUs alone:
#     docker build --target gpu -t deltaline .
#     docker build --target cpu -t deltaline:cpu --build-arg TORCH_INDEX=URL .
# TORCH_INDEX is a package index with other builds of torch, for example CPU-only ones; empty for pip's own. For an image
# that can be made again give the base by digest: `docker buildx imagetools inspect` prints it, then
# --build-arg BASE=python@sha256:...
ARG BASE=python:3.12.12-slim-bookworm

FROM ${BASE} AS builder
ARG TORCH_INDEX=""
WORKDIR /src
# What the server needs comes before its code: a change of the code installs nothing else again.
COPY constraints.txt pyproject.toml ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/deltaline \
    && python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = project['optional-dependencies']; \
needed = [*project['dependencies'], *extras['kernels'], *extras['server'], *extras['otel'], *extras['top']]; \
needed.remove('deltaline[kernels]'); \
print(*needed, sep='\n')" > /tmp/requirements.txt \
    && /opt/deltaline/bin/pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -r /tmp/requirements.txt \
    && python -m pip install -c constraints.txt hatchling
COPY . .
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . \
    && /opt/deltaline/bin/pip install --no-deps --no-index /tmp/wheel/*.whl

FROM ${BASE} AS runtime
ARG REVISION=""
LABEL org.opencontainers.image.title="deltaline" \
      org.opencontainers.image.description="A stateful gRPC service that holds the recurrent layers of a language model" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}"
# gcc stays: when the first kernel runs, Triton compiles its driver and launchers in C, against the headers of this very
# Python, which are in the base. The last line proves both. Versions are the base's: its digest fixes them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 deltaline \
    && useradd --uid 10001 --gid 10001 --home-dir /var/cache/deltaline --no-create-home --shell /usr/sbin/nologin deltaline \
    && install --directory --mode=0700 --owner=10001 --group=10001 /var/cache/deltaline /var/cache/deltaline/triton \
    && gcc -fsyntax-only -I"$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')" -include Python.h -x c /dev/null
COPY --from=builder /opt/deltaline /opt/deltaline
# DELTALINE_PORT is here so that the server and its health check can't differ: a variable goes before a file.
ENV PATH=/opt/deltaline/bin:$PATH \
    HOME=/var/cache/deltaline \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/var/cache/deltaline/triton \
    DELTALINE_HOST=0.0.0.0 \
    DELTALINE_PORT=50051
USER 10001:10001
WORKDIR /
EXPOSE 50051 9464
# The server drains: give `docker stop --time` more than --drain-timeout-s.
STOPSIGNAL SIGTERM
# The start period covers the loading of a checkpoint and the self-test.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["deltaline", "health"]
ENTRYPOINT ["deltaline-server"]

FROM runtime AS cpu
ENV DELTALINE_DEVICE=cpu

FROM runtime AS gpu
RUN ["python", "-c", "import torch; assert torch.version.cuda, 'expected a CUDA build of torch, got ' + torch.__version__"]
ENV DELTALINE_DEVICE=cuda \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
