# Three images: docker build --target bind|build|serve -t sdflow .

# Puts weights and LoRAs into imported structures, for every target; no PyTorch.
FROM python:3.11-slim AS bind
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY sdflow sdflow
RUN pip install --no-cache-dir -c constraints.txt '.[bind,oci,remote,s3]'
ENV SDFLOW_CACHE=/cache HF_HOME=/cache/huggingface
WORKDIR /work
ENTRYPOINT ["sdflow"]
CMD ["--help"]

# Builds and verifies everything, on the CPU.
FROM bind AS build
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir -c /src/constraints.txt '/src[cpu,oci,remote,s3]'
CMD ["doctor"]

# Serves the pipeline mounted at /pipeline; requests must send one of the keys in /run/secrets/api_key, one on each line.
FROM build AS serve
RUN pip install --no-cache-dir -c /src/constraints.txt '/src[cpu,serve]'
RUN useradd --create-home sdflow && mkdir -p /cache && chown sdflow /cache
USER sdflow
EXPOSE 8000
CMD ["serve", "/pipeline", "--host", "0.0.0.0", "--port", "8000", "--api-key-file", "/run/secrets/api_key"]
