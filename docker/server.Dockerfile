# The server, for amd64 and arm64.
#
#   docker build -f docker/server.Dockerfile -t raceme-server .
ARG BASE=python:3.11.13-slim-bookworm

FROM ${BASE} AS build
ARG TORCH=2.13.0
ARG TORCHVISION=0.28.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/raceme \
    && /opt/raceme/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" \
        "torch==${TORCH}" "torchvision==${TORCHVISION}"
COPY pyproject.toml README.md LICENSE /src/
COPY raceme /src/raceme
COPY stubs /src/stubs
RUN /opt/raceme/bin/pip install --no-cache-dir "/src[server]"

FROM ${BASE}
COPY --from=build /opt/raceme /opt/raceme
ENV PATH=/opt/raceme/bin:${PATH} \
    HOME=/tmp \
    USER=raceme \
    OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    MPLCONFIGDIR=/tmp/matplotlib \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1
RUN pip check
# A number: give the keys and the results to it.
USER 1000:1000
WORKDIR /tmp
EXPOSE 9092
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import ssl, urllib.request as u\nfor scheme in ('http', 'https'):\n    try:\n        u.urlopen(scheme + '://127.0.0.1:9093/healthz', timeout=2, context=ssl._create_unverified_context())\n        break\n    except Exception:\n        pass\nelse:\n    raise SystemExit(1)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["raceme", "serve"]
