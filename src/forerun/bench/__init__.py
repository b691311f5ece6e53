"""Any OpenAI-compatible server under load: workloads, a timed client, speculation counters of each engine, reports."""
