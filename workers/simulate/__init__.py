"""A simulated inference endpoint: `python -m workers.simulate --port 0 --latency 200ms --slots 8 --fail-for 5s`.

It answers like an OpenAI-compatible server or an NPU worker, at once or after a set latency, and misbehaves on demand:
by its options, by `POST /control` while it runs, or by a field `x_sim` in the body of a single request. An answer holds
a digest of its prompt, and the X-Request-Id of its request if that had one, so that it can be matched to its question.
For the demo, docker compose, benches and tests.

| path                                              | answer                                                         |
|---------------------------------------------------|----------------------------------------------------------------|
| POST /v1/chat/completions, /v1/completions        | a completion; with `"stream": true` an event stream            |
| POST /v1/embeddings                               | vectors of 8 numbers                                           |
| POST /inference, /embeddings                      | an NPU worker's `{"success": true, ...}`                       |
| GET /health, /v1/models                           | 200, unless told otherwise                                     |
| GET /stats                                        | what it saw, see `Stats`                                       |
| POST /control                                     | settings as in `Behaviour`, as JSON; answers those in force    |
"""
