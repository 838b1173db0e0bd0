"""specbench: benchmarks of speculative decoding that can be believed."""

from pathlib import Path

__version__ = "0.1.0"

# Installed, `specbench.methods` and `specbench.tasks` are folders of this package. In a checkout that is not
# installed they lie beside it, where pyproject.toml's package-dir has them from.
_checkout = Path(__file__).resolve().parents[1]
if (_checkout / "pyproject.toml").is_file() and (_checkout / "methods" / "__init__.py").is_file():
    __path__.append(str(_checkout))
