"""Bundled tasks, one JSONL and one TOML each; installed as `specbench.tasks`."""
