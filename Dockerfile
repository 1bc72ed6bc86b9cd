# syntax=docker/dockerfile:1
# An image that serves a model; docs/install.md shows how to run it. PyTorch's wheels bring CUDA.
ARG PYTHON=3.13
# Extras of pyproject.toml, separated by spaces, for example "serve fleet".
ARG EXTRAS=serve

FROM python:${PYTHON}-slim AS wheel
ARG EXTRAS
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel . \
    && python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [each for extra in sys.argv[1:] for each in project['optional-dependencies'][extra] \
if not each.startswith('tridecode[')]; \
print(*project['dependencies'], *extras, sep='\n')" $EXTRAS > /wheel/requirements.txt

FROM python:${PYTHON}-slim
# Triton builds a launcher at the first run. The base has the headers of its Python, but no C compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# A layer of several GB. It is built again only if the dependencies change.
COPY --from=wheel /wheel/requirements.txt /
RUN pip install --no-cache-dir --requirement /requirements.txt
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel pip install --no-cache-dir --no-deps /wheel/*.whl

# Models are in a volume. Triton's cache, ~/.triton, is not: it fits the versions in this image.
ENV HF_HOME=/models NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --create-home --uid 1000 tridecode && install --directory --owner=1000 --group=1000 "$HF_HOME"
USER 1000
WORKDIR /home/tridecode
VOLUME /models
# To start without compiling, fill Triton's cache here: RUN tridecode precompile --gpu h100 --slots 16 --model ...

EXPOSE 8000
HEALTHCHECK --start-period=5m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["tridecode"]
CMD ["serve", "--host", "0.0.0.0"]
