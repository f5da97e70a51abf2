# fedloom with torch for processors; for NVIDIA GPUs: docker build --build-arg TORCH=cu128 -t fedloom .
#
#   docker build -t fedloom .
#   docker run --rm --shm-size 2g -v "$PWD/results:/work/results" fedloom fedloom demo
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist .

FROM python:${PYTHON}-slim
# The name of one of torch's builds: cpu, cu126, cu128, ...
ARG TORCH=cpu
RUN pip install --no-cache-dir --index-url "https://download.pytorch.org/whl/${TORCH}" "torch>=2.6" "torchvision>=0.21"
COPY --from=wheel /dist /tmp/dist
RUN pip install --no-cache-dir /tmp/dist/*.whl && rm -r /tmp/dist
RUN useradd --create-home --uid 1000 fedloom \
    && install --directory --owner=fedloom --group=fedloom /work /work/results /work/cache
USER fedloom
WORKDIR /work
# Prepared data is kept beside the results; published data is looked for in /data.
ENV FEDLOOM_CACHE=/work/cache FEDLOOM_DATA=/data
CMD ["fedloom", "--help"]
