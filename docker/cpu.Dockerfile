# Answers on x86-64 and arm64 CPUs, from a bundle mounted at /bundle:
#
#   docker build --file docker/cpu.Dockerfile --tag vtx .
#   docker run --rm --volume $PWD/llava-7b:/bundle:ro --volume $PWD:/data:ro vtx /data/photo.jpg "What is on the table?"
#
# and over HTTP, as docker/compose.yaml does:
#
#   docker build --file docker/cpu.Dockerfile --target serve --tag vtx-serve .
#
# Add --build-arg EXTRAS=cpu,openvino,serve on x86-64. Exporting is a workstation's work and is not in this image.
# Evidence: written from the documentation; the commands inside were run on x86-64 without Docker, and the tests parse
# the server's (tests/house/test_deployment.py).

FROM python:3.11-slim AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt build && python -m build --wheel --outdir /wheels .

FROM python:3.11-slim AS runtime
ARG EXTRAS=cpu,serve
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]" && rm -r /wheels
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home vtx
USER vtx
ENV VTX_BUNDLE=/bundle

FROM runtime AS serve
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/livez')"]
# an init, which passes signals on and ends what processes leave behind
ENTRYPOINT ["tini", "--", "vtx-serve", "--host", "0.0.0.0", "--port", "8000"]

FROM runtime
ENTRYPOINT ["vtx-run"]
CMD ["--help"]
