"""`llama-server` out of the PyPI wheel `xllamacpp`: the same flags (as many as we use), a server like any other.

    python -m specbench.engines.xllamacpp_server -m target.gguf --port 18080 --spec-type ngram-simple

The wheel runs llama.cpp's own HTTP server on a thread of this process; this module sets its parameters and waits.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import threading
from typing import Any

PREFIX = "COMMON_SPECULATIVE_TYPE_"


def parser() -> argparse.ArgumentParser:
    """Flags by llama-server's names; what the wheel's parameters call them is each flag's `dest`."""
    made = argparse.ArgumentParser(prog="xllamacpp_server", description=__doc__.partition("\n")[0])
    add = made.add_argument
    add("--version", action="store_true")
    add("-m", "--model", dest="model.path")
    add("--host", dest="hostnames", default="127.0.0.1")
    add("--port", dest="port", type=int, default=8080)
    add("-c", "--ctx-size", dest="n_ctx", type=int, default=4096)
    add("-np", "--parallel", dest="n_parallel", type=int, default=1)
    add("-t", "--threads", dest="cpuparams.n_threads", type=int)
    add("-b", "--batch-size", dest="n_batch", type=int)
    add("-ub", "--ubatch-size", dest="n_ubatch", type=int)
    add("-ngl", "--n-gpu-layers", dest="n_gpu_layers", type=int)
    add("--metrics", dest="endpoint_metrics", action="store_true", default=None)
    add("--offline", dest="offline", action="store_true", default=None)
    add("--spec-type", dest="speculative.types", help="comma-separated")
    add("-md", "--spec-draft-model", dest="speculative.draft.mparams.path")
    add("-td", "--spec-draft-threads", dest="speculative.draft.cpuparams.n_threads", type=int)
    add("-ngld", "--spec-draft-ngl", dest="speculative.draft.n_gpu_layers", type=int)
    add("--spec-draft-n-max", dest="speculative.draft.n_max", type=int)
    add("--spec-draft-n-min", dest="speculative.draft.n_min", type=int)
    add("--spec-draft-p-min", dest="speculative.draft.p_min", type=float)
    for kind in ("simple", "map-k", "map-k4v"):
        for part in ("size-n", "size-m", "min-hits"):
            dest = f"speculative.ngram_{kind}.{part}".replace("-", "_")
            add(f"--spec-ngram-{kind}-{part}", dest=dest, type=int)
    for part in ("n-match", "n-min", "n-max"):
        add(f"--spec-ngram-mod-{part}", dest=f"speculative.ngram_mod.{part.replace('-', '_')}", type=int)
    return made


def main(argv: list[str]) -> int:
    given = vars(parser().parse_args(argv))
    if given.pop("version"):
        print(f"xllamacpp {importlib.metadata.version('xllamacpp')}")
        return 0
    import xllamacpp

    params = xllamacpp.CommonParams()
    for name, value in given.items():
        if value is not None:
            _set(params, name, _types(xllamacpp, value) if name == "speculative.types" else value)
    server = xllamacpp.Server(params)
    print(f"listening on {server.listening_address}", flush=True)
    threading.Event().wait()
    return 0


def _set(params: Any, name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        params = getattr(params, part)
    setattr(params, last, [value] if last == "hostnames" else value)


def _types(xllamacpp: Any, text: str) -> list[Any]:
    kinds = xllamacpp.common_speculative_type
    return [getattr(kinds, PREFIX + name.upper().replace("-", "_")) for name in text.split(",")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
