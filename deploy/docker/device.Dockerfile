# syntax=docker/dockerfile:1.7
# The device: the agent and its draft model on a CPU, amd64 and arm64. From the root of the repository:
#
#   docker buildx build --platform linux/amd64,linux/arm64 -f deploy/docker/device.Dockerfile \
#       -t edgespec/device:0.2.0 .
#
# It runs commands that end, and the endpoint that stays (`serve`); EXTRAS=cpu leaves that out.
ARG BASE=python:3.12.11-slim-bookworm

FROM ${BASE} AS build
ARG HATCHLING=1.27.0
ARG EXTRAS=cpu,serve
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/edgespec
ENV PATH=/opt/edgespec/bin:${PATH}
WORKDIR /src
RUN pip install "hatchling==${HATCHLING}"
COPY LICENSE NOTICE README.md constraints.txt hatch_build.py pyproject.toml ./
COPY edgespec edgespec
COPY sim sim
RUN pip install --no-build-isolation --constraint constraints.txt ".[${EXTRAS}]" \
    && pip uninstall --yes hatchling

FROM ${BASE}
LABEL org.opencontainers.image.title="edgespec device" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --system --gid 10001 edgespec \
    && useradd --system --uid 10001 --gid 10001 --home-dir /var/cache/edgespec \
        --shell /usr/sbin/nologin edgespec \
    && install --directory --owner=10001 --group=10001 --mode=0750 /var/cache/edgespec
COPY --from=build /opt/edgespec /opt/edgespec
ENV PATH=/opt/edgespec/bin:${PATH} \
    HOME=/var/cache/edgespec \
    HF_HOME=/var/cache/edgespec/huggingface \
    XDG_CACHE_HOME=/var/cache/edgespec \
    XDG_STATE_HOME=/var/cache/edgespec/state \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    VLLM_NO_USAGE_STATS=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    DO_NOT_TRACK=1
USER 10001:10001
WORKDIR /var/cache/edgespec
VOLUME /var/cache/edgespec
EXPOSE 7421
# A command that runs and ends: its exit code is its health. For the endpoint, deploy/README.md has a
# check to give to `docker run`.
HEALTHCHECK NONE
ENTRYPOINT ["edgespec"]
CMD ["--help"]
