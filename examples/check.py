"""Execute the example notebooks with nbval, against a broker of their own.

Each notebook runs in its own pytest process (as `pytest --nbval-lax NOTEBOOK` does by hand); the
broker that they share lives in a temporary folder and is stopped at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent


def main() -> int:
    """Run every notebook; the exit status is that of the tests."""
    notebooks = sorted(EXAMPLES.glob("*.ipynb"))
    with tempfile.TemporaryDirectory(prefix="fp-", dir="/tmp") as home:
        environment = {**os.environ, "FIREPOOL_HOME": home, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        try:
            return subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", "-q", "--nbval-lax"),
                    *("-p", "no:cacheprovider", "--nbval-cell-timeout", "120"),
                    *("-W", "ignore::DeprecationWarning", "--override-ini", "asyncio_mode=strict"),
                    *map(str, notebooks),
                ],
                env=environment,
                check=False,
            ).returncode
        finally:
            subprocess.run(
                [sys.executable, "-m", "firepool_nb.cli", "stop"], env=environment, check=False
            )


if __name__ == "__main__":
    sys.exit(main())
