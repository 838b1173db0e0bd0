"""specbench: benchmarks of speculative decoding that can be believed."""

__version__ = "0.1.0"
