# Answers with libvtx, without Python, on the architecture of the package; build it in a folder with the package of
# `make dist-cpp`:
#
#   docker build --file docker/cpp.Dockerfile --tag vtx-cpp dist
#   docker run --rm --network none --volume $PWD/llava-7b:/bundle:ro --volume $PWD:/data:ro vtx-cpp /data/photo.jpg "What is on the table?"
#
# Evidence: the package was installed in a Debian 12 of its own by the tests (tests/house/test_ship.py); not run with Docker.

FROM debian:12-slim
COPY vtx_*.deb /packages/
RUN dpkg --install /packages/vtx_*_$(dpkg --print-architecture).deb && rm -r /packages
RUN useradd vtx
USER vtx
ENV VTX_BUNDLE=/bundle
ENTRYPOINT ["vtx-cpp-run"]
CMD ["--help"]
