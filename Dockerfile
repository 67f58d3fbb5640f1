# One image for every role: `docker run headrace worker`, `... run`, `... status`; the sample endpoints of compose too.
FROM python:3.13-slim AS build
WORKDIR /src
RUN python -m venv /opt/headrace
# the dependencies first: they change less often than the code, and this layer is then kept
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib as t; p = t.load(open('pyproject.toml', 'rb'))['project']; \
      print(*p['dependencies'], *p['optional-dependencies']['api'], sep='\n')" \
      > requirements.txt \
 && /opt/headrace/bin/pip install --no-cache-dir --quiet -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY broker broker
COPY workers workers
RUN /opt/headrace/bin/pip install --no-cache-dir --quiet --no-deps .

FROM python:3.13-slim
RUN groupadd --gid 10001 headrace \
 && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /data --shell /usr/sbin/nologin headrace \
 && install -d -o headrace -g headrace /data
COPY --from=build /opt/headrace /opt/headrace
COPY broker/data/demo.jsonl /usr/share/headrace/demo.jsonl
ENV PATH=/opt/headrace/bin:$PATH PYTHONUNBUFFERED=1
# as a number, so that Kubernetes' runAsNonRoot can tell that it is not root
USER 10001:10001
WORKDIR /data
# Healthy: Redis answers and suits us; it is sought where HEADRACE_CONFIG or REDIS_URL says. docker-compose.yml asks more
# of a worker, and something else of a role that serves HTTP.
HEALTHCHECK --interval=15s --timeout=10s --start-period=20s --retries=3 CMD ["headrace", "status"]
ENTRYPOINT ["headrace"]
CMD ["worker"]
