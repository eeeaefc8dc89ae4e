# Builds engines and answers on a Jetson with JetPack 6 (TensorRT 10.3, CUDA 12.6, Python 3.10):
#
#   docker build --file docker/jetpack.Dockerfile --build-arg BASE=L4T_TENSORRT_IMAGE --tag vtx-jetson .
#   docker run --rm --runtime nvidia --volume $PWD/llava-7b:/bundle --entrypoint vtx-build vtx-jetson
#   docker run --rm --runtime nvidia --volume $PWD/llava-7b:/bundle:ro --volume $PWD:/data:ro vtx-jetson /data/photo.jpg "..."
#
# L4T_TENSORRT_IMAGE is NVIDIA's l4t-tensorrt runtime image for r10.3.0, which brings TensorRT and its Python package.
# Evidence: written from the documentation, never run on a Jetson.

ARG BASE
FROM ${BASE}
RUN apt-get update && apt-get install --yes --no-install-recommends python3-pip python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python3 -m venv --system-site-packages /opt/vtx && /opt/vtx/bin/pip install --no-cache-dir ".[jetson]" \
    && rm -r /src/*
ENV PATH=/opt/vtx/bin:$PATH VTX_BUNDLE=/bundle
ENTRYPOINT ["vtx-run"]
CMD ["--help"]
