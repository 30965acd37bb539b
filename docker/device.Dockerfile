# A device that trains: `raceme device`, for amd64 and arm64.
#
#   docker build -f docker/device.Dockerfile -t raceme-device .
#
# On an NVIDIA Jetson with JetPack 6, on NVIDIA's image, which brings torch for its GPU:
#
#   docker build -f docker/device.Dockerfile -t raceme-device-jetson \
#     --build-arg BASE=nvcr.io/nvidia/pytorch:25.06-py3-igpu .
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG TORCH=2.10.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# NVIDIA's images hold every package at the version that they were made with.
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# virtualenv, because NVIDIA's images lack what `python3 -m venv` needs. What the base image has,
# torch above all, is used from there; what virtualenv itself needs, filelock among it, must not
# seem to be there, as it is not in the second stage.
RUN python3 -m pip install --no-cache-dir --target /opt/virtualenv virtualenv==20.35.4 \
    && PYTHONPATH=/opt/virtualenv python3 -m virtualenv --system-site-packages /opt/raceme
RUN /opt/raceme/bin/python -c "import torch" 2>/dev/null \
    || /opt/raceme/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH}"
COPY pyproject.toml README.md LICENSE /src/
COPY raceme /src/raceme
COPY stubs /src/stubs
RUN /opt/raceme/bin/pip install --no-cache-dir /src

FROM ${BASE}
COPY --from=build /opt/raceme /opt/raceme
ENV PATH=/opt/raceme/bin:${PATH} \
    HOME=/tmp \
    USER=raceme \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    FLWR_TELEMETRY_ENABLED=0
RUN pip check
# A number: no account with it needs to exist in the base image. Give the key and the data to it.
USER 1000:1000
WORKDIR /tmp
# The file is touched whenever the SuperLink answers, a heartbeat at least every 30 s.
HEALTHCHECK --interval=60s --timeout=5s --start-period=180s --retries=2 \
    CMD ["sh", "-c", "test -n \"$(find /tmp/raceme-health -mmin -2)\""]
STOPSIGNAL SIGTERM
ENTRYPOINT ["raceme", "device", "--health-file", "/tmp/raceme-health"]
