# syntax=docker/dockerfile:1.7
# The verifier. Build from the root of the repository:
#
#   docker build -f deploy/docker/verifier.Dockerfile -t edgespec/verifier:0.2.0 .
#
# PyTorch's wheels include CUDA's libraries, so the base image needs only the settings that ask the
# container runtime for a GPU. Without a GPU, give TORCH_INDEX the CPU builds:
#
#   --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG BASE=nvidia/cuda:12.9.1-base-ubuntu24.04

FROM ${BASE} AS build
ARG TORCH_INDEX=https://pypi.org/simple
ARG HATCHLING=1.27.0
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
# The base image's tag fixes the distribution's release, whose archive keeps only the newest build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/edgespec
ENV PATH=/opt/edgespec/bin:${PATH}
WORKDIR /src
# Layers that rarely change come first, so that they stay in the builder's cache.
COPY constraints.txt ./
RUN pip install --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)" \
    && pip install "hatchling==${HATCHLING}"
COPY LICENSE NOTICE README.md hatch_build.py pyproject.toml ./
COPY edgespec edgespec
COPY sim sim
RUN pip install --no-build-isolation --constraint constraints.txt '.[server]' \
    && pip uninstall --yes hatchling

FROM ${BASE}
LABEL org.opencontainers.image.title="edgespec verifier" \
      org.opencontainers.image.licenses="Apache-2.0"
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --system --gid 10001 edgespec \
    && useradd --system --uid 10001 --gid 10001 --home-dir /var/cache/edgespec \
        --shell /usr/sbin/nologin edgespec \
    && install --directory --owner=10001 --group=10001 --mode=0750 /var/cache/edgespec
COPY --from=build /opt/edgespec /opt/edgespec
ENV PATH=/opt/edgespec/bin:${PATH} \
    HOME=/var/cache/edgespec \
    HF_HOME=/var/cache/edgespec/huggingface \
    XDG_CACHE_HOME=/var/cache/edgespec \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    VLLM_NO_USAGE_STATS=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    DO_NOT_TRACK=1
# By number, so that Kubernetes can see that it is not root.
USER 10001:10001
WORKDIR /var/cache/edgespec
VOLUME /var/cache/edgespec
EXPOSE 7420 9464
STOPSIGNAL SIGTERM
# Long before the first answer: a large model takes its time to load. With TLS, give the check of
# your compose file or pod `--ca` and `--set tls.server_name`.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=3 \
    CMD ["edgespec", "doctor", "--probe", "5", "--verifier", "127.0.0.1:7420"]
ENTRYPOINT ["edgespec"]
# Listening beyond the container requires a certificate or the option --insecure.
CMD ["verifier"]
