# A replica's image: Ckpt-engine in the image of an engine (or a trainer's, in the image of its framework), whose own
# packages stay as they are. From the checkout:
#   docker build -f images/engine.Dockerfile --build-arg IMAGE=vllm/vllm-openai:v0.32.0 -t ckpt-engine-vllm:0.1.0 .
ARG PYTHON_IMAGE=python:3.11-slim
ARG IMAGE=vllm/vllm-openai:v0.32.0

FROM ${PYTHON_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ENV PIP_INDEX_URL=${PIP_INDEX_URL} PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL} PIP_FIND_LINKS=${PIP_FIND_LINKS}
WORKDIR /src
RUN python -m venv /build && /build/bin/python -m pip install --no-cache-dir setuptools==80.9.0

FROM build AS wheel
ARG SOURCE_DATE_EPOCH=1767225600
COPY LICENSE README.md pyproject.toml ./
COPY adapters adapters
COPY ckpt_engine ckpt_engine
RUN chmod -R u=rwX,go=rX . && /build/bin/python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${IMAGE} AS replica
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
# The Python that has the engine, as this image calls it.
ARG PYTHON=python3
USER 0:0
COPY --from=wheel /wheels /tmp/ckpt-engine
# Every package that is there is held at its version: what Ckpt-engine lacks is added, and if that cannot be without a
# change, pip says why and the build ends.
RUN ${PYTHON} -m pip list --format=freeze > /tmp/ckpt-engine/there.txt && ${PYTHON} -m pip install --no-cache-dir --constraint /tmp/ckpt-engine/there.txt /tmp/ckpt-engine/*.whl && rm -r /tmp/ckpt-engine
RUN grep -q ":10001:10001:" /etc/passwd || { groupadd --gid 10001 ckpt-engine && useradd --uid 10001 --gid 10001 --home-dir /var/lib/ckpt-engine --no-create-home --shell /usr/sbin/nologin ckpt-engine; } && install --directory --owner=10001 --group=10001 --mode=0700 /var/lib/ckpt-engine
# What engines compile and download goes here, and to /tmp: both are volumes where the root is read-only.
ENV HOME=/var/lib/ckpt-engine
VOLUME /var/lib/ckpt-engine
USER 10001:10001
ENTRYPOINT ["ckpt-engine"]
CMD ["agent", "--help"]
