# Answers on x86-64 and arm64 CPUs, from a bundle mounted at /bundle:
#
#   docker build --file docker/cpu.Dockerfile --tag vtx .
#   docker run --rm --volume $PWD/llava-7b:/bundle:ro --volume $PWD:/data:ro vtx /data/photo.jpg "What is on the table?"
#
# Add --build-arg EXTRAS=cpu,openvino on x86-64. Exporting is a workstation's work and is not in this image.
# Evidence: written from the documentation; the commands inside were run on x86-64 without Docker.

FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt build && python -m build --wheel --outdir /wheels .

FROM python:3.11-slim
ARG EXTRAS=cpu
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]" && rm -r /wheels
RUN useradd --create-home vtx
USER vtx
ENV VTX_BUNDLE=/bundle
ENTRYPOINT ["vtx-run"]
CMD ["--help"]
