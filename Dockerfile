# The server. For a reproducible image give a base by digest: `docker buildx imagetools inspect python:3.12-slim-bookworm`
# prints it, then --build-arg BASE=python@sha256:...
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS builder
ARG TORCH_INDEX=""
WORKDIR /src
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv /opt/deltaline \
    && /opt/deltaline/bin/pip install -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '.[server]'

FROM ${BASE}
LABEL org.opencontainers.image.title="deltaline" \
      org.opencontainers.image.description="A stateful gRPC service that holds the Gated DeltaNet layers of a language model" \
      org.opencontainers.image.licenses="Apache-2.0"
# gcc stays: when the first kernel runs, Triton compiles its driver and launchers in C. The headers of Python are in the
# base. Versions are the base's: its digest fixes them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && install --directory --mode=0700 --owner=10001 --group=10001 /var/cache/deltaline /var/cache/deltaline/triton
COPY --from=builder /opt/deltaline /opt/deltaline
ENV PATH=/opt/deltaline/bin:$PATH \
    HOME=/var/cache/deltaline \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    PYTHONUNBUFFERED=1 \
    TRITON_CACHE_DIR=/var/cache/deltaline/triton \
    DELTALINE_HOST=0.0.0.0
USER 10001:10001
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
# The start period covers the loading of a checkpoint and the self-test.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 CMD ["python", "-m", "deltaline_server.healthcheck"]
ENTRYPOINT ["deltaline-server"]
